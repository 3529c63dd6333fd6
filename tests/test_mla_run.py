"""Prompts of models with an indexer, by the kernels that a GPU has for them, under a mask or over lists: what stock
attention gives under the mask."""

import pytest
import torch
from models import TOLERANCE, left_pad, prompt, tiny

from hf_sparse_prr import SparseCache, kernel_loader, patch_model
from hf_sparse_prr.patches import _mla_run

pytestmark = pytest.mark.compat
FAMILIES = pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])


OPS = {"masked_attention": 1000.0, "listed_attention": 0.0}  # and how dear lists are said to be, so that it is chosen


@pytest.fixture(params=OPS)
def by_kernel(request, monkeypatch):
    """The op runs for every prompt that has no mask of its own; the list counts its calls."""
    kernels = kernel_loader.resolve("auto", False).module
    calls, op = [], getattr(kernels, request.param)

    def counted(query, *args, **kwargs):
        calls.append(tuple(query.shape))
        return op(query, *args, **kwargs)

    monkeypatch.setattr(kernels, request.param, counted)
    monkeypatch.setattr(_mla_run, "_LISTED", OPS[request.param])
    monkeypatch.setattr(_mla_run, "_GATHERED", 1000)  # the references: never over gathered latents

    def switch(on):
        monkeypatch.setattr(_mla_run.Run, "_has_kernels", property(lambda self: on and self.mask is None))
        return calls

    return switch


def logits(model, ids, sizes, **kwargs):
    cache, found, begin = SparseCache(model), [], 0
    cache.prompt_length = ids.shape[1]
    with torch.no_grad():
        for size in sizes:
            if "attention_mask" in kwargs:
                given = dict(attention_mask=kwargs["attention_mask"][:, : begin + size])
            else:
                given = {}
            found.append(model(ids[:, begin : begin + size], past_key_values=cache, **given).logits)
            begin += size
    return torch.cat(found, dim=1)


@FAMILIES
@pytest.mark.parametrize("sizes", [(160,), (50, 7, 103)], ids=["whole", "chunks"])
@pytest.mark.parametrize("workspace", [2**30, 40_000], ids=["at_once", "parts"])
def test_logits_of_a_prompt(family, sizes, workspace, by_kernel):
    model, ids = tiny(family), prompt(160, batch=2)
    found = []
    for on in (False, True):
        calls = by_kernel(on)
        with patch_model(model, workspace=workspace):
            found.append(logits(model, ids, sizes))
    assert calls
    torch.testing.assert_close(found[1], found[0], **TOLERANCE[torch.float32])


@FAMILIES
def test_padding_is_hidden(family, by_kernel):
    model = tiny(family)
    ids, mask = left_pad([prompt(130)[0], prompt(90, seed=1)[0]])
    found = []
    for on in (False, True):
        calls = by_kernel(on)
        with patch_model(model):
            found.append(logits(model, ids, (130,), attention_mask=mask))
    assert calls
    assert found[1].isfinite().all()
    real = mask.bool()
    torch.testing.assert_close(found[1][real], found[0][real], **TOLERANCE[torch.float32])


def test_only_plain_prompts_in_half_precision_on_a_gpu_have_them():
    model, ids = tiny("deepseek_v32", dtype=torch.bfloat16), prompt(60)
    asked = []
    stock = _mla_run.Run._has_kernels.func
    with patch_model(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_mla_run.Run, "_has_kernels", property(lambda self: asked.append(stock(self)) or asked[-1]))
        logits(model, ids, (60,))
    assert asked and all(each == ids.is_cuda for each in asked)
