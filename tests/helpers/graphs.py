"""What the tests of decode steps as graphs share. On a CPU what would be captured runs again instead, so that all of it
but CUDA's part is tested; on a GPU the graphs are real."""

import pytest
import torch

from hf_sparse_prr import SparseCache, graph, patch_model

ON_GPU = torch.get_default_device().type == "cuda"
BOTH = pytest.mark.parametrize("speculate", [False, True], ids=["serial", "prr"])
MODES = pytest.mark.parametrize(
    "how",
    [
        dict(num_beams=3, do_sample=False),
        dict(do_sample=True, top_k=20, temperature=0.8),
        dict(do_sample=True, num_return_sequences=2),
        dict(do_sample=False, prompt_lookup_num_tokens=3),
    ],
    ids=["beams", "sampling", "sequences", "lookup"],
)
TOKENS = 24
GRAPHED = (
    TOKENS - 1 - 3
)  # of a prompt over budget: two tokens to see that the state is one, one that is run and captured


def without_cuda(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(graph, "DEVICES", ("cpu",))
        monkeypatch.setattr(graph, "captured", lambda run, output: (lambda: output.copy_(run()), 0))


def logits_of(model, ids, tokens=TOKENS, **kwargs):
    given = dict(max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True)
    out = model.generate(ids, **{**given, **kwargs})
    return out.sequences, torch.stack(out.logits)


def twice(model, ids, settings, tokens=TOKENS, **kwargs):
    """(handle, cache) of a run with graphs, whose ids and logits were those without, bit for bit."""
    with patch_model(model, **settings, cuda_graph=False) as handle:
        expected, stats = logits_of(model, ids, tokens, **kwargs), handle.stats()
        assert not handle.graphs.captured
    with patch_model(model, **settings) as handle:
        cache = SparseCache(model)
        found = logits_of(model, ids, tokens, past_key_values=cache, **kwargs)
        assert all(map(torch.equal, found, expected))
        assert handle.stats() == stats
        assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    return handle, cache
