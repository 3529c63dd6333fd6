"""Train a tiny model, short sequences first: one that has learnt to look back over 48 bytes soon does over 16K.

A length is left as soon as every task is answered, or when its share of the time is over. Models with an indexer learn
dense, then the indexer alone, then both with attention reading only what is selected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hf_sparse_prr.evidence.indexer import State, training
from hf_sparse_prr.evidence.mixture import Batch, batches, names_for
from hf_sparse_prr.evidence.tasks import TASKS

LENGTHS = (48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)
_ROWS = 128  # query tokens a sequence that the indexer is compared at


@dataclass(frozen=True)
class Plan:
    """lengths: in the order they are trained, bytes.  tokens: a step.  steps: at least a length.  decay: steps in which
    the learning rate falls to 0.  warm_up, sparse: steps of the indexer's two phases, the second at `sparse_lengths`.
    workers: processes that draw
    batches.  reached: accuracy of each task's tokens at which a length is left.  The learning rate is `rate`, after
    100 steps."""

    lengths: tuple[int, ...] = LENGTHS
    tokens: int = 65536
    steps: int = 30
    decay: int = 400
    warm_up: int = 200
    sparse: int = 240
    sparse_lengths: tuple[int, ...] = (1024, 4096, 8192, 16384)
    workers: int = 2
    rate: float = 2e-3
    index_rate: float = 2e-3
    reached: float = 0.97
    seed: int = 0


@dataclass
class Progress:
    """Where training stands. steps: so far.  accuracy: by task, of tokens, smoothed.  log: one entry now and then."""

    phase: str = ""
    steps: int = 0
    loss: float = 0.0
    index_loss: float = 0.0
    accuracy: dict[str, float] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains `model`, in place, until it is good enough or the `minutes` are over. `tell` is given the progress."""

    def __init__(self, model: Any, plan: Plan, minutes: float, tell: Callable[[Progress], None]) -> None:
        self.model, self.plan, self.tell = model, plan, tell
        self.device = next(model.parameters()).device
        self.progress, self.started, self.seconds = Progress(), time.monotonic(), minutes * 60
        self.indexed = hasattr(model.config, "index_topk")
        self._pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def run(self) -> Progress:
        self.model.train()
        with training(self.model) if self.indexed else nullcontext(State()) as state:
            self._dense(state, 0.55 if self.indexed else 0.9)
            if self.indexed:
                self._warm_up(state, 0.68)
                self._sparse(state, 0.95)
        self.model.eval()
        return self.progress

    def over(self, share: float) -> bool:
        return time.monotonic() - self.started > share * self.seconds

    def _dense(self, state: State, share: float) -> None:
        """All lengths, then the learning rate falls to 0 over a mixture of the longer ones."""
        plan = self.plan
        optimizer = self._optimizer(self._others(), plan.rate)
        end = share * self.seconds
        for stage, length in enumerate(plan.lengths):
            left = 0.8 * end - (time.monotonic() - self.started)
            last = stage == len(plan.lengths) - 1
            until = time.monotonic() + max(left, 0.0) * (1.0 if last else 0.25 if stage else 0.5)
            self.progress.accuracy.clear()
            for count, batch in enumerate(self._batches(length)):
                self._set_rate(optimizer, plan.rate * min(1.0, (self.progress.steps + 1) / 100))
                self._step(optimizer, batch, state, f"dense {length}")
                good = count >= plan.steps and count % 10 == 0 and self._reached(length)
                if good or time.monotonic() > until:
                    break
        begun = time.monotonic()
        for count, batch in enumerate(self._mixed()):
            done = max(count / plan.decay, (time.monotonic() - begun) / max(1e-9, end - (begun - self.started)))
            if done >= 1.0:
                break
            self._set_rate(optimizer, plan.rate * (1.0 - done))
            self._step(optimizer, batch, state, "decay")

    def _warm_up(self, state: State, share: float) -> None:
        """The indexer alone: it learns the attention of the model, which stays as it is."""
        state.phase = "warm-up"
        optimizer = self._optimizer(self._indexers(), self.plan.index_rate)
        for count, batch in enumerate(self._mixed()):
            if count == self.plan.warm_up or self.over(share):
                break
            self._set_rate(optimizer, self.plan.index_rate * min(1.0, (count + 1) / 20))
            self._step(optimizer, batch, state, "warm-up")

    def _sparse(self, state: State, share: float) -> None:
        """Both, attention reading what is selected; the rate falls to 0."""
        state.phase, begun, plan = "sparse", time.monotonic(), self.plan
        left = max(1e-9, share * self.seconds - (begun - self.started))
        optimizer = self._optimizer(self._others(), plan.rate)
        optimizer.add_param_group({"params": self._indexers(), "index": True})
        for count, batch in enumerate(self._batches(*plan.sparse_lengths)):
            done = max(count / plan.sparse, (time.monotonic() - begun) / left)
            if done >= 1.0:
                break
            self._set_rate(optimizer, 0.25 * plan.rate * (1.0 - done))
            self._step(optimizer, batch, state, "sparse")

    def _step(self, optimizer: torch.optim.Optimizer, batch: Batch, state: State, phase: str) -> None:
        model, device = self.model, self.device
        ids, answers = batch.ids.to(device, non_blocking=True), batch.answers[:, 1:]
        rows, columns = (each.to(device, non_blocking=True) for each in answers.nonzero(as_tuple=True))
        state.losses, state.rows = [], None
        if state.phase != "dense":
            state.rows = self._compared(answers).to(device)
        given = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device) if self.indexed else None  # never looked at
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.set_grad_enabled(state.phase != "warm-up"):
                hidden = model.model(input_ids=ids, attention_mask=given, use_cache=False).last_hidden_state
                logits = model.lm_head(hidden[rows, columns]).float()
            expected = ids[rows, columns + 1]
            answering = cross_entropy(logits, expected)
            indexing = torch.stack(state.losses).mean() if state.losses else answering.new_zeros(())
        optimizer.zero_grad(set_to_none=True)
        (indexing if state.phase == "warm-up" else answering + indexing).backward()
        torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
        optimizer.step()
        right = (logits.detach().argmax(-1) == expected).float()
        kinds = batch.tasks.to(device)[rows]
        self._pending.append((answering.detach(), indexing.detach(), right, kinds))
        self.progress.steps += 1
        self.progress.phase = phase
        if len(self._pending) == 10:
            self._collect(ids.shape[1])

    def _collect(self, length: int) -> None:
        """Look at the last steps' results: not at each step, a GPU would wait."""
        progress = self.progress
        answering, indexing, right, kinds = zip(*self._pending, strict=True)
        self._pending.clear()
        progress.loss, progress.index_loss = torch.stack(answering).mean().item(), torch.stack(indexing).mean().item()
        kind, hit = torch.cat(kinds).cpu(), torch.cat(right).cpu()
        for index, name in enumerate(names_for(10**9)):
            chosen = hit[kind == index]
            if len(chosen):
                before = progress.accuracy.get(name, chosen.mean().item())
                progress.accuracy[name] = 0.5 * before + 0.5 * chosen.mean().item()
        progress.log.append(
            {
                "seconds": round(time.monotonic() - self.started, 1),
                "steps": progress.steps,
                "phase": progress.phase,
                "length": length,
                "loss": round(progress.loss, 4),
                "index_loss": round(progress.index_loss, 4),
                "accuracy": {name: round(value, 4) for name, value in progress.accuracy.items()},
            }
        )
        self.tell(progress)

    def _reached(self, length: int) -> bool:
        accuracy = self.progress.accuracy
        wanted = self.plan.reached if length >= 256 else 0.95 * self.plan.reached
        return all(accuracy.get(name, 0.0) >= wanted for name in names_for(length) if name in TASKS)

    def _compared(self, answers: torch.Tensor) -> torch.Tensor:
        """[B, R]: half of them where answers are given, half anywhere."""
        generator = torch.Generator().manual_seed(self.plan.seed + self.progress.steps)
        batch, length = answers.shape
        count = min(_ROWS, length) // 2
        noise = torch.rand((batch, length), generator=generator)
        told = (noise + answers).topk(count, dim=1).indices
        return torch.cat([told, torch.randint(0, length, (batch, count), generator=generator)], dim=1)

    def _batches(self, *lengths: int) -> Iterator[Batch]:
        """Numbered by the steps so far, so none comes twice."""
        return batches(self.plan.seed, self.progress.steps, self.plan.tokens, lengths, self.plan.workers)

    def _mixed(self) -> Iterator[Batch]:
        """Of the longer lengths, in turn."""
        longer = [length for length in self.plan.lengths if length >= 512]
        return self._batches(*(longer or self.plan.lengths))

    def _optimizer(self, parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=self.device.type == "cuda"
        )

    @staticmethod
    def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate

    def _indexers(self) -> list[torch.nn.Parameter]:
        return [each for name, each in self.model.named_parameters() if ".indexer." in name]

    def _others(self) -> list[torch.nn.Parameter]:
        return [each for name, each in self.model.named_parameters() if ".indexer." not in name]
