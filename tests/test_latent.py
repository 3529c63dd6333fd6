"""Selection of tokens by a model's own indexer, and the parts that a prompt is worked on in."""

import pytest
import torch

from hf_sparse_prr.bundled import reference
from hf_sparse_prr.indexed import IndexedLayer
from hf_sparse_prr.latent import Index, parts, select_tokens

B, T, I, E, TOPK = 2, 90, 4, 8, 20


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def problem(request):
    """(layer that holds T tokens, what T query tokens ask, validity with holes and padding)."""
    torch.manual_seed(0)
    layer = IndexedLayer()
    layer.update(torch.randn(B, 1, T, 6), torch.randn(B, 1, T, 2))
    layer.update_indexer(torch.randn(B, T, E).to(request.param))
    index = Index(torch.randn(B, T, I, E).to(request.param), torch.randn(B, T, I), E**-0.5)
    valid = torch.rand(B, layer.capacity) > 0.1
    valid[1, :25] = False
    return layer, index, valid


def expected(layer, index, valid, allowed=None):
    """By a stable sort of scores that are summed anew, one query and token after the other."""
    products = torch.einsum("bqie,bte->bqit", index.query.double(), layer.index_keys[:, :T].double()) * index.scale
    scores = (products.relu() * index.weights.double()[..., None]).sum(2).float()
    seen = valid[:, None, :T] & torch.ones(T, T, dtype=torch.bool).tril()
    if allowed is not None:
        seen = seen & allowed
    chosen = torch.full((B, T, TOPK), -1, dtype=torch.int32)
    for b in range(B):
        for q in range(T):
            order = scores[b, q].masked_fill(~seen[b, q], -torch.inf).sort(descending=True, stable=True).indices
            picked = order[: min(TOPK, int(seen[b, q].sum()))].sort().values
            chosen[b, q, : len(picked)] = picked
    return chosen


@pytest.mark.parametrize("size", [1, 5, 16, 33, T])
def test_a_selection_is_that_of_a_stable_sort_however_the_queries_come(problem, size):
    layer, index, valid = problem
    wanted = expected(layer, index, valid)
    for begin in range(0, T, size):
        end = min(begin + size, T)
        chosen, scores = select_tokens(layer, index.part(begin, end), valid, begin, TOPK, reference)
        assert chosen.shape == (B, end - begin, min(TOPK, end)) and scores.shape == (B, end - begin, end)
        assert torch.equal(chosen, wanted[:, begin:end, : chosen.shape[2]])
        assert (wanted[:, begin:end, chosen.shape[2] :] == -1).all()


def test_a_mask_of_any_shape_is_heeded(problem):
    layer, index, valid = problem
    allowed = (torch.rand(B, T, T) > 0.3) & torch.ones(T, T, dtype=torch.bool).tril() & valid[:, None, :T]
    wanted = expected(layer, index, valid, allowed)
    additive = torch.zeros(B, T, T).masked_fill(~allowed, torch.finfo(torch.float32).min)
    for mask in (allowed, additive):
        assert torch.equal(select_tokens(layer, index, valid, 0, TOPK, reference, mask)[0], wanted)
    biased = select_tokens(layer, index, valid, 0, TOPK, reference, additive - 100.0 * (torch.arange(T) % 2))[0]
    evens = (allowed & (torch.arange(T) % 2 == 0)).sum(dim=2).clamp(max=TOPK)
    assert torch.equal(((biased >= 0) & (biased % 2 == 0)).sum(dim=2), evens)


def test_tied_scores_go_to_the_first_tokens(problem):
    layer, index, valid = problem
    chosen, _ = select_tokens(layer, index._replace(weights=index.weights * 0), valid, 0, TOPK, reference)
    for b in range(B):
        first = valid[b, :T].nonzero().flatten()[:TOPK]
        assert torch.equal(chosen[b, -1, : len(first)].long(), first)


def test_what_is_not_seen_may_be_anything(problem):
    layer, index, valid = problem
    before, _ = select_tokens(layer, index, valid, 0, TOPK, reference)
    layer.index_keys[~valid] = float("nan")
    layer.index_keys[:, T:] = float("inf")
    after, _ = select_tokens(layer, index, valid, 0, TOPK, reference)
    assert torch.equal(before, after)


def test_parts_cover_all_query_tokens():
    assert list(parts(5, 10, lambda columns: columns, 60)) == [(0, 4), (4, 8), (8, 10)]
    assert list(parts(0, 3, lambda columns: 10**9, 1)) == [(0, 1), (1, 2), (2, 3)]
    assert list(parts(0, 0, lambda columns: 1, 1)) == []
