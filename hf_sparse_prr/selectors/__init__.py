"""Selectors: how keys are summarised into blocks and how blocks are scored. One small file each.

A selector is stateless. What it keeps per layer is a tuple of tensors [B, H, N, ..], one entry a block, which the cache
grows, reorders, crops and copies with everything else. A block's entry must be a pure function of the valid keys up to
the block's last token: later tokens don't change it, and it doesn't matter how the tokens arrived.
"""

from .base import Columns, Scope, Selector, Summaries
from .infllm_v2 import InfLLMv2
from .quest import Quest

__all__ = ["SELECTORS", "Columns", "Scope", "Selector", "Summaries"]

# Your own, too: SELECTORS["name"] = YourSelector() makes SparseConfig(selector="name") mean it
SELECTORS: dict[str, Selector] = {"quest": Quest(), "infllm_v2": InfLLMv2()}
