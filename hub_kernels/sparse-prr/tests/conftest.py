"""What the tests of every op share: the loaded kernel repo, the tolerances, comparing bits, an attention problem.

The repo is loaded as a user would load it, through `kernels`. Tests make tensors with torch factories and compare on
the host, so they say nothing about a device. Every oracle is written in its own test file, in float64 or plain Python.
"""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import kernels
import numpy as np
import pytest
import torch

# The sources; or what was built from them: HF_SPARSE_PRR_TEST_KERNELS=hub_kernels/sparse-prr takes the variant of
# `build/` that fits, a compiled one for instance
KERNEL_REPO = Path(os.environ.get("HF_SPARSE_PRR_TEST_KERNELS", Path(__file__).parents[1] / "torch-ext" / "sparse_prr"))


class Tolerance(NamedTuple):
    """|actual - expected| <= relative * magnitude + absolute."""

    relative: float
    absolute: float


# By dtype of the inputs. Oracles see the rounded inputs and every op accumulates in fp32, so half the bits in the
# inputs is no excuse for a larger error.
TOLERANCES = {
    torch.float32: Tolerance(1e-5, 1e-6),
    torch.bfloat16: Tolerance(1e-5, 1e-6),
    torch.float16: Tolerance(1e-5, 1e-6),
}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_environment() -> None:
    """UsageError, one line, for what the environment asks for and can't be had: every test would fail, or test another
    thing than was meant."""
    device = os.environ.get("HF_SPARSE_PRR_TEST_DEVICE") or "cpu"
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise pytest.UsageError(f"HF_SPARSE_PRR_TEST_DEVICE: expected cpu, or cuda where there is a GPU, got {device}")
    if os.environ.get("TRITON_INTERPRET") and find_spec("triton") is None:
        raise pytest.UsageError("TRITON_INTERPRET: expected triton to be installed, got none")
    cases = os.environ.get("PRR_CASES", "1")
    if not cases.isdecimal() or int(cases) < 1:
        raise pytest.UsageError(f"PRR_CASES: expected an int >= 1, got {cases}")
    try:
        kernels.get_local_kernel(KERNEL_REPO)
    except FileNotFoundError:
        asked = "HF_SPARSE_PRR_TEST_KERNELS: expected a kernel repo with a variant for this machine, got"
        raise pytest.UsageError(f"{asked} {KERNEL_REPO}") from None


def pytest_configure() -> None:
    check_environment()
    if device := os.environ.get("HF_SPARSE_PRR_TEST_DEVICE"):
        torch.set_default_device(device)


@pytest.fixture(scope="session")
def repo_path() -> Path:
    return KERNEL_REPO


@pytest.fixture(scope="session")
def ops() -> ModuleType:
    return kernels.get_local_kernel(KERNEL_REPO)


def float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()


@pytest.fixture(scope="session")
def assert_close():
    """assert_close(actual, expected, dtype, magnitude=|expected|), in float64; NaN and infinities must match."""

    def check(actual, expected, dtype, magnitude=None):
        actual, expected = float64(actual), np.asarray(expected, np.float64)
        assert actual.shape == expected.shape
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(actual[~finite], expected[~finite])
        magnitude = np.abs(expected) if magnitude is None else np.broadcast_to(magnitude, expected.shape)
        bound = TOLERANCES[dtype].relative * magnitude[finite] + TOLERANCES[dtype].absolute
        error = np.abs(actual[finite] - expected[finite])
        worst = np.argmax(error / bound) if error.size else None
        # not >: an unwanted NaN fails too
        assert worst is None or error[worst] <= bound[worst], (
            f"{np.argwhere(finite)[worst].tolist()}: expected {expected[finite][worst]}, "
            f"got {actual[finite][worst]}, allowed {bound[worst]}"
        )

    return check


