"""What `kernels benchmark` runs: each op at two published models' shapes, checked against its baseline.

    python hub_kernels/build.py hub_kernels/sparse-prr && kernels benchmark ./hub_kernels/sparse-prr

A time is that of one call with its launches, from Python, and of waiting for it: what an eager step pays. NOTES.md has
times of kernels alone. The speed-up is over a baseline on the same device: the op's plain-torch reference, but of
GvrTopk torch's stable sort, and of Repair the reference of serial attention, which has no prediction to reuse. On a CPU
the ops are those references: a speed-up there says nothing.
"""

from typing import Any

import torch
from kernels.benchmark import Benchmark

TOKENS = 2**17  # in the cache
BLOCK, SLOTS, FORCED = 64, 64, 3  # tokens of a block; blocks of a selection, those that are always in it
LLAMA_8B, GLM_4_9B = (8, 4, 128), (2, 16, 128)  # KV heads, query heads of one, head dim


class AtShapes:
    """An op's workloads: `prepare` makes the inputs, `run` is timed, with the references as ops as its baseline."""

    kernel: Any
    device: str
    seed = 0

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(torch.float32 if self.device == "cpu" else torch.bfloat16)

    def integers(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def prepare(self, heads: int, group: int, dim: int) -> None:
        raise NotImplementedError

    def run(self, ops: Any) -> torch.Tensor:
        raise NotImplementedError

    def setup_llama_8b(self) -> None:
        self.prepare(*LLAMA_8B)

    def setup_glm_4_9b(self) -> None:
        self.prepare(*GLM_4_9B)

    def benchmark_llama_8b(self) -> None:
        self.out = self.run(self.kernel)

    def benchmark_glm_4_9b(self) -> None:
        self.out = self.run(self.kernel)

    def verify_llama_8b(self) -> torch.Tensor:
        return self.run(self.kernel.reference)

    def verify_glm_4_9b(self) -> torch.Tensor:
        return self.run(self.kernel.reference)


class QuestScores(AtShapes, Benchmark):
    """Every block's score."""

    def prepare(self, heads: int, group: int, dim: int) -> None:
        self.query = self.randn(1, heads, group, dim)
        a, b = (self.randn(1, heads, TOKENS // BLOCK, dim) for _ in range(2))
        self.box = a.minimum(b), a.maximum(b)
        self.last = self.integers(TOKENS // BLOCK)

    def run(self, ops: Any) -> torch.Tensor:
        return ops.quest_scores(self.query, *self.box, 0, self.last)


class SelectBlocks(AtShapes, Benchmark):
    """The best blocks of each KV head, merged with the forced ones."""

    def prepare(self, heads: int, group: int, dim: int) -> None:
        blocks = TOKENS // BLOCK
        self.scores = torch.randn((1, heads, blocks), device=self.device)
        self.forced = self.integers(0, blocks - 2, blocks - 1)[None, None]
        self.scores[:, :, self.forced.flatten().long()] = float("nan")

    def run(self, ops: Any) -> torch.Tensor:
        return ops.select_blocks(self.scores, self.forced, min(SLOTS, self.scores.shape[2]) - FORCED)[0].float()


class GvrTopk(Benchmark):
    """An indexer's row: the best 2048 of all tokens (of a quarter where there are few)."""

    seed = 0

    def setup(self) -> None:
        self.scores = torch.randn((1, TOKENS), device=self.device)
        self.k = min(2048, TOKENS // 4)

    def benchmark_tokens(self) -> None:
        self.out = self.kernel.gvr_topk(self.scores, self.k).float()

    def verify_tokens(self) -> torch.Tensor:
        return self.scores.sort(dim=1, descending=True, stable=True).indices[:, : self.k].sort(dim=1).values.float()


class Attention(AtShapes, Benchmark):
    """Serial decoding's: partials of each selected block, merged."""

    def prepare(self, heads: int, group: int, dim: int) -> None:
        self.query = self.randn(1, heads, group, dim)
        self.states = tuple(self.randn(1, heads, TOKENS, dim) for _ in range(2))
        self.valid = torch.ones((1, TOKENS), dtype=torch.bool, device=self.device)
        self.start, self.end = self.integers(0), torch.tensor([TOKENS - 1], device=self.device)
        self.options = dict(scale=dim**-0.5, block_size=BLOCK)
        blocks = TOKENS // BLOCK
        chosen = [torch.randperm(blocks, device=self.device)[:SLOTS].sort().values for _ in range(heads)]
        self.selected = torch.stack(chosen)[None].int()

    def run(self, ops: Any) -> torch.Tensor:
        inputs = (self.query, *self.states, self.valid, self.start)
        return ops.merge_partials(ops.block_partials(*inputs, self.selected, self.end, **self.options))


class Repair(Attention):
    """PRR's, after the prediction's partials: three of four blocks were predicted, the rest is computed."""

    def prepare(self, heads: int, group: int, dim: int) -> None:
        super().prepare(heads, group, dim)
        self.predicted = self.selected[:, :, torch.arange(self.selected.shape[2], device=self.device) % 4 != 0]
        inputs = (self.query, *self.states, self.valid, self.start)
        self.partials = self.kernel.block_partials(*inputs, self.predicted, self.end, **self.options)

    def run(self, ops: Any) -> torch.Tensor:
        inputs = (self.query, *self.states, self.valid, self.start, self.selected, self.end)
        if ops is self.kernel:
            return ops.repair_merge(*inputs, self.predicted, self.partials, **self.options)
        return ops.repair_merge(*inputs, self.predicted[:, :, :0], None, **self.options)
