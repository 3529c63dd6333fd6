"""Accuracy by one forward: an episode counts when every token of every answer that counts is the likeliest."""

import pytest
import torch
from torch.nn.functional import one_hot

from hf_sparse_prr.evidence.exact import episodes_of, forced_accuracy
from hf_sparse_prr.evidence.tasks import Bytes

EPISODES = episodes_of("needle_multi_query", Bytes(), 256, 4, seed=3)


def knowing(wrong=()):
    """Logits that foresee every token but those at the places (row, token) that are `wrong`."""

    def logits(ids):
        ahead = ids.roll(-1, dims=1)
        for row, place in wrong:
            if row < len(ids):
                ahead[row, place - 1] = (ahead[row, place - 1] + 1) % 256
        return one_hot(ahead, 256).float()

    return logits


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_all_right_is_1(rows):
    assert forced_accuracy(knowing(), EPISODES, torch.device("cpu"), rows) == 1.0


def test_one_wrong_token_of_an_answer_makes_the_episode_wrong():
    for start, end in EPISODES[1].answers:
        for place in (start, end - 1):
            assert forced_accuracy(knowing([(1, place)]), EPISODES, torch.device("cpu"), rows=4) == 0.75


def test_what_is_no_answer_may_be_wrong():
    first = EPISODES[0].answers[0][0]
    assert forced_accuracy(knowing([(0, place) for place in range(1, first)]), EPISODES, torch.device("cpu"), 4) == 1.0


def test_episodes_depend_on_all_that_is_asked():
    again = episodes_of("needle_multi_query", Bytes(), 256, 4, seed=3)
    assert again == EPISODES and len({tuple(each.ids) for each in again}) == 4
    assert episodes_of("needle_multi_query", Bytes(), 256, 6, seed=3)[:4] == EPISODES
    assert episodes_of("needle_multi_query", Bytes(), 256, 4, seed=4) != EPISODES
    assert episodes_of("needle_multi_query", Bytes(), 256, 4, seed=3, depth=0.5) != EPISODES
