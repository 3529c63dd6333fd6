"""Layers whose linear parts are fused: what the modules give, but for rounding, and the same bits captured or not."""

import pytest
import torch
from graphs import BOTH, GRAPHED, ON_GPU, TOKENS, logits_of, twice, without_cuda
from models import SPARSE, TOLERANCE, greedy, prompt, tiny

from hf_sparse_prr import fused, patch_model
from hf_sparse_prr.fused import FusedLayer, layer_of

pytestmark = pytest.mark.compat
FAMILIES = ["llama", "qwen2", "qwen3", "glm", "glm4"]
EXPERTS = ["qwen2_moe", "qwen3_moe", "glm4_moe"]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    without_cuda(monkeypatch)
    if not ON_GPU:
        monkeypatch.setattr(fused, "DEVICES", ("cpu",))


def counted(monkeypatch):
    """How often a fused layer ran."""
    calls, run = [], FusedLayer.__call__

    def count(self, hidden_states, **kwargs):
        calls.append(self.decoder.self_attn.layer_idx)
        return run(self, hidden_states, **kwargs)

    monkeypatch.setattr(FusedLayer, "__call__", count)
    return calls


@DTYPES
@pytest.mark.parametrize("family", FAMILIES + EXPERTS)
def test_logits_are_those_of_the_modules(family, dtype, monkeypatch):
    model, ids = tiny(family, layers=3, dtype=dtype), prompt()
    settings = dict(SPARSE, cuda_graph=False)
    with patch_model(model, **settings, fused_layers=False):
        expected, logits = logits_of(model, ids, 2)
    calls = counted(monkeypatch)
    with patch_model(model, **settings) as handle:
        found, other = logits_of(model, ids, 2)
    assert calls == [0, 1, 2]
    assert handle.graphs.fused == 3
    assert "linear parts fused in 3 layers" in str(handle.report())
    assert torch.equal(found[:, :-1], expected[:, :-1])
    scale = float(logits.abs().max())
    torch.testing.assert_close(other / scale, logits / scale, **TOLERANCE[dtype])


@pytest.mark.parametrize("family", FAMILIES + EXPERTS)
def test_experts_are_modules_and_the_rest_is_fused(family):
    model = tiny(family, layers=2, dtype=torch.bfloat16)
    with patch_model(model, **SPARSE) as handle:
        layer = FusedLayer(model.model.layers[1], handle.kernels.module)
    assert layer.states is not None
    assert (layer.gates is None) == (family in EXPERTS)


