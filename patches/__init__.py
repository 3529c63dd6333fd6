"""Attention classes of the supported families, by `config.model_type`. Imported when a model is patched."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_sparse_prr.patches._base import SparseAttention

# Files of this folder; a class where somebody's own code adds a family.
FAMILIES: "dict[str, str | type[SparseAttention]]" = {
    "deepseek_v32": "deepseek",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm",
    "glm_moe_dsa": "glm",
    "llama": "llama",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
}
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # select tokens by an indexer of their own; the others select blocks
_NO_INDEXER = "latent attention (MLA) without an indexer, its latents have no K/V blocks to select"
_LINEAR = "most of its layers are linear attention, which keeps no K/V to select from"
_NOT_YET = "selects tokens with an indexer of its own, which this version can't drive yet"
UNSERVED = {
    "deepseek_v2": f"DeepSeek-V2: {_NO_INDEXER}",
    "deepseek_v3": f"DeepSeek-V3: {_NO_INDEXER}",
    "deepseek_v4": f"DeepSeek-V4: {_NOT_YET}",
    "glm4_moe_lite": f"GLM-4-MoE-Lite: {_NO_INDEXER}",
    "glm5_next": f"GLM-5-Next: {_NOT_YET}",
    "qwen3_5": f"Qwen3.5: {_LINEAR}",
    "qwen3_5_moe": f"Qwen3.5-MoE: {_LINEAR}",
    "qwen3_next": f"Qwen3-Next: {_LINEAR}",
}


def family(model_type: str) -> "type[SparseAttention]":
    """The class that takes the place of a model's attention class, its `stock`.

    Raises:
        ValueError: an unknown model type; lists the supported ones, and says why where a known one can't be served.
    """
    if model_type not in FAMILIES:
        why = f" ({UNSERVED[model_type]})" if model_type in UNSERVED else ""
        raise ValueError(f"model_type: expected one of {', '.join(sorted(FAMILIES))}, got {model_type!r}{why}")
    found = FAMILIES[model_type]
    return import_module(f"{__name__}.{found}").ATTENTION[model_type] if isinstance(found, str) else found
