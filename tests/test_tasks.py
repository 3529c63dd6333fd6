"""The generated tasks: of the length asked for, solvable from what they hold, the same for the same seed."""

import random
import re
from itertools import pairwise

import pytest

from hf_sparse_prr.evidence.tasks import TASKS, Bytes, Sentences
from hf_sparse_prr.evidence.tasks.forms import SYMBOLS

LENGTH = 1024
SENTENCES = Sentences(lambda text: [ord(letter) for letter in text])  # a tokenizer of letters
FORMS = {"bytes": (Bytes(), LENGTH), "sentences": (SENTENCES, 8192)}


def text(ids):
    return "".join(map(chr, ids))


def episode(task, form="bytes", seed=0, **kwargs):
    words, length = FORMS[form]
    return TASKS[task](words, random.Random(seed), kwargs.pop("length", length), **kwargs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [None, 0.0, 0.3, 1.0])
def test_an_episode_has_the_length_asked_for_and_ends_with_its_answer(task, form, depth):
    found = episode(task, form, depth=depth)
    assert len(found.ids) == FORMS[form][1]
    assert found.answers == sorted(found.answers) and found.answers[-1][1] == len(found.ids)
    assert all(start < end for start, end in found.answers)
    assert found.prompt == found.ids[: found.answers[-found.scored][0]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_a_seed_is_an_episode(task, form):
    assert episode(task, form, seed=3) == episode(task, form, seed=3)
    assert episode(task, form, seed=3) != episode(task, form, seed=4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("task", TASKS)
def test_the_answer_stands_where_the_needles_are(task, form):
    """What is asked, with its answer's beginning, is in the prompt once: at a needle. And nowhere else."""
    for seed in range(5):
        found = episode(task, form, seed=seed)
        first, end = found.answers[-found.scored]
        body = text(found.ids[:first])
        question = max(  # the longest end of the prompt that also stands further up
            (body[-size:] for size in range(1, 60) if body[-size:] in body[:-1]), key=len
        )
        at = body.index(question)
        assert text(found.ids[first:end])[0] == body[at + len(question)]
        starts = [start for start in found.needles if start <= at + len(question)]
        assert starts and at + len(question) - starts[-1] <= 64
        assert body.count(question) == 2  # the statement and the question


@pytest.mark.parametrize("task", TASKS)
def test_a_needle_lies_at_its_depth(task):
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        found = episode(task, depth=depth, length=4096)
        spread = 0.1 if task == "passkey" else 0.05
        assert abs(min(found.needles, key=lambda at: abs(at / 4096 - depth)) / 4096 - depth) < spread


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", [-0.1, 1.1])
def test_a_depth_is_from_0_to_1(task, depth):
    with pytest.raises(ValueError, match=r"depth: expected a number from 0 to 1, got"):
        episode(task, depth=depth)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"recall"}))
def test_too_short_a_length_is_refused(task):
    with pytest.raises(ValueError, match=r"length: expected at least \d+ tokens for the statements alone, got 6"):
        episode(task, length=6)


def test_every_query_counts_in_multi_query():
    found = episode("needle_multi_query")
    assert found.scored == len(found.answers) == 4
    body = text(found.prompt)
    for start, end in found.answers:
        question = text(found.ids[start - 4 : start])
        assert question[0] == "#" and question + text(found.ids[start:end]) in body


def test_multi_value_lists_all_values_of_a_key_in_order():
    found = episode("needle_multi_value", seed=1)
    body, answer = text(found.prompt), text(found.answer_tokens)
    key = body[-5:-1]
    statements = (body[-5:] + answer).split("#")[1:]
    assert [each[3] for each in statements] == list("1234")
    assert all(f"#{each}" in body for each in statements) and len(found.needles) == 4
    assert all(f"#{each}".startswith(key) for each in statements)


def test_tracking_follows_a_chain():
    found = episode("tracking", seed=2)
    chain = (text(found.prompt)[-4:] + text(found.answer_tokens)).split("#")[1:]
    links = [link.split(">") for link in chain]
    assert len(links) == 4 and all(a[1] == b[0] for a, b in pairwise(links))
    places = [text(found.prompt).index(f"#{link}") for link in chain]
    assert places == sorted(places) == found.needles


def test_recall_has_nothing_but_statements():
    found = episode("recall")
    body = text(found.prompt)
    assert len(body.split("#")) - 2 >= 0.95 * LENGTH / 6
    assert len({each[:2] for each in body.split("#")[1:-1]}) == len(body.split("#")) - 2  # every key once


def test_recall_fits_where_statements_are_of_several_widths():
    """Where few are wide, the eight that tell how many fit may have none of them. So it is with SmolLM2's tokenizer."""
    pieces = Sentences(
        lambda text: [ord(word[0]) for word in re.findall(r"\w+", text.replace("lonely", "l o n e l y"))]
    )
    for seed in range(20):
        found = TASKS["recall"](pieces, random.Random(seed), 512)
        assert len(found.ids) == 512


def test_copying_copies_symbols():
    answer = text(episode("copying").answer_tokens)
    assert len(answer) == 20 and set(answer) <= set(SYMBOLS)


def test_more_keys_than_a_form_has_are_refused():
    with pytest.raises(ValueError, match=r"keys: expected at most 196, got 200"):
        episode("needle_multi_key", "sentences", keys=200)
    with pytest.raises(ValueError, match=r"keys: expected at most 3844, got 4000"):
        episode("needle_multi_key", "bytes", keys=4000)


@pytest.mark.parametrize("form", FORMS)
def test_a_passkey_at_the_end_does_not_touch_the_question(form):
    body = text(episode("passkey", form, depth=1.0).prompt)
    between = body.rpartition("is the pass key.")[2].removesuffix(" What is the pass key? The pass key is")
    assert between.count(".") == 2 and not any(letter.isdigit() for letter in between)


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_has_the_tokens_that_it_has_in_its_statement(task):
    """Also where a tokenizer marks the beginning of each text, as Llama 2's does: 0 here."""
    marked = Sentences(lambda text: [0, *map(ord, text)])
    found = TASKS[task](marked, random.Random(1), 8192)
    start, end = found.answers[-1]
    told = found.ids[start - 8 : end]  # the question's end and the answer: a letter but 0 is a token
    body, parts = text(found.ids[: start - 8]), text(told).split("\0")
    assert len(found.ids) == 8192 and found.ids[start] != 0
    assert all(part.removesuffix(".") in body for part in parts)
    assert len(parts) == {"needle_multi_value": 4, "tracking": 4}.get(task, 1)


@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_begins_with_what_the_tokenizer_opens_a_text_with(task):
    found = TASKS[task](Sentences(SENTENCES.encode, [7, 8]), random.Random(1), 8192)
    assert found.ids[:2] == [7, 8] and len(found.ids) == 8192
    bare = TASKS[task](SENTENCES, random.Random(1), 8190)
    assert found.ids[2:] == bare.ids or task == "recall"  # which has as many keys as fit
