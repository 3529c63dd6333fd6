"""One generated example: tokens with answers in them, and how statements are laid into hay."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hf_sparse_prr.evidence.tasks.forms import Form


class Episode(NamedTuple):
    """ids: all tokens, the answers included.  answers: (start, end) of each answer in `ids`, ascending; the last one
    ends `ids`.  scored: so many of the last answers count, and all of them must be right.  needles: where the
    statements that the first of those needs begin in `ids`, ascending."""

    ids: list[int]
    answers: list[tuple[int, int]]
    scored: int
    needles: list[int]

    @property
    def prompt(self) -> list[int]:
        """Everything before the first answer that counts."""
        return self.ids[: self.answers[-self.scored][0]]

    @property
    def answer_tokens(self) -> list[int]:
        """Of the answers that count, one after the other, without the questions between them."""
        return [token for start, end in self.answers[-self.scored :] for token in self.ids[start:end]]


class Piece(NamedTuple):
    """A statement that stays whole.  depth: where it belongs, 0 first, 1 last.  asked: the first answer that counts
    needs it."""

    ids: list[int]
    depth: float
    asked: bool = False


class Exchange(NamedTuple):
    """A question and its answer."""

    question: list[int]
    answer: list[int]


def exchange(form: Form, question: str, *statements: str) -> Exchange:
    """What is asked for are the statements, of which the first begins with the question. The answer has the tokens that
    it has in them: " 48213" by itself begins with others where a tokenizer marks the beginning of a text."""
    asked, whole = form.encode(question), [token for text in statements for token in form.encode(text)]
    same = 0
    while same < min(len(asked), len(whole) - 1) and asked[same] == whole[same]:
        same += 1
    return Exchange(whole[:same], whole[same:])


def assemble(
    length: int,
    head: Sequence[int],
    pieces: Sequence[Piece],
    exchanges: Sequence[Exchange],
    hay: Iterator[list[int]],
    scored: int = 1,
    apart: int = 0,
) -> Episode:
    """The head, hay with the pieces in it, then the exchanges: `length` tokens in all, answers included.

    Pieces stand between two sentences of hay, in the order of their depth (equal ones as given). The first sentences
    are cut to make the length exact. `apart` sentences at least stand between the last piece and the questions, where
    there are so many. ValueError where the rest alone is longer.
    """
    tail = sum(len(part) for exchange in exchanges for part in exchange)
    room = length - len(head) - tail - sum(len(piece.ids) for piece in pieces)
    if room < 0:
        raise ValueError(f"length: expected at least {length - room} tokens for the statements alone, got {length}")
    sentences: list[list[int]] = []
    filled = 0
    while filled < room:
        sentences.append(next(hay))
        filled += len(sentences[-1])
    cut = filled - room
    ids, needles, ordered = list(head), [], sorted(pieces, key=lambda piece: piece.depth)
    at, places = 0, max(0, len(sentences) - apart)
    for count in range(len(sentences) + 1):
        while at < len(ordered) and ordered[at].depth * places <= count:
            if ordered[at].asked:
                needles.append(len(ids))
            ids += ordered[at].ids
            at += 1
        if count < len(sentences):
            dropped = min(cut, len(sentences[count]))
            ids += sentences[count][dropped:]
            cut -= dropped
    answers = []
    for question, answer in exchanges:
        ids += question
        answers.append((len(ids), len(ids) + len(answer)))
        ids += answer
    return Episode(ids, answers, scored, needles)


def depths(rng: random.Random, count: int, asked: int, depth: float | None) -> list[float]:
    """Random depths of `count` pieces; that of piece `asked` is `depth`, where one is given."""
    check_depth(depth)
    found = [rng.random() for _ in range(count)]
    if depth is not None:
        found[asked] = depth
    return found


def check_depth(depth: float | None) -> None:
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth: expected a number from 0 to 1, got {depth!r}")
