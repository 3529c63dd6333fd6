"""A long text with a passkey in it: the island log, written for this project and generated at any length.

The text has no digits, so the passkey is the only number, and its sentences come from templates, so no length needs one
sentence twice in a row. The prompt is raw text that ends with "The pass key is": the model continues it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PASSKEY = "71432"
# The question repeats the key's own opening, its paragraph break too: at 4K tokens a model of this size needs that.
KEY_SENTENCES = "\n\nThe pass key is {passkey}. Remember it. {passkey} is the pass key."
QUESTION = "\n\nThe pass key is"

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_WORDS: dict[str, tuple[str, ...]] = {
    "who": (
        "the lighthouse keeper",
        "the baker",
        "the ferry captain",
        "the schoolteacher",
        "the boat builder",
        "the widow from the mill",
        "the postman",
        "the shepherd",
        "the beekeeper",
        "the harbour master",
        "the girl with the red scarf",
        "the old fiddler",
    ),
    "place": (
        "the harbour wall",
        "the chapel",
        "the orchard",
        "the north beach",
        "the mill pond",
        "the ropewalk",
        "the salt marsh",
        "the market square",
        "the smokehouse",
        "the cliff path",
    ),
    "weather": (
        "a thin rain",
        "a warm south wind",
        "fog as thick as wool",
        "bright sun",
        "a hard frost",
        "low grey cloud",
        "a gale from the west",
        "still, clear air",
    ),
    "thing": (
        "a coil of tarred rope",
        "a basket of mussels",
        "a jar of dark honey",
        "a lantern with a cracked pane",
        "a sack of barley",
        "a letter from the mainland",
        "a pair of mended nets",
        "a crate of apples",
        "a brass bell",
        "a bundle of driftwood",
    ),
    "sea": (
        "flat as slate",
        "green and restless",
        "white with foam",
        "the colour of tin",
        "calm until noon",
        "loud all night",
    ),
    "talk": (
        "the price of wool",
        "the new roof of the school",
        "the seals on the sandbank",
        "the wreck that the tide uncovered",
        "the wedding in the spring",
        "whose goat had eaten the cabbages",
        "the right way to smoke herring",
        "a storm that their grandparents had seen",
    ),
}
_SENTENCES = (
    "The sea was {sea}, and there was {weather} over {place}.",
    "{Who} carried {thing} to {place} and came home before dark.",
    "At {place}, {who} talked with {who2} about {talk}.",
    "Nobody could say who had left {thing} beside {place}.",
    "{Who} traded {thing} for {thing2}, and both sides were content.",
    "After supper {who} told a long story about {talk}.",
    "Because of {weather}, {who} stayed indoors and repaired {thing}.",
    "The children ran from {place} to {place2} and back again.",
    "{Who} asked {who2} for help, and together they moved {thing} to {place}.",
    "In the evening there was {weather}, and the water lay {sea}.",
    "There was music near {place}, and even {who} danced a little.",
    "{Who} wrote a few lines about {talk} and went to bed early.",
)


def island_log(seed: int = 0) -> Iterator[str]:
    """Yield the sentences of the log without end; the first sentence of a day starts a new paragraph."""
    rng = random.Random(seed)
    day = 0
    while True:
        yield f"\n\n{_DAYS[day % len(_DAYS)]}."
        for template in rng.sample(_SENTENCES, k=7):
            yield " " + _fill(template, rng)
        day += 1


def passkey_prompt(
    tokenizer: PreTrainedTokenizerBase, tokens: int, depth: float, passkey: str = PASSKEY, seed: int = 0
) -> torch.Tensor:
    """Return ids [1, tokens]: the log with the passkey at `depth` (0 start, 1 end), then the question.

    The log's beginning is cut to make the length exact, so the sentences around the key and the question stay whole.
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth: expected a number from 0 to 1, got {depth!r}")
    head = tokenizer("").input_ids  # what this tokenizer opens every text with; often nothing
    key = _encode(tokenizer, KEY_SENTENCES.format(passkey=passkey))
    question = _encode(tokenizer, QUESTION)
    room = tokens - len(head) - len(key) - len(question)
    if room < 0:
        raise ValueError(f"tokens: expected at least {tokens - room} (the key and the question), got {tokens}")

    sentences: list[list[int]] = []
    length = 0
    for sentence in island_log(seed):
        if length >= room:
            break
        sentences.append(_encode(tokenizer, sentence))
        length += len(sentences[-1])

    # Walk from the end: the key goes at the sentence boundary nearest to its depth, the front gives up the excess.
    after, behind = len(sentences), 0
    while after and behind + len(sentences[after - 1]) // 2 < (1.0 - depth) * room:
        after -= 1
        behind += len(sentences[after])
    before = [token for sentence in sentences[:after] for token in sentence]
    rest = [token for sentence in sentences[after:] for token in sentence]
    if length > room:
        before, rest = before[length - room :], rest[max(0, length - room - len(before)) :]
    return torch.tensor([head + before + key + rest + question])


def _fill(template: str, rng: random.Random) -> str:
    """Put words into the template's slots; "x2" is another word of the kind x, a capital makes one of the word."""
    picks: dict[str, str] = {}
    for kind, words in _WORDS.items():
        first, second = rng.sample(words, k=2)
        picks |= {kind: first, kind + "2": second, kind.capitalize(): first[0].upper() + first[1:]}
    return template.format(**picks)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
