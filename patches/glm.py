"""GLM (GLM-4-9B), GLM-4 (GLM-4-0414, GLM-Z1) and GLM-4-MoE: RoPE on the first half of a head. GLM-MoE-DSA (GLM-5):
latent attention with indexers that some layers share."""

from transformers.models.glm import modeling_glm as glm
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_moe_dsa

from hf_sparse_prr.patches._gqa import SparseGQA
from hf_sparse_prr.patches._mla import SparseMLA


class SparseGlmAttention(SparseGQA, glm.GlmAttention):
    """Neighbouring channels are rotated together."""

    stock, modeling = glm.GlmAttention, glm
    rotates = "neighbours"


class SparseGlm4Attention(SparseGQA, glm4.Glm4Attention):
    """As GLM."""

    stock, modeling = glm4.Glm4Attention, glm4
    rotates = "neighbours"


class SparseGlm4MoeAttention(SparseGQA, glm4_moe.Glm4MoeAttention):
    """The two halves of what is rotated go together; queries and keys may be normalised."""

    stock, modeling = glm4_moe.Glm4MoeAttention, glm4_moe
    rotates = "halves"


class SparseGlmMoeDsaAttention(SparseMLA, glm_moe_dsa.GlmMoeDsaAttention):
    """Neighbouring channels are rotated together, in the indexer too. A layer hands on what it selected."""

    stock, modeling = glm_moe_dsa.GlmMoeDsaAttention, glm_moe_dsa
    extra_arguments = SparseMLA.extra_arguments | {"prev_topk_indices"}
    rotate_index = staticmethod(glm_moe_dsa.apply_rotary_pos_emb_interleave)
    index_rotates = "neighbours"
    hands_on = True


ATTENTION = {
    "glm": SparseGlmAttention,
    "glm4": SparseGlm4Attention,
    "glm4_moe": SparseGlm4MoeAttention,
    "glm_moe_dsa": SparseGlmMoeDsaAttention,
}
