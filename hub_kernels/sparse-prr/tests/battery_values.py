"""Rows of scores that broke a top-k somewhere, or would break a careless one: each draws one float32 row of N.

Where they come from: the tests and the trackers of TensorRT-LLM, FlashInfer, SGLang, vLLM and DeepSelect; the last
group is ours. Sizes and k are the published ones, and a name says no more than the row does.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

INF, NAN = float("inf"), float("nan")
Make = Callable[[int, int], torch.Tensor]  # (N, k) -> float32 [N]


class Row(NamedTuple):
    make: Make
    columns: int
    k: int


def of_bits(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def shuffled(row: torch.Tensor) -> torch.Tensor:
    return row[torch.randperm(len(row))]


def scattered(row: torch.Tensor, *values: float, count: int) -> torch.Tensor:
    """The row with `count` entries, anywhere, replaced by one of the values each."""
    at = torch.randperm(len(row))[:count]
    row[at] = torch.tensor([float(value) for value in values])[torch.randint(len(values), (len(at),))]
    return row


# ---- distributions: (lowest, mean, highest) as published for real layers; the spread of all but weibull is our choice


def beta(lowest: float, mean: float, highest: float, n: int, k: int) -> torch.Tensor:
    share = (mean - lowest) / (highest - lowest)
    return lowest + (highest - lowest) * torch.distributions.Beta(8 * share, 8 - 8 * share).sample((n,))


def logistic(lowest: float, mean: float, highest: float, n: int, k: int) -> torch.Tensor:
    uniform = torch.rand(n, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    return (mean + torch.logit(uniform)).clamp(lowest, highest).float()


def lognormal(lowest: float, mean: float, highest: float, n: int, k: int) -> torch.Tensor:
    spread = torch.exp(0.5 * torch.randn(n) - 0.125)  # of mean 1
    return (lowest + (mean - lowest) * spread).clamp(max=highest)


def weibull(lowest: float, mean: float, highest: float, n: int, k: int) -> torch.Tensor:
    spread = torch.empty(n).exponential_() ** (1 / 14) / math.gamma(1 + 1 / 14)
    return (lowest + (mean - lowest) * spread).clamp(max=highest)


FITTED: dict[str, Make] = {
    "beta-1": partial(beta, -0.75, 1.90, 13.60),
    "beta-2": partial(beta, -2.96, 1.68, 12.85),
    "beta-3": partial(beta, -4.51, 1.75, 11.24),
    "logistic": partial(logistic, -0.47, 1.46, 12.32),
    "lognormal": partial(lognormal, -4.12, 2.55, 17.28),
    "weibull-1": partial(weibull, -3.04, 1.57, 12.30),
    "weibull-2": partial(weibull, -2.26, 1.28, 9.71),
}


# ---- plateaus: many equal scores, and a histogram's bin that holds too many


def plateau(n: int, count: int, above: int, distinct: bool = False) -> torch.Tensor:
    """`count` entries stand out, `above` of them larger than the others; these are equal, or neighbours."""
    level = torch.full((count - above,), 1.0)
    if distinct:
        level += torch.arange(count - above) * 2.0**-20
    return shuffled(torch.cat([2 + torch.rand(above), level, 0.9 * torch.rand(n - count)]))


def ties(count: int, n: int, k: int) -> torch.Tensor:
    """A plateau with 100 larger entries, shorter where the row is."""
    return plateau(n, min(count, n - n // 8), 100)


def relu_sparse(positive: int, n: int, k: int) -> torch.Tensor:
    at = torch.randperm(n)[:positive]
    return torch.zeros(n).index_fill(0, at, 0.1).index_add(0, at, torch.rand(len(at)))


def one_bin(first: int, n: int, k: int) -> torch.Tensor:
    """Neighbouring floats, ascending: distinct, and one bin for any histogram of their top bits."""
    return of_bits(first + torch.arange(n))


def quantised(levels: int, head: int, n: int, k: int) -> torch.Tensor:
    """A few values, and `head` larger ones."""
    return scattered(torch.randint(levels, (n,)).float(), *range(levels, levels + 9), count=head)


def near_ties(n: int, k: int) -> torch.Tensor:
    """Every score has a neighbour one unit in the last place away."""
    bits = torch.randn((n + 1) // 2).view(torch.int32).repeat_interleave(2)[:n]
    return shuffled(of_bits(bits + torch.arange(n) % 2))


# ---- hostile bits


def random_bits(n: int, k: int) -> torch.Tensor:
    return of_bits(torch.randint(-(2**31), 2**31, (n,)))


def hotspots(n: int, k: int) -> torch.Tensor:
    """Random bits with every pivot, and half of the row within 64 units in the last place of one of them."""
    pivots = torch.tensor([0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1.1754942e-38, 1.0, -1.0, 3.4028235e38])
    near = pivots.view(torch.int32)[torch.randint(len(pivots), (n,))] + torch.randint(-64, 65, (n,))
    row = torch.where(torch.rand(n) < 0.5, of_bits(near.clamp(-(2**31), 2**31 - 1)), random_bits(n, k))
    return scattered(row, *pivots.tolist(), count=n // 8)


def outlier_and_cluster(n: int, k: int) -> torch.Tensor:
    """One 1e30; more than k, and no more than a buffer holds, that are nearly equal; the rest far below."""
    cluster = 1 + torch.randperm(min(k + k // 2, n - 1)) * 2.0**-23
    return shuffled(torch.cat([torch.tensor([1e30]), cluster, -1e3 * torch.rand(n - 1 - len(cluster))]))


def with_few(n: int, rest: float, count: int) -> torch.Tensor:
    """`count` normal scores among `rest`."""
    at = torch.randperm(n)[:count]
    return torch.full((n,), rest).index_copy(0, at, torch.randn(len(at)))


ROWS: dict[str, Row] = {
    "normal": Row(lambda n, k: torch.randn(n), 16_387, 2048),
    "uniform": Row(lambda n, k: torch.rand(n), 16_387, 512),
    # TensorRT-LLM
    **{name: Row(make, 16_384, 2048) for name, make in FITTED.items()},
    "ties-6000": Row(partial(ties, 6000), 12_000, 2048),
    "ties-20000": Row(partial(ties, 20_000), 32_768, 1024),
    "ties-100000": Row(partial(ties, 100_000), 131_072, 512),
    # FlashInfer
    "all-minus-inf": Row(lambda n, k: torch.full((n,), -INF), 8192, 512),
    "ten-finite": Row(lambda n, k: with_few(n, -INF, 10), 8192, 512),
    "ten-finite-first": Row(lambda n, k: torch.cat([torch.randn(10), torch.full((n - 10,), -INF)]), 8192, 2048),
    **{f"relu-{count}": Row(partial(relu_sparse, count), 32_768, 2048) for count in (3, 100, 1000)},
    "N-is-k-plus-1": Row(lambda n, k: torch.randn(n), 2049, 2048),
    "constant": Row(lambda n, k: torch.full((n,), 0.25), 16_387, 1024),
    "two-values": Row(lambda n, k: torch.randint(2, (n,)).float(), 16_387, 1024),
    "huge-flood-above-k": Row(lambda n, k: scattered(torch.randn(n), 3e38, count=k + 300), 16_387, 512),
    "huge-flood-below-k": Row(lambda n, k: scattered(torch.randn(n), 3e38, count=k - 300), 16_387, 512),
    "quantised-4": Row(partial(quantised, 4, 0), 16_387, 2048),
    "denormals": Row(lambda n, k: of_bits(torch.randint(2000, (n,))), 16_387, 2048),
    "denormals-of-both-signs": Row(
        lambda n, k: of_bits(torch.randint(99, (n,)) - 2**31 * (torch.rand(n) < 0.5)), 16_387, 512
    ),
    "three-inf": Row(lambda n, k: scattered(torch.randn(n), INF, count=3), 16_387, 512),
    "inf-above-k": Row(lambda n, k: scattered(torch.randn(n), INF, count=k + 200), 16_387, 2048),
    "inf-is-k": Row(lambda n, k: scattered(torch.randn(n), INF, count=k), 16_387, 1024),
    "one-bin": Row(partial(one_bin, 0x3F800000), 65_536, 1024),
    "one-bin-pivot": Row(partial(one_bin, 0x3805ED27), 65_536, 1024),
    "sawtooth": Row(lambda n, k: torch.arange(n) % 64 / 64, 16_384, 1024),
    "ones-then-twos": Row(lambda n, k: torch.where(torch.arange(n) < n - k // 2, 1.0, 2.0), 16_384, 1024),
    "relu-quantised": Row(lambda n, k: torch.round(torch.randn(n).relu() * 32) / 32, 16_384, 2048),
    # SGLang
    "quantised-8": Row(partial(quantised, 8, 0), 65_536, 2048),
    "quantised-8-head-300": Row(partial(quantised, 8, 300), 65_536, 2048),
    "nan-4096": Row(lambda n, k: scattered(torch.randn(n), NAN, count=min(4096, n - 700)), 16_384, 2048),
    "relu-of-normal": Row(lambda n, k: (torch.randn(n) - 1.28).relu(), 16_384, 2048),
    "relu-100-of-8320": Row(partial(relu_sparse, 100), 8320, 2048),
    "inside-a-10-bit-bin": Row(lambda n, k: 1 + torch.randperm(n) * 2.0**-22, 131_072, 2048),
    # vLLM
    **{
        f"one-bin-{count}": Row(lambda n, k: shuffled(torch.linspace(1, 1.2449, n)), count, 2048)
        for count in (16_383, 16_384, 16_385, 16_512)
    },
    "one-bin-shuffled": Row(lambda n, k: shuffled(one_bin(0x3F800000, n, k)), 16_512, 512),
    "descending": Row(lambda n, k: -torch.arange(n).float(), 4096, 512),
    "near-ties": Row(near_ties, 16_387, 1000),
    # DeepSelect
    "random-bits": Row(random_bits, 16_387, 1024),
    "hotspots": Row(hotspots, 16_387, 4096),
    "ascending": Row(lambda n, k: torch.arange(n).float(), 16_384, 512),
    "descending-long": Row(lambda n, k: -torch.arange(n).float(), 16_384, 512),
    # ours
    "outlier-and-cluster": Row(outlier_and_cluster, 16_387, 2048),
    "outlier-over-neighbours": Row(
        lambda n, k: torch.cat([torch.tensor([1e30]), one_bin(0x3F800000, n - 1, k)]), 9001, 2048
    ),
    "range-overflows": Row(lambda n, k: (torch.rand(n, dtype=torch.float64) * 6e38 - 3e38).float(), 16_387, 2048),
    "huge-of-both-signs": Row(lambda n, k: scattered(torch.randn(n), 3e38, -3e38, count=n // 2), 16_387, 2048),
    "zeros-of-both-signs": Row(lambda n, k: scattered(torch.zeros(n), 0.0, -0.0, count=n), 16_387, 700),
    "zeros-among-normal": Row(lambda n, k: scattered(torch.randn(n), 0.0, -0.0, count=n // 2), 16_387, 2048),
    "geometric": Row(lambda n, k: torch.ldexp(torch.ones(n), 120 - torch.arange(n) % 250), 16_387, 1000),
    "all-nan": Row(lambda n, k: torch.full((n,), NAN), 9000, 512),
    "nan-scattered": Row(lambda n, k: scattered(torch.randn(n), NAN, -NAN, count=n // 2), 16_387, 2048),
    "nan-and-inf": Row(lambda n, k: scattered(torch.randn(n), NAN, INF, -INF, count=n - n // 8), 16_387, 2048),
    "fewer-real-than-k": Row(lambda n, k: with_few(n, NAN, k // 3), 16_387, 512),
    "k-real": Row(lambda n, k: with_few(n, NAN, k), 16_387, 512),
    "k-above-all-others": Row(lambda n, k: plateau(n, k, k // 2), 16_387, 2048),
}  # fmt: skip
