"""Triton kernels, the same names and signatures as in `reference/`. Imported when an op first meets a CUDA tensor.

Every kernel reads strides, so views cost no copy, and offsets are 64-bit. Nothing here reads the device from the host.
"""

from ..reference.topk import topk_threshold  # a guess, which this folder's top-k doesn't need
from .absorb import absorb_queries, absorb_values
from .append import append_states
from .attend import block_partials
from .forced import forced_blocks
from .index import index_scores, index_topk
from .latent import latent_attention
from .latent_states import index_append, index_queries, latent_append
from .linear import grouped_linear
from .listed import listed_attention
from .masked import masked_attention
from .merge import merge_partials, repair_merge
from .predict import ema_step
from .rotate import rotate_append
from .score import infllm_scores, quest_scores
from .summary import compress_keys, update_summaries
from .tally import tally
from .topk import gvr_topk, select_blocks

__all__ = [
    "absorb_queries",
    "absorb_values",
    "append_states",
    "block_partials",
    "compress_keys",
    "ema_step",
    "forced_blocks",
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
    "quest_scores",
    "repair_merge",
    "rotate_append",
    "select_blocks",
    "tally",
    "topk_threshold",
    "update_summaries",
]
