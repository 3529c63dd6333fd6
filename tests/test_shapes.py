"""Named model shapes: each builds a patched model with the real heads, cut down elsewhere."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_sparse_prr import patch_model
from hf_sparse_prr.patches import FAMILIES
from hf_sparse_prr.shapes import SHAPES, shape

pytestmark = pytest.mark.compat
# model type, layers, hidden, intermediate, heads, KV heads, head dim: as published
PUBLISHED = {
    "glm-4-9b": ("glm", 40, 4096, 13696, 32, 2, 128),
    "glm-z1-9b": ("glm4", 40, 4096, 13696, 32, 2, 128),
    "deepseek-r1-8b": ("llama", 32, 4096, 14336, 32, 8, 128),
    "llama-3-8b-1m": ("llama", 32, 4096, 14336, 32, 8, 128),
    "qwen3-14b": ("qwen3", 40, 5120, 17408, 40, 8, 128),
    "qwen3-32b": ("qwen3", 64, 5120, 25600, 64, 8, 128),
    "llama-3.1-8b": ("llama", 32, 4096, 14336, 32, 8, 128),
    "smollm2": ("llama", 30, 576, 1536, 9, 3, 64),
}
# In units of 10^9, embeddings included
PARAMETERS = {
    "glm-4-9b": 9.40,
    "glm-z1-9b": 9.40,
    "deepseek-r1-8b": 8.03,
    "llama-3-8b-1m": 8.03,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "llama-3.1-8b": 8.03,
    "smollm2": 0.1345,
}


def test_every_shape_has_published_sizes() -> None:
    found = {
        name: (each.model_type, each.layers, each.hidden, each.intermediate, each.heads, each.kv_heads, each.head_dim)
        for name, each in SHAPES.items()
    }
    assert found == PUBLISHED


@pytest.mark.parametrize("name", SHAPES)
def test_whole_model_has_the_published_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape(name).config())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e9 == pytest.approx(PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_cut_down_model_has_the_real_heads_and_is_patched(name: str) -> None:
    sizes = shape(name)
    config = sizes.config(layers=2, vocab_size=64, intermediate_size=64, hidden_size=4 * sizes.heads)
    model = AutoModelForCausalLM.from_config(config).eval()
    assert config.model_type in FAMILIES
    assert len(model.model.layers) == 2
    attention = model.model.layers[1].self_attn
    assert attention.q_proj.out_features == sizes.heads * sizes.head_dim
    assert attention.k_proj.out_features == attention.v_proj.out_features == sizes.kv_heads * sizes.head_dim
    assert attention.o_proj.in_features == sizes.heads * sizes.head_dim
    assert (attention.q_proj.bias is not None) == sizes.attention_bias
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 64, (1, 90), generator=generator)
    with patch_model(model, budget=64, block_size=16, dense_layers=0, speculate=True) as handle:
        out = model.generate(ids, max_new_tokens=4, do_sample=False)
        assert [layer.status for layer in handle.report().layers] == ["sparse", "sparse"]
        assert handle.stats()["selector_calls"] == 2 * 3  # layers x tokens; the prompt gives the first one
    assert out.shape == (1, 94)
    assert torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("name", SHAPES)
def test_rope_and_norms_reach_the_model(name: str) -> None:
    sizes = shape(name)
    config = sizes.config(layers=1, vocab_size=64, intermediate_size=64, hidden_size=4 * sizes.heads)
    assert config.max_position_embeddings == sizes.positions
    assert config.rms_norm_eps == sizes.norm_eps
    assert config.rope_parameters["rope_theta"] == sizes.rope_theta
    assert config.tie_word_embeddings is sizes.tied
    frequencies = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    assert len(frequencies) == int(sizes.head_dim * sizes.rotary_fraction) // 2
    unscaled = sizes.rope_theta ** -(2 * (len(frequencies) - 1) / (sizes.head_dim * sizes.rotary_fraction))
    factor = dict(sizes.rope_scaling or ()).get("factor", 1.0)
    assert float(frequencies[-1]) == pytest.approx(unscaled / factor)


def test_overrides_win_and_none_is_left_out() -> None:
    config = shape("qwen3-32b").config(layers=3, num_attention_heads=16, eos_token_id=5)
    assert (config.num_hidden_layers, config.num_attention_heads, config.eos_token_id) == (3, 16, 5)
    assert shape("glm-4-9b").config(layers=1).eos_token_id is None  # GlmConfig has ids of its own


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape: expected one of glm-4-9b, .*smollm2, got 'gpt2'"):
        shape("gpt2")
    with pytest.raises(ValueError, match="layers: expected an int >= 1, got 0"):
        shape("smollm2").config(layers=0)
