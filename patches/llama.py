"""Llama: also R1-Distill-Llama, SmolLM2 and Llama-3-1M."""

import torch
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from hf_sparse_prr.patches._gqa import SparseGQA


class SparseLlamaAttention(SparseGQA, LlamaAttention):
    """LlamaAttention that decodes sparsely over a SparseCache."""

    eager_attention = staticmethod(eager_attention_forward)

    def project(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        return query, key, value


ATTENTION = LlamaAttention
SPARSE = SparseLlamaAttention
