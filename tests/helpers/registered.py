"""The registered attention: models under it, and one call of it."""

import pytest
import torch
from models import SPARSE, tiny_llama
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from hf_sparse_prr import SparseConfig, interface, register_attention
from hf_sparse_prr.hooks import cache_argument
from hf_sparse_prr.interface import NAME


@pytest.fixture(autouse=True)
def clean_registries():
    """For every test of a module that imports it: nothing stays registered."""
    yield
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)
    interface._WARNED.clear()


def register(**settings) -> interface.SparseAttention:
    register_attention(SparseConfig(**{**SPARSE, **settings}))
    return AttentionInterface._global_mapping[NAME]


def switched(model):
    model.set_attn_implementation(NAME)
    return model


def logits_of(model, ids, chunks, grad=False):
    """Of every token, fed in chunks of these lengths."""
    given = {cache_argument(): DynamicCache(config=model.config)}
    with torch.set_grad_enabled(grad):
        return torch.cat([model(part, **given).logits for part in ids.split(chunks, dim=1)], dim=1)


def attention_module():
    return tiny_llama().model.layers[1].self_attn


def random_states(count, columns=120, batch=2):
    """q [batch, 4, count, 8], K and V [batch, 2, columns, 8]."""
    torch.manual_seed(0)
    return [torch.randn(batch, heads, length, 8) for heads, length in ((4, count), (2, columns), (2, columns))]


def sdpa(*args, **kwargs):
    return AttentionInterface._global_mapping["sdpa"](*args, **kwargs)


def call(attention, mask=None, count=1, columns=120, module=None, **kwargs):
    """Outputs of the function and of SDPA for the same random q, K and V."""
    module, outputs = module or attention_module(), []
    for function in (attention, sdpa):
        states = random_states(count, columns)  # seeds dropout, too
        with torch.no_grad():
            outputs.append(function(module, *states, mask, **kwargs)[0])
    return outputs


def causal(count, columns=120, hidden=0):
    """[2, 1, count, columns] of queries whose last stands `hidden` columns before the end."""
    begin = columns - hidden - count
    return (torch.arange(columns) <= torch.arange(begin, begin + count)[:, None]).expand(2, 1, -1, -1)
