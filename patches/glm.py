"""GLM (GLM-4-9B), GLM-4 (GLM-4-0414, GLM-Z1) and GLM-4-MoE: RoPE on the first half of a head."""

from transformers.models.glm import modeling_glm as glm
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe

from hf_sparse_prr.patches._gqa import SparseGQA


class SparseGlmAttention(SparseGQA, glm.GlmAttention):
    """Neighbouring channels are rotated together."""

    stock, modeling = glm.GlmAttention, glm


class SparseGlm4Attention(SparseGQA, glm4.Glm4Attention):
    """As GLM."""

    stock, modeling = glm4.Glm4Attention, glm4


class SparseGlm4MoeAttention(SparseGQA, glm4_moe.Glm4MoeAttention):
    """The two halves of what is rotated go together; queries and keys may be normalised."""

    stock, modeling = glm4_moe.Glm4MoeAttention, glm4_moe


ATTENTION = {"glm": SparseGlmAttention, "glm4": SparseGlm4Attention, "glm4_moe": SparseGlm4MoeAttention}
