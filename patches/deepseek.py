"""DeepSeek-V3.2: latent attention (MLA) with an indexer in every layer."""

from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek_v32

from hf_sparse_prr.patches._mla import SparseMLA


class SparseDeepseekV32Attention(SparseMLA, deepseek_v32.DeepseekV32Attention):
    """The indexer rotates the two halves of its RoPE channels together, attention neighbouring channels."""

    stock, modeling = deepseek_v32.DeepseekV32Attention, deepseek_v32
    rotate_index = staticmethod(deepseek_v32.apply_rotary_pos_emb)
    index_rotates = "halves"


ATTENTION = {"deepseek_v32": SparseDeepseekV32Attention}
