"""Shapes of published models by name, so that a benchmark or a test has the real heads without the weights.

The first six are the models of the PRR paper (arXiv 2606.30389). `source` says whose config.json the values are, and
where they were read.
"""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig


@dataclass(frozen=True)
class Shape:
    """One model's sizes.

    layers, hidden, intermediate, heads, kv_heads, head_dim, vocab, positions: as in its config.json.
    rope_theta: base of RoPE.  rotary_fraction: of head_dim that is rotated.  rope_scaling: a rope type and what it
    takes, None without scaling.  norm_eps: of RMSNorm.  attention_bias: of the q, k and v projections.
    tied: input and output embeddings are one.
    """

    model_type: str
    source: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    positions: int
    rope_theta: float
    norm_eps: float
    attention_bias: bool = False
    tied: bool = False
    rotary_fraction: float = 1.0
    rope_scaling: tuple[tuple[str, Any], ...] | None = None

    def config(self, layers: int | None = None, **overrides: Any) -> Any:
        """A transformers config of this shape, without special tokens, which may lie outside a cut vocabulary.

        Args:
            layers: depth, the model's own by default.
            overrides: fields of the transformers config, for instance vocab_size=64, intermediate_size=64.

        Raises:
            ValueError: layers < 1.
        """
        if layers is not None and layers < 1:
            raise ValueError(f"layers: expected an int >= 1, got {layers}")
        rope: dict[str, Any] = {"rope_type": "default", **dict(self.rope_scaling or ())}
        rope["rope_theta"] = self.rope_theta
        if self.rotary_fraction != 1.0:
            rope["partial_rotary_factor"] = self.rotary_fraction
        fields: dict[str, Any] = dict(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers if layers is None else layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.positions,
            rms_norm_eps=self.norm_eps,
            attention_bias=self.attention_bias,
            tie_word_embeddings=self.tied,
            rope_parameters=rope,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        config = AutoConfig.for_model(self.model_type, **{**fields, **overrides})
        if "eos_token_id" not in overrides:
            config.eos_token_id = None  # GLM's classes fill in their own
        return config


_LLAMA_8B: dict[str, Any] = dict(
    model_type="llama",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    norm_eps=1e-5,
)
_LLAMA_31: dict[str, Any] = dict(
    positions=131072,
    rope_theta=5e5,
    rope_scaling=(
        ("rope_type", "llama3"),
        ("factor", 8.0),
        ("low_freq_factor", 1.0),
        ("high_freq_factor", 4.0),
        ("original_max_position_embeddings", 8192),
    ),
)
_GLM_9B: dict[str, Any] = dict(
    layers=40,
    hidden=4096,
    intermediate=13696,
    heads=32,
    kv_heads=2,
    head_dim=128,
    vocab=151552,
    attention_bias=True,
    rotary_fraction=0.5,
)
_QWEN3: dict[str, Any] = dict(
    model_type="qwen3",
    hidden=5120,
    kv_heads=8,
    head_dim=128,
    vocab=151936,
    positions=40960,
    rope_theta=1e6,
    norm_eps=1e-6,
)

SHAPES: dict[str, Shape] = {
    "glm-4-9b": Shape(
        **_GLM_9B,
        model_type="glm",
        positions=131072,
        rope_theta=5e6,
        norm_eps=1.5625e-7,
        source="THUDM/glm-4-9b-chat-hf: the defaults of transformers' GlmConfig, equal to the config of "
        "THUDM/glm-4-9b-chat that training logs print; rope_theta is 10000 x its rope_ratio of 500",
    ),
    "glm-z1-9b": Shape(
        **_GLM_9B,
        model_type="glm4",
        positions=32768,
        rope_theta=1e4,
        norm_eps=1e-5,
        source="zai-org/GLM-Z1-9B-0414: slime, scripts/models/glm4-9B.sh, which trains it; head_dim and positions as "
        "in GLM-4-9B-0414",
    ),
    "deepseek-r1-8b": Shape(
        **_LLAMA_8B,
        **_LLAMA_31,
        source="deepseek-ai/DeepSeek-R1-Distill-Llama-8B: the geometry of Llama-3.1-8B, its base; layers, heads "
        "and positions as fitmygpu.com lists them",
    ),
    "llama-3-8b-1m": Shape(
        **_LLAMA_8B,
        positions=1048576,
        rope_theta=3580165449.0,
        source="gradientai/Llama-3-8B-Instruct-Gradient-1048k: the model table of public gpt-fast derivatives",
    ),
    "qwen3-14b": Shape(
        **_QWEN3,
        layers=40,
        intermediate=17408,
        heads=40,
        source="Qwen/Qwen3-14B: citsjtu2020/LLM-Prof, sglang/Model_Config.md",
    ),
    "qwen3-32b": Shape(
        **_QWEN3,
        layers=64,
        intermediate=25600,
        heads=64,
        source="Qwen/Qwen3-32B: citsjtu2020/LLM-Prof, sglang/Model_Config.md",
    ),
    "llama-3.1-8b": Shape(
        **_LLAMA_8B,
        **_LLAMA_31,
        source="meta-llama/Llama-3.1-8B: citsjtu2020/LLM-Prof, sglang/Model_Config.md",
    ),
    "smollm2": Shape(
        model_type="llama",
        layers=30,
        hidden=576,
        intermediate=1536,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab=49152,
        positions=8192,
        rope_theta=1e5,
        norm_eps=1e-5,
        tied=True,
        source="HuggingFaceTB/SmolLM2-135M: the metadata of the GGUF file that `make demo` runs",
    ),
}


def shape(name: str) -> Shape:
    """The shape of that name. ValueError listing the names there are."""
    if name not in SHAPES:
        raise ValueError(f"shape: expected one of {', '.join(SHAPES)}, got {name!r}")
    return SHAPES[name]