@BOTH
@pytest.mark.parametrize("selector", ["quest", "infllm_v2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_have_the_bits_of_eager_ones(family, selector, speculate):
    settings = dict(SPARSE, speculate=speculate)
    if selector == "infllm_v2":
        settings |= dict(block_size=32, budget=160, selector=selector)
    handle, _ = twice(tiny(family, layers=4, dtype=torch.bfloat16), prompt(300), settings)
    assert (handle.graphs.captured, handle.graphs.replayed, handle.graphs.fused) == (1, GRAPHED, 4)


@pytest.mark.parametrize("graphs", [False, True])
def test_prr_is_serial_to_the_bit(graphs):
    model, ids = tiny("qwen3", layers=4, dtype=torch.bfloat16), prompt(300)
    found = []
    for speculate in (False, True):
        with patch_model(model, **SPARSE, speculate=speculate, cuda_graph=graphs):
            found.append(logits_of(model, ids)[1])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("settings", "kwargs"),
    [(dict(trace=True), {}), (dict(semantics="superset", speculate=True), {}), (dict(hint="rope"), {})],
    ids=["trace", "superset", "rope"],
)
def test_steps_that_are_never_captured_are_fused(settings, kwargs, monkeypatch):
    calls = counted(monkeypatch)
    with patch_model(tiny("llama", dtype=torch.bfloat16), **SPARSE, **settings) as handle:
        greedy(handle.model, prompt(), **kwargs)
        assert not handle.graphs.captured
    assert len(calls) == 3 * (TOKENS - 1)


def test_dense_layers_are_fused(monkeypatch):
    calls = counted(monkeypatch)
    with patch_model(tiny("llama", layers=4, dtype=torch.bfloat16), **{**SPARSE, "dense_layers": 2}) as handle:
        greedy(handle.model, prompt(), tokens=4)
    assert calls == [0, 1, 2, 3] * 3


def test_layers_with_a_window_are_not(monkeypatch):
    model = tiny(
        "qwen2", layers=4, dtype=torch.bfloat16, use_sliding_window=True, sliding_window=64, max_window_layers=2
    )
    calls = counted(monkeypatch)
    with patch_model(model, **SPARSE) as handle:
        greedy(model, prompt(), tokens=4)
        assert handle.graphs.fused == 2
    assert set(calls) == {0, 1}


@pytest.mark.parametrize(
    ("ids", "settings", "kwargs"),
    [
        (prompt(60), {}, dict(tokens=9)),
        (prompt(batch=2), {}, {}),
        (prompt(), {}, dict(num_beams=2)),
        (prompt(), dict(fused_layers=False), {}),
        (prompt(), dict(budget=None), {}),
    ],
    ids=["fits", "rows", "beams", "off", "dense"],
)
def test_other_tokens_go_through_the_modules(ids, settings, kwargs, monkeypatch):
    calls = counted(monkeypatch)
    with patch_model(tiny("llama", dtype=torch.bfloat16), **{**SPARSE, **settings}) as handle:
        greedy(handle.model, ids, **kwargs)
    assert not calls


def test_float32_stays_with_the_modules(monkeypatch):
    calls = counted(monkeypatch)
    with patch_model(tiny("llama"), **SPARSE) as handle:
        greedy(handle.model, prompt())
        assert handle.graphs.fused == 0
    assert not calls


def test_hooks_on_all_modules_are_heard(monkeypatch):
    calls, heard = counted(monkeypatch), []
    remove = torch.nn.modules.module.register_module_forward_hook(lambda module, given, out: heard.append(type(module)))
    try:
        with patch_model(tiny("llama", dtype=torch.bfloat16), **SPARSE) as handle:
            greedy(handle.model, prompt(), tokens=4)
    finally:
        remove.remove()
    assert not calls
    assert heard


class Wrapped(torch.nn.Module):
    """As an adapter or a quantised layer is."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias, self.linear = linear.weight, linear.bias, linear

    def forward(self, x):
        return self.linear(x) * 2


def wrap(name):
    def change(layer):
        parent, _, last = name.rpartition(".")
        parent = layer.get_submodule(parent)
        setattr(parent, last, Wrapped(getattr(parent, last)))

    return change


def doubled(module, given, output):
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


def hook(name):
    return lambda layer: layer.get_submodule(name).register_forward_hook(doubled)


def gelu(layer):
    layer.mlp.act_fn = torch.nn.GELU()


def replace(layer):
    layer.mlp.forward = lambda x: x


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (wrap("self_attn.q_proj"), 1),
        (wrap("self_attn.o_proj"), 1),
        (wrap("mlp.up_proj"), 1),
        (wrap("mlp.down_proj"), 1),
        (hook("self_attn.v_proj"), 1),
        (hook("self_attn"), 1),
        (hook("mlp"), 1),
        (hook("post_attention_layernorm"), 1),
        (gelu, 1),
        (replace, 1),
        (hook(""), 0),
    ],
    ids=[
        "q",
        "o",
        "up",
        "down",
        "v hook",
        "attention hook",
        "mlp hook",
        "norm hook",
        "gelu",
        "forward",
        "layer",
    ],
)
def test_what_is_not_plain_is_called_as_a_module(change, parts):
    model, ids = tiny("llama", layers=2, dtype=torch.bfloat16), prompt()
    change(model.model.layers[1])
    with patch_model(model, **SPARSE, fused_layers=False):
        expected = logits_of(model, ids, 2)[1]
    with patch_model(model, **SPARSE) as handle:
        found = logits_of(model, ids, 2)[1]
        assert handle.graphs.fused == 1 + (parts > 0)
        run = layer_of(handle, model.model.layers[1])
        assert (run == model.model.layers[1].forward) == (parts == 0)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found / scale, expected / scale, **TOLERANCE[torch.bfloat16])


def test_a_layer_of_an_unknown_class_runs_as_it_is(monkeypatch):
    model = tiny("llama", layers=2, dtype=torch.bfloat16)
    stock = type(model.model.layers[1])

    class Mine(stock):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * 2

    model.model.layers[1].__class__ = Mine
    calls = counted(monkeypatch)
    with patch_model(model, **SPARSE) as handle:
        greedy(model, prompt(), tokens=4)
        assert handle.graphs.fused == 1
    assert set(calls) == {0}
