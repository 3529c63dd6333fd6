"""In what words a task is put: bytes, short enough for tiny models, or English sentences for any tokenizer.

A form knows how statements and hay read and turns them into tokens; tasks know nothing of either. A statement is a
question, what it is answered with, and `end`.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

SYMBOLS = string.ascii_letters + string.digits
_HAY = (
    "tree lake bird cloud stone river field grass wind sand hill leaf rain snow road door lamp boat fish moon".split()
)
_ADJECTIVES = "quiet early golden narrow distant gentle hollow ancient bitter copper frozen humble ivory lonely".split()
_NOUNS = "harbor lantern meadow orchard window garden bridge castle ladder mirror pebble ribbon saddle tunnel".split()
_SENTENCES = (
    " The path runs along the shore.",
    " Gulls sit on the old wall.",
    " It is warm and there is no wind.",
    " A boat comes in and another leaves.",
    " Someone has left a basket on the bench.",
    " The bell rings and it is quiet again.",
)


class Form(Protocol):
    """Text in, tokens out. All that is random comes from the generator that is handed in."""

    opening: Sequence[int]  # what every prompt begins with
    end: str  # of a statement
    most_keys: int
    begin_span: str

    def encode(self, text: str) -> list[int]: ...

    def keys(self, rng: random.Random, count: int) -> list[str]:
        """Distinct. ValueError where the form hasn't so many."""

    def value(self, rng: random.Random) -> str: ...

    def part(self, rng: random.Random) -> str:
        """One of the parts that a span to be copied is made of."""

    def question(self, key: str) -> str: ...

    def numbered(self, key: str, index: int) -> str:
        """The question for one of several values of a key."""

    def link(self, key: str) -> str:
        """The question for the key that takes over what `key` holds; `name(other)` answers it."""

    def name(self, key: str) -> str: ...

    def hay(self, rng: random.Random) -> Iterator[list[int]]:
        """Sentences without end."""


class Bytes:
    """Tokens are bytes. `#ab=cd`: ab is cd. `#ab=1cd`: its first value. `#ab>ef`: ef takes it over. `[xyz`: a span."""

    opening: Sequence[int] = ()
    end = ""
    begin_span = "["
    most_keys = len(SYMBOLS) ** 2

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def keys(self, rng: random.Random, count: int) -> list[str]:
        """Two symbols each."""
        wide = len(SYMBOLS)
        return [SYMBOLS[key // wide] + SYMBOLS[key % wide] for key in _draw(rng, self.most_keys, count)]

    def value(self, rng: random.Random) -> str:
        return rng.choice(SYMBOLS) + rng.choice(SYMBOLS)

    def part(self, rng: random.Random) -> str:
        return rng.choice(SYMBOLS)

    def question(self, key: str) -> str:
        return f"#{key}="

    def numbered(self, key: str, index: int) -> str:
        return f"#{key}={index}"

    def link(self, key: str) -> str:
        return f"#{key}>"

    def name(self, key: str) -> str:
        return key

    def hay(self, rng: random.Random) -> Iterator[list[int]]:
        words = [list(f"{word} ".encode()) for word in _HAY]
        while True:
            yield from rng.choices(words, k=32)


class Sentences:
    """Tokens of a tokenizer over plain English: " The number of the quiet harbor is 48213." and the like."""

    end = "."
    begin_span = " The list reads:"
    most_keys = len(_ADJECTIVES) * len(_NOUNS)

    def __init__(self, encode: Callable[[str], list[int]], opening: Sequence[int] = ()) -> None:
        """encode: text to ids, without special tokens.  opening: those that the tokenizer opens a text with."""
        self.encode, self.opening = encode, opening

    def keys(self, rng: random.Random, count: int) -> list[str]:
        picked = _draw(rng, self.most_keys, count)
        return [f"{_ADJECTIVES[each // len(_NOUNS)]} {_NOUNS[each % len(_NOUNS)]}" for each in picked]

    def value(self, rng: random.Random) -> str:
        return f" {rng.randrange(10000, 100000)}"

    def part(self, rng: random.Random) -> str:
        return f" {rng.choice(_NOUNS)}"

    def question(self, key: str) -> str:
        return f" The number of the {key} is"

    def numbered(self, key: str, index: int) -> str:
        return f" Number {index} of the {key} is"

    def link(self, key: str) -> str:
        return f" The {key} hands its number to the"

    def name(self, key: str) -> str:
        return f" {key}"

    def hay(self, rng: random.Random) -> Iterator[list[int]]:
        sentences = [self.encode(sentence) for sentence in _SENTENCES]
        while True:
            yield from rng.choices(sentences, k=16)


def _draw(rng: random.Random, most: int, count: int) -> list[int]:
    if count > most:
        raise ValueError(f"keys: expected at most {most}, got {count}")
    return rng.sample(range(most), count)
