"""Which implementation a call runs, and what is said of it."""

import os
from importlib.util import find_spec

import pytest
import torch


@pytest.mark.parametrize("name", ["gvr_topk", "merge_partials", "quest_scores", "tally"])
def test_an_op_without_arguments_says_what_it_misses(ops, name):
    with pytest.raises(TypeError, match=rf"{name}\(\) missing \d+ required positional argument"):
        getattr(ops, name)()


def test_what_runs_does_not_depend_on_the_order_of_keywords(ops):
    scores = torch.randn(3, 9000)
    expected, stats = ops.gvr_topk(scores, 5, return_stats=True)
    for named in (dict(k=5, scores=scores), dict(scores=scores, k=5), dict(hint=None, k=5, scores=scores)):
        indices, found = ops.gvr_topk(return_stats=True, **named)
        assert torch.equal(indices, expected)
        assert all(torch.equal(*pair) for pair in zip(found, stats, strict=True))  # passes tell who ran


def test_backend_is_what_runs(ops):
    if os.environ.get("TRITON_INTERPRET") == "1":
        assert ops.backend == "interpreter"
    elif torch.cuda.is_available() and find_spec("triton"):
        assert ops.backend in ("triton", "cuda")
    else:
        assert ops.backend == "reference"
