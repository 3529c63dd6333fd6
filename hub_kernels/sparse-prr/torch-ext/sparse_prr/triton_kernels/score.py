"""Block scores."""

import torch
import triton
import triton.language as tl

from ..reference.score import check_infllm_arguments, check_quest_arguments
from .launch import options, wait_for_previous
from .tile import padded
from .tuned import config

_TILES = 128  # whose maxima and sums a program combines at a time, one a thread: a sum's order must not follow N
_COMBINING = 4  # its warps


@triton.jit
def _quest(
    query, lower, upper, last, scores, first, N,
    q_b, q_h, q_g, q_d, l_b, l_h, l_n, l_d, u_b, u_h, u_n, u_d, e_b,
    H, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MAX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n, d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, DP)
    end = tl.load(last + b * e_b).to(tl.int64)
    inside = (n >= first) & (n < end) & (n < N)
    held = inside[:, None] & (d < D)[None, :]
    low = tl.load(lower + b * l_b + h * l_h + n[:, None].to(tl.int64) * l_n + d[None, :] * l_d, mask=held, other=0.0)
    high = tl.load(upper + b * u_b + h * u_h + n[:, None].to(tl.int64) * u_n + d[None, :] * u_d, mask=held, other=0.0)
    low, high = low.to(tl.float32), high.to(tl.float32)
    empty = tl.sum(tl.where((d == 0)[None, :] & (low > high), 1, 0), axis=1) > 0
    positive, negative = tl.zeros([DP], tl.float32), tl.zeros([DP], tl.float32)
    best = tl.full([BN], float("-inf"), tl.float32)
    bad = tl.zeros([BN], tl.int32)
    for g in tl.static_range(G):
        q = tl.load(query + b * q_b + h * q_h + g * q_g + d * q_d, mask=d < D, other=0.0).to(tl.float32)
        up = tl.maximum(q, 0.0, propagate_nan=tl.PropagateNan.ALL)
        down = tl.maximum(-q, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if MAX:
            bound = tl.sum(up[None, :] * high - down[None, :] * low, axis=1)
            bad = bad | (bound != bound).to(tl.int32)
            best = tl.where(bound > best, bound, best)
        else:
            positive += up
            negative += down
    if MAX:
        score = tl.where(bad > 0, float("nan"), best)
    else:
        score = tl.sum(positive[None, :] * high - negative[None, :] * low, axis=1)
    score = tl.where(inside & (empty == 0), score, float("nan"))
    tl.store(scores + (b * H + h) * N + n, score, mask=n < N)


def quest_scores(
    query: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    first: int,
    last: torch.Tensor,
    *,
    group: str = "sum",
) -> torch.Tensor:
    """As the reference. Reads 2 D values a scored block."""
    check_quest_arguments(query, lower, upper, last, group)
    batch, heads, heads_of_group, dim = query.shape
    blocks = lower.shape[2]
    scores = query.new_empty((batch, heads, blocks), dtype=torch.float32)
    if scores.numel() == 0:
        return scores
    # A sum's order follows the strides of what is summed
    lower, upper = lower.contiguous(), upper.contiguous()
    tuned = config("quest", query)
    _quest[(triton.cdiv(blocks, tuned["BN"]), heads, batch)](
        query, lower, upper, last, scores, first, blocks,
        *query.stride(), *lower.stride(), *upper.stride(), *last.stride(),
        heads, G=heads_of_group, D=dim, DP=padded(dim), MAX=group == "max",
        **options(query, **tuned),
    )  # fmt: skip
    return scores


@triton.jit
def _window_logits(
    query, means, filled, length, logits, peaks, totals, N, tiles, scale, stride,
    q_b, q_h, q_g, q_d, c_b, c_h, c_n, c_w, c_d, f_b, f_h, f_n, f_w, t_b,
    H, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, BW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Logits of BW windows; and of each query head the maximum and the sum of what is finite in them.

    logits: -inf for a window that isn't visible, NaN for one that spoils its block.
    """
    wait_for_previous(PDL)
    tile, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    w = tile * BW + tl.arange(0, BW)
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    n, slot = (w // W).to(tl.int64), w % W
    inside = w < N * W
    visible = inside & ((w + 1) * stride <= tl.load(length + b * t_b).to(tl.int64))
    visible = visible & (tl.load(filled + b * f_b + h * f_h + n * f_n + slot * f_w, mask=inside, other=0) != 0)
    held = visible[:, None] & (d < D)[None, :]
    mean = tl.load(
        means + b * c_b + h * c_h + n[:, None] * c_n + slot[:, None] * c_w + d[None, :] * c_d, mask=held, other=0.0
    )
    q = tl.load(
        query + b * q_b + h * q_h + g[:, None] * q_g + d[None, :] * q_d, mask=(g < G)[:, None] & (d < D)[None, :],
        other=0.0,
    )  # fmt: skip
    x = tl.dot(q, tl.trans(mean), input_precision="ieee") * scale
    broken = (x != x) | (x == float("inf"))
    good = visible[None, :] & (broken == 0)
    counted = tl.where(good, x, float("-inf"))
    peak = tl.max(counted, axis=1)
    total = tl.sum(tl.exp(counted - tl.where(peak == float("-inf"), 0.0, peak)[:, None]), axis=1)
    x = tl.where(x == float("-inf"), -3.4e38, x)  # a share of 0, and not what hides a window
    x = tl.where(visible[None, :], tl.where(broken, float("nan"), x), float("-inf"))
    row = ((b * H + h) * G + g) * N * W
    tl.store(logits + row[:, None] + w[None, :], x, mask=(g < G)[:, None] & inside[None, :])
    at = ((b * H + h) * G + g) * tiles + tile
    tl.store(peaks + at, peak, mask=g < G)
    tl.store(totals + at, total, mask=g < G)


@triton.jit
def _combine(peaks, totals, tiles, TC: tl.constexpr, PDL: tl.constexpr):
    """Of one query head: its tiles' maximum, 0 if there is none, and their sum under it, in place of the first tile's.
    TC at a time: room behind the last window changes no bit."""
    wait_for_previous(PDL)
    row, t = tl.program_id(0).to(tl.int64) * tiles, tl.arange(0, TC)
    top = tl.full([TC], float("-inf"), tl.float32)
    for begin in range(0, tiles, TC):
        top = tl.maximum(top, tl.load(peaks + row + begin + t, mask=begin + t < tiles, other=float("-inf")))
    highest = tl.max(top, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([TC], tl.float32)
    for begin in range(0, tiles, TC):
        peak = tl.load(peaks + row + begin + t, mask=begin + t < tiles, other=float("-inf"))
        part = tl.load(totals + row + begin + t, mask=begin + t < tiles, other=0.0)
        total += part * tl.exp(peak - highest)
    whole = tl.sum(total, axis=0)
    tl.debug_barrier()  # the first tile's are read by now
    tl.store(peaks + row, highest)
    tl.store(totals + row, whole)


@triton.jit
def _window_shares(
    logits, peaks, totals, last, scores, first, N, tiles, e_b, H,
    G: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of BN blocks from the logits of their windows, under the softmax of the whole row."""
    wait_for_previous(PDL)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n, slot = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, W)
    inside = n < N
    w = n[:, None] * W + slot[None, :]
    summed = tl.zeros([BN, W], tl.float32)
    seen = tl.zeros([BN, W], tl.int32)
    for g in tl.static_range(G):
        row = (b * H + h) * G + g
        x = tl.load(logits + row * N * W + w, mask=inside[:, None], other=float("-inf"))
        seen = seen | (x != float("-inf")).to(tl.int32)
        summed += tl.exp(x - tl.load(peaks + row * tiles)) / tl.load(totals + row * tiles)
    nan = (summed != summed) & (seen > 0)
    best = tl.max(tl.where(seen > 0, summed, float("-inf")), axis=1)
    spoiled = tl.sum(nan.to(tl.int32), axis=1) > 0
    scored = (n >= first) & (n < tl.load(last + b * e_b).to(tl.int64)) & (tl.sum(seen, axis=1) > 0)
    score = tl.where(scored & (spoiled == 0), best, float("nan"))
    tl.store(scores + (b * H + h) * N + n, score, mask=inside)


def infllm_scores(
    query: torch.Tensor,
    means: torch.Tensor,
    filled: torch.Tensor,
    first: int,
    last: torch.Tensor,
    length: torch.Tensor,
    *,
    scale: float,
    stride: int,
) -> torch.Tensor:
    """As the reference. The softmax is exact: one kernel leaves logits and each tile's maximum and sum, one combines
    those, and one takes shares. W, the windows of a block, is a power of two up to 8."""
    stride = check_infllm_arguments(query, means, filled, last, length, stride)
    batch, heads, group, dim = query.shape
    blocks, windows = means.shape[2:4]
    if windows & (windows - 1):
        raise ValueError(f"means: expected W a power of two, got {windows}")
    scores = query.new_empty((batch, heads, blocks), dtype=torch.float32)
    if scores.numel() == 0:
        return scores
    tuned = config("window_logits", query)
    tiles = triton.cdiv(blocks * windows, tuned["BW"])
    logits = query.new_empty((batch, heads, group, blocks * windows), dtype=torch.float32)
    peaks, totals = (query.new_empty((batch, heads, group, tiles), dtype=torch.float32) for _ in range(2))
    filled = filled.view(torch.uint8)
    _window_logits[(tiles, heads, batch)](
        query, means, filled, length, logits, peaks, totals, blocks, tiles, scale, stride,
        *query.stride(), *means.stride(), *filled.stride(), *length.stride(),
        heads, G=group, D=dim, GP=padded(group), DP=padded(dim), W=windows,
        **options(query, **tuned),
    )  # fmt: skip
    _combine[(batch * heads * group,)](peaks, totals, tiles, TC=_TILES, **options(query, num_warps=_COMBINING))
    tuned = config("window_shares", query)
    _window_shares[(triton.cdiv(blocks, tuned["BN"]), heads, batch)](
        logits, peaks, totals, last, scores, first, blocks, tiles, *last.stride(), heads,
        G=group, W=windows, **options(query, **tuned),
    )  # fmt: skip
    return scores
