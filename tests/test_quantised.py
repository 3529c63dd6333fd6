"""A patched model of quantised weights: `make test-quantised` runs it beside the packages that make them."""

import pytest
import torch
from models import SPARSE, greedy, prompt, tiny
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_sparse_prr import patch_model

pytestmark = pytest.mark.skipif(torch.get_default_device().type == "cuda", reason="of layers that compute on a CPU")


def same_serial_and_prr(model, ids, settings):
    """Ids of serial decoding, which PRR's equal."""
    out = []
    for speculate in (False, True):
        with patch_model(model, **settings, speculate=speculate) as handle:
            out.append(greedy(model, ids))
            assert handle.stats()["selector_calls"] > 0
    assert torch.equal(*out)
    return out[0]


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v32"])
def test_torchao_int8_weights(model_type):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    model, ids = tiny(model_type), prompt(100)
    whole = greedy(model, ids)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    stock = greedy(model, ids)
    assert not torch.equal(whole, stock), "quantised weights must count"
    indexed = model_type == "deepseek_v32"
    sparse = same_serial_and_prr(model, ids, {} if indexed else SPARSE)
    assert torch.equal(sparse, stock) == indexed  # whose selection is the model's own
    if not indexed:
        with patch_model(model):  # 124 tokens fit the budget
            assert torch.equal(greedy(model, ids), stock)


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_weights(bits, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    tiny("llama", hidden_size=64, head_dim=16).save_pretrained(tmp_path)
    settings = dict(dtype=torch.float32, device_map="cpu")
    quantised = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantised, **settings).eval()
    assert type(model.model.layers[0].self_attn.k_proj).__name__ == {4: "Linear4bit", 8: "Linear8bitLt"}[bits]
    ids = prompt(100)
    stock = greedy(model, ids)
    assert not torch.equal(same_serial_and_prr(model, ids, SPARSE), stock)
    with patch_model(model):
        assert torch.equal(greedy(model, ids), stock)
