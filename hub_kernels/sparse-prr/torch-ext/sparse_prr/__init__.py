"""Kernels of exact sparse decoding: block summaries, compressed keys, Quest and InfLLM-v2
scores, exact top-k, block partials, canonical merge, EMA; and a layer's linear parts over one token, also of latent
attention.

Every op has a plain-torch reference in `reference/`: the definition of correct, and what runs on a CPU. On a CUDA GPU
with Triton the kernels of `triton_kernels/` run.
Shape letters, the same in every file:

    B batch row   H KV head   G query head of one KV head   D head dim   T columns a K/V buffer holds
    S tokens in a block   N blocks   K block ids in a list   W compressed keys in a block   R score row   M hints
    Q query token   I index head   E its dim   C channels of a latent   A channels of a RoPE key   P predicted tokens
    X channels into a linear layer   Y channels out of it

A batch row's block n covers the columns start + n*S .. start + (n+1)*S - 1, `start` being the column of the row's
first real token and `end` the one behind its last, both [B] on the device. Block lists are int32, ascending, -1 in
unused slots, which come last.
"""

from . import dispatch, reference
from .reference import (
    EmaStep,
    Partials,
    Reach,
    TopKStats,
    ascending,
    ema_predict,
    ema_update,
    gather_tokens,
    normalise,
    slots_of,
)

absorb_queries = dispatch.by_device(reference.absorb_queries)
absorb_values = dispatch.by_device(reference.absorb_values)
append_states = dispatch.by_device(reference.append_states)
block_partials = dispatch.by_device(reference.block_partials)
compress_keys = dispatch.by_device(reference.compress_keys)
ema_step = dispatch.by_device(reference.ema_step)
forced_blocks = dispatch.by_device(reference.forced_blocks)
grouped_linear = dispatch.by_device(reference.grouped_linear)
gvr_topk = dispatch.by_device(reference.gvr_topk)
index_append = dispatch.by_device(reference.index_append)
index_queries = dispatch.by_device(reference.index_queries)
index_scores = dispatch.by_device(reference.index_scores)
index_topk = dispatch.by_device(reference.index_topk)
infllm_scores = dispatch.by_device(reference.infllm_scores)
latent_append = dispatch.by_device(reference.latent_append)
latent_attention = dispatch.by_device(reference.latent_attention)
listed_attention = dispatch.by_device(reference.listed_attention)
masked_attention = dispatch.by_device(reference.masked_attention)
merge_partials = dispatch.by_device(reference.merge_partials)
quest_scores = dispatch.by_device(reference.quest_scores)
repair_merge = dispatch.by_device(reference.repair_merge)
rotate_append = dispatch.by_device(reference.rotate_append)
select_blocks = dispatch.by_device(reference.select_blocks)
tally = dispatch.by_device(reference.tally)
topk_threshold = dispatch.by_device(reference.topk_threshold)
update_summaries = dispatch.by_device(reference.update_summaries)

backend = dispatch.backend()

__all__ = [
    "EmaStep",
    "Partials",
    "Reach",
    "TopKStats",
    "absorb_queries",
    "absorb_values",
    "append_states",
    "ascending",
    "backend",
    "block_partials",
    "compress_keys",
    "ema_predict",
    "ema_step",
    "ema_update",
    "forced_blocks",
    "gather_tokens",
    "grouped_linear",
    "gvr_topk",
    "index_append",
    "index_queries",
    "index_scores",
    "index_topk",
    "infllm_scores",
    "latent_append",
    "latent_attention",
    "listed_attention",
    "masked_attention",
    "merge_partials",
    "normalise",
    "quest_scores",
    "repair_merge",
    "rotate_append",
    "select_blocks",
    "slots_of",
    "tally",
    "topk_threshold",
    "update_summaries",
]