@pytest.fixture(scope="session")
def assert_same_bits():
    """assert_same_bits(a, b): tensors or tuples of them; -0.0 is not +0.0, any NaN is any other NaN."""

    def check(a, b):
        if isinstance(a, tuple):
            for x, y in zip(a, b, strict=True):
                check(x, y)
            return
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        bits = _BITS[a.element_size()]
        a_bits, b_bits = a.contiguous().view(bits), b.contiguous().view(bits)
        if a.is_floating_point():
            a_bits, b_bits = a_bits.masked_fill(a.isnan(), -1), b_bits.masked_fill(b.isnan(), -1)
        differs = (a_bits != b_bits).nonzero().tolist()
        assert not differs, f"{len(differs)} of {a.numel()} differ, first at {differs[0]}"

    return check


@dataclass(frozen=True)
class Problem:
    """Inputs of block_partials and repair_merge. Whatever is not attended holds NaN or an infinity."""

    ops: ModuleType
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor
    start: torch.Tensor
    end: int
    scale: float
    block_size: int

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    @property
    def blocks(self) -> int:
        """Blocks that the longest batch row has begun."""
        return max(0, -(-(self.end - int(self.start.min())) // self.block_size))

    @property
    def ends(self) -> torch.Tensor:
        return torch.full((len(self.start),), self.end)

    def columns(self, row: int, block: int) -> list[int]:
        """Columns that the query of a batch row attends in one block."""
        if block < 0:
            return []
        first = int(self.start[row]) + block * self.block_size
        return [t for t in range(first, min(first + self.block_size, self.end)) if self.valid[row, t]]

    def alone(self, row: int, head: int) -> "Problem":
        """One batch row and KV head, in a batch of its own."""
        b, h = slice(row, row + 1), slice(head, head + 1)
        parts = {"query": self.query[b, h], "keys": self.keys[b, h], "values": self.values[b, h]}
        return replace(self, **parts, valid=self.valid[b], start=self.start[b])

    def partials(self, blocks: torch.Tensor):
        inputs = (self.query, self.keys, self.values, self.valid, self.start)
        return self.ops.block_partials(*inputs, blocks, self.ends, scale=self.scale, block_size=self.block_size)

    def repair_merge(self, selected: torch.Tensor, predicted: torch.Tensor, partials=None) -> torch.Tensor:
        """Attention over `selected`; the partials of `predicted` are computed here unless given."""
        inputs = (self.query, self.keys, self.values, self.valid, self.start)
        return self.ops.repair_merge(
            *inputs,
            selected,
            self.ends,
            predicted,
            self.partials(predicted) if partials is None else partials,
            scale=self.scale,
            block_size=self.block_size,
        )


@pytest.fixture(scope="session")
def make_problem(ops):
    """make_problem(seed, batch=2, ...): a random Problem with ragged starts, holes, and room behind the last token."""

    def make(
        seed,
        *,
        batch=2,
        heads=2,
        group=3,
        dim=64,
        block_size=16,
        tokens=100,
        start=None,
        holes=0.2,
        dtype=torch.float32,
        room=5,
    ):
        rng = np.random.default_rng(seed)
        columns = tokens + room
        query, keys, values = (
            torch.tensor(rng.standard_normal((batch, heads, n, dim)), dtype=dtype) for n in (group, columns, columns)
        )
        if start is None:
            start = rng.integers(0, max(1, min(tokens, 2 * block_size)), batch)
        start = torch.tensor(start, dtype=torch.int32)
        valid = torch.tensor(rng.random((batch, columns)) >= holes)
        problem = Problem(ops, query, keys, values, valid, start, tokens, dim**-0.5, block_size)
        ignored = ~valid | (torch.arange(columns) >= tokens) | (torch.arange(columns) < start[:, None])
        garbage = torch.tensor([float("nan"), float("inf"), float("-inf")], dtype=dtype)
        for buffer in (keys, values):
            noise = garbage[torch.tensor(rng.integers(0, 3, (batch, heads, columns, dim)))]
            buffer.copy_(torch.where(ignored[:, None, :, None], noise, buffer))
        return problem

    return make
