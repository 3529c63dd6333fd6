"""A model that is spread over two GPUs: kernels run where their layer is, and nothing depends on the current device."""

import pytest
import torch
from accelerate import dispatch_model
from models import SPARSE, greedy, left_pad, prompt, tiny

from hf_sparse_prr import patch_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]
INFLLM = dict(selector="infllm_v2", budget=256, block_size=32, dense_layers=0)


def spread(model, first, second):
    """Layers alternate between two devices; the rest is on the first one."""
    layers = {f"model.layers.{i}": (first, second)[i % 2] for i in range(model.config.num_hidden_layers)}
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    keys = model._skip_keys_device_placement  # as from_pretrained does: a cache stays where its layers are
    return dispatch_model(model, {**layers, **dict.fromkeys(rest, first)}, skip_keys=keys)


@pytest.mark.parametrize("settings", [SPARSE, INFLLM], ids=["quest", "infllm_v2"])
@pytest.mark.parametrize("speculate", [False, True])
def test_generate_gives_the_ids_of_one_gpu(settings, speculate):
    seen = []
    for first, second in ((0, 0), (0, 1), (1, 0)):
        device = torch.device("cuda", first)
        model = tiny("llama").to(device)
        if first != second:
            model = spread(model, first, second)
        with patch_model(model, **settings, speculate=speculate) as handle:
            seen.append([])
            for ids in (prompt(400), prompt(300, batch=2)):
                seen[-1].append(greedy(model, ids.to(device), 40).cpu())
            ids, mask = left_pad([prompt(300)[0], prompt(150, seed=1)[0]], 37)
            seen[-1].append(greedy(model, ids.to(device), 30, attention_mask=mask.to(device)).cpu())
            assert handle.report().backend in ("triton", "cuda")
            assert handle.stats()["selector_calls"] > 0
        assert torch.cuda.current_device() == 0
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
