"""Hints of every kind that a cache, a stale slot or an enemy might hand over: none changes a result."""

import torch

INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)
FEW = ("none", "half-right", "random", "bottom")  # where a call is dear


def kept(best: torch.Tensor, random: torch.Tensor, k: int, share: float) -> torch.Tensor:
    """A previous step's winners: the largest entry first, `share` of them winning again, the others anywhere."""
    return torch.cat([best[:, : max(int(k * share), 1)], random], dim=1)[:, :k]


def hints(scores: torch.Tensor, k: int) -> dict[str, torch.Tensor | None]:
    """By name, [R, M] integers. Called while `battery.drawing`: made and drawn where the scores are, on the host."""
    rows, columns = scores.shape
    nan = scores.isnan()
    best = scores.double().masked_fill(nan, -float("inf")).argsort(dim=1, descending=True)
    random = torch.randint(columns, (rows, k))
    half = -(-k // 2)
    return {
        "none": None,
        "right": best[:, :k],
        "half-right": kept(best, random, k, 0.5),
        "nearly-right": kept(best, random, k, 0.9),
        "one-behind": best[:, :k] - 1,
        "one-ahead": (best[:, :k] + 1).int(),
        "random": random.int(),
        "evenly-spaced": torch.linspace(0, columns - 1, k).long().expand(rows, -1),
        "bottom": best[:, -k:].int(),
        "just-below": best[:, k : 2 * k].int(),
        "highest-few": best[:, :8],
        "all-zero": torch.zeros((rows, k), dtype=torch.int32),
        "all-same": random[:, :1].expand(-1, k),
        "all-largest": best[:, :1].repeat(1, k),
        "half-doubled": random[:, :half].repeat(1, 2),
        "tail-minus-one": torch.cat([best[:, :half], torch.full((rows, k - half), -1)], dim=1),
        "all-minus-one": torch.full((rows, k), -1, dtype=torch.int32),
        "nan-entries": nan.byte().argsort(dim=1, descending=True, stable=True)[:, :k],
        "another-request": best[:, :k].flip(0),
        "longer-row": torch.randint(2 * columns, (rows, k)).int(),
        "out-of-range": torch.tensor([INT64.min, INT64.max, -7, columns, 2**32, INT32.max]).repeat(rows, k // 6 + 1),
        "out-of-range-int32": torch.tensor([INT32.min, INT32.max, -1, columns]).int().repeat(rows, k // 4 + 1),
        "none-at-all": torch.empty((rows, 0), dtype=torch.int64),
    }
