"""Plain-torch references of every op: the definition of correct, and what runs where no kernel does."""

from .absorb import absorb_queries, absorb_values
from .append import append_states
from .attend import Partials, block_partials
from .compress import compress_keys
from .forced import Reach, forced_blocks
from .index import index_scores, index_topk
from .latent import gather_tokens, latent_attention
from .latent_states import index_append, index_queries, latent_append
from .linear import grouped_linear
from .listed import listed_attention
from .masked import masked_attention
from .merge import merge_partials, repair_merge, slots_of
from .predict import EmaStep, ema_predict, ema_step, ema_update, normalise
from .rotate import rotate_append
from .score import infllm_scores, quest_scores
from .select import ascending, select_blocks
from .summary import update_summaries
from .tally import tally
from .topk import TopKStats, gvr_topk, topk_threshold

backend = "reference"

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
