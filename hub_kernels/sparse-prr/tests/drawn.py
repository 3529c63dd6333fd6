"""What tests of several ops share: random inputs, their float64, and the number formats."""

import os

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # slow, and bfloat16 is cut there
FORMATS = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)
CUT = pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bfloat16, not rounds")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=CUT), torch.float16])
PROPERTY = settings(deadline=None, derandomize=True, max_examples=8 if INTERPRETED else 80)
UNTOUCHED = 77.0  # what a state is full of where nothing was written


def some(rng: np.random.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(rng.standard_normal(shape), dtype=dtype)


def angles(rng: np.random.Generator, rows: int, rotated: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """RoPE's cos and sin, [rows, rotated]."""
    angle = torch.tensor(rng.uniform(0, 6, (rows, rotated // 2)))
    return [torch.cat([turn, turn], 1).to(dtype) for turn in (angle.cos(), angle.sin())]


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().double().numpy()


def at(end: int, keys: torch.Tensor) -> torch.Tensor:
    """[B]: every row's new columns end there."""
    return torch.full((keys.shape[0],), end)


@st.composite
def chunkings(draw: st.DrawFn, total: int) -> list[int]:
    """How many tokens come at a time, `total` in all; 0 among them."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=6)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
