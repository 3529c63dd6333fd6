"""What one cell of an evaluation measures: a task's answers, or how near decoding is to dense on a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import kl_div

from hf_sparse_prr.evidence.decoding import Rows
from hf_sparse_prr.evidence.exact import episodes_of
from hf_sparse_prr.evidence.settings import Setting
from hf_sparse_prr.evidence.subjects import Subject
from hf_sparse_prr.evidence.tasks import Episode
from hf_sparse_prr.evidence.texts import text_of

QUESTION = 8  # tokens at the end of the question that are decoded
SEED = 54321  # of evaluation; training and the cards draw from other streams
_TOGETHER = 65536  # tokens of prompts that are decoded at a time
_ON_GPU = 4  # times as many of a tiny model, 1 GB of keys and values: a step costs the host the same
Tell = Callable[[int, int], None]


class Case(NamedTuple):
    """What is asked. task: of `TASKS`, or text:NAME.  depth: of the needle, None for anywhere.  episodes: how many, or
    windows of a text."""

    task: str
    length: int
    depth: float | None
    episodes: int

    @property
    def label(self) -> str:
        depth = "any" if self.depth is None else f"{self.depth:g}"
        return f"{self.task.replace(':', '-')}-{self.length}-{depth}"


class TaskGroup:
    """The episodes of a case, their prompts read once for all settings."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.case = case
        self.episodes = episodes_of(case.task, subject.form, case.length, case.episodes, SEED, case.depth)
        alike: dict[Any, list[int]] = {}  # rows of one batch have their answers at the same places
        for index, episode in enumerate(self.episodes):
            alike.setdefault(tuple(episode.answers[-episode.scored :]), []).append(index)
        # Not of indexed ones: stock takes .13 GiB a row of 4K while it reads a prompt
        more = subject.model.device.type == "cuda" and subject.tokenizer is None and not subject.indexed
        many = max(1, _TOGETHER * (_ON_GPU if more else 1) // case.length)
        self._batches = [
            (part, _rows(subject, [self.episodes[index] for index in part]))
            for indices in alike.values()
            for part in (indices[begin : begin + many] for begin in range(0, len(indices), many))
        ]

    def run(self, setting: Setting, tell: Tell) -> dict[str, Any]:
        """accuracy: share of the episodes all of whose answers are right.  answers: the ids decoded of each."""
        answers: list[list[int]] = [[] for _ in self.episodes]
        digests, stats = [], []
        for done, (part, rows) in enumerate(self._batches):
            rows.read()
            tell(done, len(self._batches))
            found = rows.decode(setting)
            digests.append(found.digest)
            stats.append(found.stats)
            for index, ids in zip(part, found.ids.tolist(), strict=True):
                first, episode = rows.begin + 1, self.episodes[index]
                spans = episode.answers[-episode.scored :]
                answers[index] = [token for start, end in spans for token in ids[start - first : end - first]]
        right = [answer == list(episode.answer_tokens) for answer, episode in zip(answers, self.episodes, strict=True)]
        return {
            "accuracy": sum(right) / len(right),
            "right": right,
            "answers": answers,
            "digest": digests,
            **_rates(stats),
        }


class TextGroup:
    """Windows of a text; the last `tokens` of each are fed one by one and scored."""

    def __init__(self, subject: Subject, case: Case, tokens: int) -> None:
        self.case, self.tokens = case, tokens
        ids = subject.encode(text_of(case.task.partition(":")[2]))
        opening = list(subject.form.opening)
        fresh = case.length - len(opening)
        needed = fresh * case.episodes
        if len(ids) < needed:
            raise ValueError(f"{case.task}: expected at most {len(ids)} tokens in all windows, got {needed}")
        if tokens > fresh - 2:  # one is read before, one is the first that is fed
            raise ValueError(f"text_tokens: expected at most {max(0, fresh - 2)} of {case.length}, got {tokens}")
        given = torch.zeros(case.length, dtype=torch.bool)
        self._rows = [
            Rows(subject, torch.tensor([opening + ids[at : at + fresh]]), case.length - tokens - 1, given)
            for at in range(0, needed, fresh)
        ]
        self._dense: list[torch.Tensor] = []

    def run(self, setting: Setting, tell: Tell) -> dict[str, Any]:
        """perplexity; against dense the top-1 agreement, and the KL divergence from dense to it, nats a token."""
        loss, agreed, divergence, digests, stats = 0.0, 0, 0.0, [], []
        if not self._dense:
            for rows in self._rows:
                rows.read()
                kept = rows.decode(Setting("dense"), keep=True).logits
                assert kept is not None
                self._dense.append(kept.log_softmax(-1))
        for done, (rows, dense) in enumerate(zip(self._rows, self._dense, strict=True)):
            tell(done, len(self._rows))
            found = rows.decode(setting, keep=True)
            assert found.logits is not None
            ours, expected = found.logits.log_softmax(-1), rows.ids[:, -self.tokens :]
            loss -= ours.gather(2, expected[..., None]).double().sum().item()
            agreed += int((ours.argmax(-1) == dense.argmax(-1)).sum())
            divergence += kl_div(ours, dense, log_target=True, reduction="sum").double().item()
            digests.append(found.digest)
            stats.append(found.stats)
        scored = self.tokens * len(self._rows)
        return {
            "perplexity": math.exp(loss / scored),
            "agreement": agreed / scored,
            "kl": divergence / scored,
            "tokens": scored,
            "digest": digests,
            **_rates(stats),
        }


def _rows(subject: Subject, episodes: list[Episode]) -> Rows:
    spans = episodes[0].answers[-episodes[0].scored :]
    chosen = torch.zeros(len(episodes[0].ids), dtype=torch.bool)
    for start, end in spans:
        chosen[start:end] = True
    return Rows(subject, torch.tensor([episode.ids for episode in episodes]), spans[0][0] - QUESTION, chosen)


def _rates(stats: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Means over batches of what was predicted and read; nothing of dense."""
    given = [each for each in stats if each is not None]
    found: dict[str, Any] = {"selector_calls": sum(each["selector_calls"] for each in given)}
    for name in ("hit_rate", "hit_rate_weighted", "extra_rate"):
        values = [each[name] for each in given if each[name] is not None]
        if values:
            found[name] = sum(values) / len(values)
    return found if given else {}
