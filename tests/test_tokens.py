"""Masks are read as per-token validity, or said not to be; columns change only through commit."""

import pytest
import torch

from hf_sparse_prr.tokens import MASK_REASON, MAX_DRAFT, Tokens, read_mask

pytestmark = pytest.mark.compat
LOW = torch.finfo(torch.float32).min


def causal(validity, begin, count):
    """bool [B, 1, count, begin + count] as transformers makes it from a padding mask."""
    columns = torch.arange(begin + count)
    return ((columns <= torch.arange(begin, begin + count)[:, None]) & validity[:, None])[:, None]


@pytest.mark.parametrize("begin, count", [(0, 6), (4, 3), (5, 1)])
@pytest.mark.parametrize("kind", ["bool", "additive", "-inf", "2d"])
def test_read_mask_finds_the_validity(begin, count, kind):
    validity = torch.rand(3, begin + count) > 0.4
    mask = causal(validity, begin, count)
    if kind == "2d":
        mask = validity.long()
    elif kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, LOW if kind == "additive" else float("-inf"))
    found, factorises = read_mask(mask, 3, begin, count, begin + count)
    assert factorises and torch.equal(found, validity)


def test_read_mask_of_a_static_buffer():
    validity = torch.rand(2, 7) > 0.4
    mask = torch.nn.functional.pad(causal(validity, 4, 3), (0, 13))
    found, factorises = read_mask(mask, 2, 4, 3, 20)
    assert factorises and torch.equal(found, validity)


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.index_fill(3, torch.tensor(0), False).logical_or(torch.eye(6).bool()),
        lambda mask: mask | True,
        lambda mask: mask.expand(-1, 4, -1, -1),
        lambda mask: torch.zeros(mask.shape).masked_fill(~mask, LOW) - 0.5,
        lambda mask: mask & (torch.arange(6) > torch.arange(6)[:, None] - 3),
    ],
    ids=["diagonal", "bidirectional", "per head", "biased", "sliding"],
)
def test_read_mask_says_when_it_is_not_validity(change):
    mask = change(causal(torch.ones(2, 6).bool(), 0, 6))
    found, factorises = read_mask(mask, 2, 0, 6, 6)
    assert not factorises and found.shape == (2, 6)
    assert Tokens().plan(mask, 2, 6, 6, None).dense_reason == MASK_REASON


def test_read_mask_of_something_else():
    assert read_mask(object(), 2, 0, 6, 6) == (None, False)
    assert read_mask(None, 2, 0, 6, 6) == (None, True)


@pytest.mark.parametrize(
    "shape", [(2, 1, 6, 5), (2, 1, 5, 6), (3, 1, 6, 6), (2, 6, 6), (2, 5), (1, 6), (2, 1, 1, 1, 6)]
)
def test_read_mask_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"attention_mask: expected \[2, .*got"):
        read_mask(torch.ones(shape, dtype=torch.bool), 2, 0, 6, 6)


def filled(validity):
    tokens = Tokens()
    step = tokens.plan(validity, len(validity), validity.shape[1], validity.shape[1], None)
    tokens.commit(step, len(validity), 64, torch.device("cpu"))
    return tokens


def test_start_and_its_bounds():
    tokens = filled(torch.tensor([[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]]))
    assert tokens.start.tolist() == [2, 0] and (tokens.start_min, tokens.start_max) == (0, 2)
    assert tokens.any_longer(5, 5) and not tokens.any_longer(5, 6)
    assert tokens.all_longer(5, 3) and not tokens.all_longer(5, 4)


def test_a_row_without_a_token_starts_with_its_first():
    tokens = filled(torch.tensor([[0, 0, 0], [1, 1, 1]]))
    assert tokens.start_max is None and not tokens.all_longer(2, 0)
    for bits, start in ([0, 1], 4), ([1, 1], 4):
        mask = torch.cat([tokens.valid[:, : tokens.length].long(), torch.tensor(bits)[:, None]], dim=1)
        tokens.commit(tokens.plan(mask, 2, 1, mask.shape[1], None), 2, 64, torch.device("cpu"))
        assert tokens.start.tolist() == [start, 0]
    assert tokens.start_max == 4


def test_plan_writes_nothing_and_sees_changed_columns():
    tokens = filled(torch.ones(2, 6).long())
    before = (tokens.valid.clone(), tokens.length)
    mask = torch.ones(2, 7).long()
    assert not tokens.plan(mask, 2, 1, 7, None).changed
    mask[0, 2] = 0
    step = tokens.plan(mask, 2, 1, 7, None)
    assert step.changed and torch.equal(tokens.valid, before[0]) and tokens.length == before[1]
    tokens.commit(step, 2, 64, torch.device("cpu"))
    assert not tokens.valid[0, 2] and tokens.length == 7


def test_no_mask_keeps_holes():
    tokens = filled(torch.tensor([[0, 1, 1]]))
    step = tokens.plan(None, 1, 1, 4, None)
    tokens.commit(step, 1, 64, torch.device("cpu"))
    assert tokens.valid[0, :4].tolist() == [False, True, True, True] and tokens.start.tolist() == [1]


@pytest.mark.parametrize(
    "held, count, prompt_length, expected",
    [
        (0, 1, None, 1),
        (0, 40, None, 40),
        (6, 1, None, 0),
        (6, MAX_DRAFT, None, 0),
        (6, MAX_DRAFT + 1, None, MAX_DRAFT + 1),
        (0, 9, 6, 6),
        (6, 3, 6, 0),
        (6, 3, 8, 2),
        (6, 3, 99, 3),
        (6, 40, 6, 0),
    ],
)
def test_what_is_prompt_goes_by_position(held, count, prompt_length, expected):
    tokens = filled(torch.ones(1, held).long()) if held else Tokens()
    assert tokens.plan(None, 1, count, held + count, prompt_length).first_decode == expected


def test_another_batch_size_is_refused():
    with pytest.raises(ValueError, match=r"expected batch size 2, got 3; call cache\.reset"):
        filled(torch.ones(2, 6).long()).plan(None, 3, 1, 7, None)


def test_crop_moves_the_start_only_where_it_must():
    tokens = filled(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    tokens.crop(3)
    assert tokens.start.tolist() == [2, 0]
    tokens.crop(2)
    assert tokens.start_max is None and tokens.start.tolist() == [2, 0]
    tokens.crop(0)
    assert tokens.start.tolist() == [0, 0] and tokens.start_max == 0
