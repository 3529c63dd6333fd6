"""Kernels of exact sparse decoding: block summaries, compressed keys, Quest and InfLLM-v2
scores, exact top-k, block partials, canonical merge, EMA.

Every op has a plain-torch reference in `reference/`: the definition of correct, and what runs where no kernel does.
Shape letters, the same in every file:

    B batch row   H KV head   G query head of one KV head   D head dim   T columns a K/V buffer holds
    S tokens in a block   N blocks   K block ids in a list   W compressed keys in a block   R score row   M hints

A batch row's block n covers the columns start + n*S .. start + (n+1)*S - 1, `start` being the column of the row's
first real token. Block lists are int32, ascending, -1 in unused slots, which come last.
"""

from .reference.attend import Partials, block_partials
from .reference.compress import compress_keys
from .reference.merge import merge_partials, repair_merge, slots_of
from .reference.predict import ema_predict, ema_update, normalise
from .reference.score import infllm_scores, quest_scores
from .reference.summary import update_summaries
from .reference.topk import TopKStats, gvr_topk

backend = "reference"

__all__ = [
    "Partials",
    "TopKStats",
    "backend",
    "block_partials",
    "compress_keys",
    "ema_predict",
    "ema_update",
    "gvr_topk",
    "infllm_scores",
    "merge_partials",
    "normalise",
    "quest_scores",
    "repair_merge",
    "slots_of",
    "update_summaries",
]
