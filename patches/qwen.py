"""Qwen2 and Qwen3, dense and mixture of experts. Layers with a sliding window stay as they are."""

from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from hf_sparse_prr.patches._gqa import SparseGQA


class SparseQwen2Attention(SparseGQA, qwen2.Qwen2Attention):
    """Biases on query, key and value."""

    stock, modeling = qwen2.Qwen2Attention, qwen2
    rotates = "halves"


class SparseQwen2MoeAttention(SparseGQA, qwen2_moe.Qwen2MoeAttention):
    """As Qwen2; the bias is an option."""

    stock, modeling = qwen2_moe.Qwen2MoeAttention, qwen2_moe
    rotates = "halves"


class SparseQwen3Attention(SparseGQA, qwen3.Qwen3Attention):
    """Queries and keys of each head are normalised before RoPE."""

    stock, modeling = qwen3.Qwen3Attention, qwen3
    rotates = "halves"


class SparseQwen3MoeAttention(SparseGQA, qwen3_moe.Qwen3MoeAttention):
    """As Qwen3; a sliding window, where there is one, is every layer's."""

    stock, modeling = qwen3_moe.Qwen3MoeAttention, qwen3_moe
    rotates = "halves"


ATTENTION = {
    "qwen2": SparseQwen2Attention,
    "qwen2_moe": SparseQwen2MoeAttention,
    "qwen3": SparseQwen3Attention,
    "qwen3_moe": SparseQwen3MoeAttention,
}
