"""The tiny models: stock configurations of five families, byte-level, four layers, 1.6 to 2.4M parameters each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_sparse_prr.demo.loading import LoadError, no_foreign_bars

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 256  # bytes
_MODELS = Path(__file__).parent / "models"
POSITIONS = 32768
_ALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=POSITIONS,
    tie_word_embeddings=True,
    initializer_range=0.05,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
# Slow enough that most channel pairs hardly turn within 16K tokens: those match content, the fast ones find neighbours
_ROPE = {"rope_type": "default", "rope_theta": 1e7}
_GROUPED: dict[str, Any] = dict(num_key_value_heads=2, head_dim=64)
# All MLPs are dense: what is tested is attention. 512 tokens are 1/8 of 4K
_INDEXED: dict[str, Any] = dict(
    num_key_value_heads=4,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=64,
    first_k_dense_replace=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=64,
    index_topk=512,
    index_n_heads=4,
    index_head_dim=64,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(_GROUPED, rope_parameters=_ROPE),
    # Normalised queries and keys bound a logit by sqrt(head_dim) times both gains. With heads of 64, recall was .74 to
    # .90 of the answers at 4K in five trainings; with 128 and gains of 1.5 .88, with the 2.5 of start.py all of them
    # (H200, 6 minutes each, two at once)
    "qwen3": dict(_GROUPED, head_dim=128, rope_parameters=_ROPE),
    "glm4": dict(_GROUPED, rope_parameters={**_ROPE, "partial_rotary_factor": 0.5}),
    "deepseek_v32": dict(_INDEXED, rope_parameters=_ROPE),
    # As in GLM-5 some layers take the tokens of the layer before. Not the second: what the first layer sees of a token
    # can't tell what the second looks for, and with those shared 0 to .4 of the answers were right (H200, 5 minutes)
    "glm_moe_dsa": dict(_INDEXED, rope_parameters=_ROPE, indexer_types=["full", "full", "full", "shared"]),
}


def tiny_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a family; ValueError for one that has no tiny model."""
    from transformers import AutoConfig

    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    return AutoConfig.for_model(family, **{**_ALL, **FAMILIES[family], **overrides})


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Untrained, in float32."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family, **overrides))
    return model


def trained() -> tuple[str, ...]:
    """The families whose weights are in the package."""
    return tuple(family for family in FAMILIES if (_MODELS / family / "model.safetensors").is_file())


def load_tiny(family: str) -> PreTrainedModel:
    """The trained model of a family, from the package, in float32. ValueError for one whose weights aren't there."""
    if family not in trained():
        raise ValueError(f"family: expected one of {', '.join(trained())}, got {family!r}")
    return load_folder(_MODELS / family)


def of_bytes(folder: Path) -> bool:
    """Whether a folder holds a model as `train-tiny` writes it: 256 tokens, no tokenizer."""
    config = folder / "config.json"
    if not config.is_file() or any(folder.glob("*token*")) or any(folder.glob("vocab*")):
        return False
    try:
        found = json.loads(config.read_text())
    except ValueError:
        return False  # who loads it says so
    return isinstance(found, dict) and found.get("vocab_size") == VOCABULARY


def load_folder(folder: Path) -> PreTrainedModel:
    """The model of a folder, in float32, without a tokenizer. LoadError where there is none."""
    from transformers import AutoModelForCausalLM

    with no_foreign_bars():
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise LoadError(f"{folder}: transformers could not load it: {error}") from error
    return model.eval()
