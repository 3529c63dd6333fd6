"""The memory of a layer: what a crop brings back, and what it can't."""

import pytest
import torch

from hf_sparse_prr.predictor import Memory, Prior

pytestmark = pytest.mark.compat


def prior(value):
    return Prior(
        torch.full((2, 1, 3), value, dtype=torch.int32), torch.full((2, 1, 4), float(value)), torch.zeros(2, 1, 4)
    )


def seen(*columns, begin=0):
    memory = Memory()
    memory.open(begin)
    for column in columns:
        memory.advance(column, prior(column))
    return memory


def test_crop_inside_the_last_forward_restores_the_token_before():
    memory = seen(10, 11, 12, begin=10)
    memory.crop(12)
    assert memory.prior.level[0, 0, 0] == 11
    memory.crop(11)
    assert memory.prior.level[0, 0, 0] == 10
    memory.crop(10)
    assert memory.prior is None


def test_crop_of_prompt_tokens_keeps_the_prior():
    memory = seen(10, begin=10)
    memory.open(11)  # a prompt forward of 20 columns, nothing advances
    memory.crop(15)
    assert memory.prior.level[0, 0, 0] == 10


def test_a_deeper_crop_clears_it():
    memory = seen(10, 11, begin=10)
    memory.open(12)
    memory.advance(12, prior(12))
    memory.crop(11)
    assert memory.prior is None


def test_crop_of_nothing_changes_nothing():
    memory = seen(10, 11, begin=10)
    memory.crop(12)
    assert memory.prior.level[0, 0, 0] == 11


def test_a_threshold_moves_with_its_row():
    held = prior(1)._replace(threshold=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert held.map(lambda tensor: tensor[[1]]).threshold.tolist() == [[3.0, 4.0]]
    assert prior(1).map(lambda tensor: tensor[[1]]).threshold is None


def test_rows_move_in_the_prior_and_in_what_a_crop_restores():
    memory = Memory()
    memory.open(10)
    for column in (10, 11):
        held = prior(column)
        held.level[1] += 0.5
        memory.advance(column, held)
    memory.coefficients((0.4, 0.1, 0.25), 2, torch.device("cpu"))
    memory.map(lambda tensor: tensor[[1]])
    assert memory.prior.level[0, 0, 0] == 11.5
    memory.crop(11)
    assert memory.prior.level.shape[0] == 1 and memory.prior.level[0, 0, 0] == 10.5
    assert memory.coefficients((0, 0, 0), 1, torch.device("cpu")).shape == (1, 3)


def test_new_blocks_have_never_been_scored():
    level, trend = prior(3).ema_state(6)
    assert level.shape == (2, 1, 6) and level[..., 4:].isnan().all() and not trend[..., 4:].any()
