"""Llama: also R1-Distill-Llama, SmolLM2 and Llama-3-1M."""

from transformers.models.llama import modeling_llama as llama

from hf_sparse_prr.patches._gqa import SparseGQA


class SparseLlamaAttention(SparseGQA, llama.LlamaAttention):
    """Rotates all of a head, in halves."""

    stock, modeling = llama.LlamaAttention, llama
    rotates = "halves"


ATTENTION = {"llama": SparseLlamaAttention}
