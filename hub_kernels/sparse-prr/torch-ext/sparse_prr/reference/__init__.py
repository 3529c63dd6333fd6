"""Plain-torch references of every op: the definition of correct, and what runs where no kernel does."""

from .attend import Partials, block_partials
from .compress import compress_keys
from .merge import merge_partials, repair_merge, slots_of
from .predict import ema_predict, ema_update, normalise
from .score import infllm_scores, quest_scores
from .summary import update_summaries
from .topk import TopKStats, gvr_topk

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
