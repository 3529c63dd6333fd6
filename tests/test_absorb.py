"""The absorbed projection under everything that may wrap, move, shard or quantise it."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from models import greedy, prompt, tiny
from sharded import shard
from torch import nn
from transformers import AutoModelForCausalLM

from hf_sparse_prr import patch_model
from hf_sparse_prr.patches import INDEXED
from hf_sparse_prr.patches._absorb import absorbed, is_plain

pytestmark = pytest.mark.compat
IDS = prompt(120)


@pytest.fixture(params=INDEXED)
def model_type(request):
    return request.param


def dispatch(model, folder):
    """On the CPU, the weights of two layers on disk."""
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    places = {**dict.fromkeys(names, "cpu"), **{f"model.layers.{i}": "disk" if i else "cpu" for i in range(3)}}
    dispatch_model(model, device_map=places, main_device="cpu", offload_dir=folder, force_hooks=True)
    assert model.model.layers[1].self_attn.kv_b_proj.weight.is_meta


def offload(model, folder):
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].self_attn.kv_b_proj.weight.is_meta


@pytest.mark.parametrize("hook", [dispatch, offload])
@pytest.mark.parametrize("first", ["patch", "hook"])
def test_weights_that_are_elsewhere_give_the_same_ids(model_type, hook, first, tmp_path):
    expected, model = greedy(tiny(model_type), IDS), tiny(model_type)
    steps = [lambda: patch_model(model), lambda: hook(model, tmp_path)]
    for step in steps if first == "patch" else reversed(steps):
        step()
    assert torch.equal(greedy(model, IDS), expected)
    assert model.sparse_prr.stats()["selector_calls"] > 0


@pytest.mark.parametrize("target", ["kv_b_proj", "wq_b", "o_proj"])
def test_lora_counts_and_can_be_turned_off(model_type, target):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=[target], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(model_type), config).eval()
    asked = dict(input_ids=IDS, max_new_tokens=24, do_sample=False)
    expected = model.generate(**asked)
    with model.disable_adapter():
        without = model.generate(**asked)
    assert not torch.equal(expected, without)
    with patch_model(model):
        assert torch.equal(model.generate(**asked), expected)
        with model.disable_adapter():
            assert torch.equal(model.generate(**asked), without)


class Coarse(nn.Module):
    """A linear layer whose weight is kept in 3 bits, as quantised ones are: `weight` isn't what it applies."""

    def __init__(self, linear):
        super().__init__()
        self.step = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 3
        self.weight = nn.Parameter((linear.weight.detach() / self.step).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.step)


def test_a_quantised_projection_is_called_not_read(model_type):
    model = tiny(model_type)
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj = Coarse(layer.self_attn.kv_b_proj)
    expected = greedy(model, IDS)
    assert not torch.equal(expected, greedy(tiny(model_type), IDS))
    with patch_model(model):
        assert torch.equal(greedy(model, IDS), expected)


def test_a_changed_weight_counts_at_once(model_type):
    model, other = tiny(model_type), tiny(model_type, seed=5)
    with patch_model(model):
        greedy(model, IDS)
        model.load_state_dict(other.state_dict())
        assert torch.equal(greedy(model, IDS), greedy(other, IDS))


def test_only_a_bare_linear_is_plain():
    linear = nn.Linear(6, 10, bias=False)
    assert is_plain(linear)
    hooked = nn.Linear(6, 10, bias=False)
    hooked.register_forward_hook(lambda *_: None)
    replaced = nn.Linear(6, 10, bias=False)
    replaced.forward = lambda x: x
    for other in (
        hooked,
        replaced,
        nn.Linear(6, 10),
        nn.Linear(6, 10, bias=False, device="meta"),
        nn.Bilinear(1, 1, 1),
    ):
        assert not is_plain(other)
    up, down, shift = absorbed(linear, torch.zeros(4, 1, 6), 2, 3)
    assert torch.equal(torch.cat([up, down], dim=1).flatten(0, 1), linear.weight) and shift is None
    assert up.shape == (2, 2, 6) and down.shape == (2, 3, 6)
    up, down, shift = absorbed(nn.Sequential(linear), torch.zeros(4, 1, 6), 2, 3)
    assert torch.equal(torch.cat([up, down], dim=2).flatten(1, 2), linear.weight.expand(4, -1, -1))
    assert up.shape == (4, 2, 2, 6) and down.shape == (4, 2, 3, 6) and not shift.any()


def test_what_is_absorbed_is_the_projection():
    """Logits of expanded keys, but for a constant a query, and values, by a projection that adds something."""
    torch.manual_seed(0)
    linear, latents = nn.Linear(6, 10, bias=True).double(), torch.randn(4, 1, 7, 6).double()
    keys, values = linear(latents[:, 0]).unflatten(2, (2, 5)).transpose(1, 2).split([2, 3], dim=3)
    query, weights = torch.randn(4, 2, 1, 2).double(), torch.softmax(torch.randn(4, 2, 1, 7).double(), dim=3)
    found = absorbed(linear, latents, 2, 3)
    logits = found.queries(query, query[..., :0]).transpose(1, 2) @ latents.mT
    constant = logits - query @ keys.mT
    torch.testing.assert_close(constant, constant[..., :1].expand_as(constant))
    mixed = found.values((weights @ latents).transpose(1, 2))
    torch.testing.assert_close(mixed, (weights @ values).transpose(1, 2))


def test_a_bias_of_an_adapter_or_a_hook_counts(model_type):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["kv_b_proj"], init_lora_weights=False, task_type="CAUSAL_LM", lora_bias=True
    )
    model = peft.get_peft_model(tiny(model_type), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            nn.init.normal_(parameter, 0, 0.5)
    hooked = tiny(model_type)
    for layer in hooked.model.layers:
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, given, out: out + 0.5)
    for each in (model, hooked):
        expected = each.generate(input_ids=IDS, max_new_tokens=24, do_sample=False)
        with patch_model(each):
            assert torch.equal(each.generate(input_ids=IDS, max_new_tokens=24, do_sample=False), expected)


def test_each_row_may_have_an_adapter_of_its_own(model_type):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["kv_b_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny(model_type), config).eval()
    model.add_adapter("other", config)
    asked = dict(input_ids=prompt(120, batch=3), max_new_tokens=24, do_sample=False)
    asked["adapter_names"] = ["default", "other", "__base__"]
    expected = model.generate(**asked)
    with patch_model(model):
        assert torch.equal(model.generate(**asked), expected)


@pytest.mark.skipif(torch.get_default_device().type == "cuda", reason="gloo processes compute on a CPU")
@pytest.mark.xdist_group("sharded")  # one launch at a time: two may pick one port
def test_two_processes_share_the_heads(tmp_path):
    """Tensor parallelism: sharded latent attention, whole indexers, the same selection everywhere; saved as it was."""
    models = {name: tiny(name, vocab_size=98) for name in INDEXED}  # to be divided by two
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    for (name, model), (first, second) in zip(
        models.items(), shard(*(tmp_path / name for name in models)), strict=True
    ):
        assert first == second
        assert first["patched"] == first["stock"] == greedy(model, IDS).tolist()
        assert first["sharded"] and first["selected"]
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name / "saved").state_dict()
        assert saved.keys() == model.state_dict().keys()
        assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
