"""Token scores of a model's own indexer, and the tokens that score best."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference.index import check_index_arguments
from .launch import options, wait_for_previous
from .tile import padded
from .topk import gvr_topk, order_key

TOKENS = 64  # columns that are held at a time for one query, three times as many on their way
TILES = 256  # of a row at most, where one query asks: all of them run at once, and the next kernel starts the sooner
_QUERIES = 16  # of a program, where there are more than one: keys are read once for all of them
_WARPS = 4


class Candidates(NamedTuple):
    """What a scorer leaves of scores at or above a threshold, so that the top-k needs no pass over them.

    counts: int32 [R, tiles + 1], the last one 0: blocks count themselves there.  entries: int32 [R, tiles, tile, 2],
    key (`order_key`) and column of a tile's, in order.
    """

    counts: torch.Tensor
    entries: torch.Tensor


@triton.jit
def _asked(query, weights, end, j, T, q_q, q_i, q_e, w_q, w_i, e_q, I, E, IP: tl.constexpr, EP: tl.constexpr):
    """Of query j: its heads [IP, EP] and their weights, and the column that ends what it sees."""
    i, e = tl.arange(0, IP), tl.arange(0, EP)
    inside = (i < I)[:, None] & (e < E)[None, :]
    x = tl.load(query + j * q_q + (i[:, None] * q_i + e[None, :] * q_e), mask=inside, other=0.0)
    w = tl.load(weights + j * w_q + i * w_i, mask=i < I, other=0.0)
    return x, w, tl.minimum(tl.load(end + j * e_q).to(tl.int64), T)


@triton.jit
def _keys(keys, first, held, k_t, k_e, E, EP: tl.constexpr, BT: tl.constexpr):
    """[BT, EP] of the columns from `first` on that are held [BT]; others aren't read."""
    t, e = tl.arange(0, BT), tl.arange(0, EP)[None, :]
    return tl.load(keys + first * k_t + (t[:, None] * k_t + e * k_e), mask=held[:, None] & (e < E), other=0.0)


@triton.jit
def _real(valid, first, held, m_t, BT: tl.constexpr):
    """Which of them hold a token."""
    return tl.load(valid + (first + tl.arange(0, BT)) * m_t, mask=held, other=0) != 0


@triton.jit
def _scored(k, x, w, seen, scale, I, IP: tl.constexpr):
    """Scores of keys [BT, EP]; NaN where not seen."""
    logits = tl.dot(k, tl.trans(x), input_precision="ieee") * scale
    logits = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL)
    # A head that isn't there has 0 as its product with an infinite key's, NaN
    score = tl.sum(tl.where((tl.arange(0, IP) < I)[None, :], logits * w[None, :], 0.0), axis=1)
    return tl.where(seen, score, float("nan"))


@triton.jit
def _ones(x):
    """How many bits are set, of at most 16."""
    x -= x >> 1 & 0x5555
    x = (x & 0x3333) + (x >> 2 & 0x3333)
    x = x + (x >> 4) & 0x0F0F
    return x + (x >> 8) & 0x1F


@triton.jit
def _put(entries, slot, column, score, there):
    entry = column.to(tl.uint64) << 32 | order_key(score).to(tl.uint64)
    tl.store(entries + slot, entry.to(tl.int64, bitcast=True), mask=there)


@triton.jit
def _emit(hits, score, scores, start, count, entries, BT: tl.constexpr, STEPS: tl.constexpr):
    """Candidates of a program's columns, in order. Bit s of hits [BT] is that of step s; score [BT]: of the last step.

    Of several steps, a thread takes R neighbouring columns: it gathers their bits in one word."""
    t = tl.arange(0, BT)
    if STEPS == 1:
        through = tl.cumsum(hits, axis=0)
        _put(entries, through - 1, start + t, score, hits != 0)
        tl.store(count + t * 0, through, mask=t == BT - 1)
    else:
        R: tl.constexpr = STEPS // 2
        WORDS: tl.constexpr = 2 * BT
        w, i = tl.arange(0, WORDS), tl.arange(0, R)[None, :]
        tl.debug_barrier()  # what other threads have stored
        bits = tl.trans(tl.reshape(hits, [BT // R, R]))[:, None, :] >> tl.arange(0, STEPS)[None, :, None] & 1
        word = tl.reshape(tl.sum(bits << tl.arange(0, R)[:, None, None], axis=0), [WORDS])
        there, column = word[:, None] >> i & 1 != 0, w[:, None] * R + i
        again = tl.load(scores + column, mask=there, other=0.0)  # on its way during the scan
        found = _ones(word)
        through = tl.cumsum(found, axis=0)
        tl.store(count + w * 0, through, mask=w == WORDS - 1)
        slot = (through - found)[:, None] + _ones(word[:, None] & (1 << i) - 1)
        _put(entries, slot, start + column, again, there)


@triton.jit
def _index(
    query, weights, keys, valid, end, scores, threshold, counts, entries, T, Q, tile, scale,
    q_b, q_q, q_i, q_e, w_b, w_q, w_i, k_b, k_t, k_e, m_b, m_t, e_b, e_q, t_b,
    I: tl.constexpr, E: tl.constexpr, IP: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr, BQ: tl.constexpr,
    EMITS: tl.constexpr, STEPS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`tile` columns, BT at a time, for BQ queries: keys are the rows of the product and index heads its columns.

    One query has a loop of its own: keys are loaded ahead in the innermost one only. A load of bytes isn't by itself;
    AHEAD: what holds a token is loaded a step before, and no step waits for it."""
    wait_for_previous(PDL)
    b, asked = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64) * BQ
    t = tl.arange(0, BT)
    query += b * q_b + asked * q_q
    weights += b * w_b + asked * w_q
    end += b * e_b + asked * e_q
    keys += b * k_b
    valid += b * m_b
    scores += (b * Q + asked) * T
    if BQ == 1:
        x, w, limit = _asked(query, weights, end, 0, T, q_q, q_i, q_e, w_q, w_i, e_q, I, E, IP, EP)
        if EMITS:  # before the loop, where it waits for nothing
            least = tl.load(threshold + b * t_b)
            hits = tl.zeros([BT], tl.int32)
        start = tl.program_id(0).to(tl.int64) * tile
        score = tl.zeros([BT], tl.float32)
        # Of the program's columns, how many there are and how many are seen: in the loop, to compare 64 bits would be a
        # tenth of the instructions
        there = tl.minimum(T - start, tile).to(tl.int32)
        left = tl.maximum(tl.minimum(limit - start, tile), 0).to(tl.int32)
        if AHEAD:
            following = _real(valid, start, t < left, m_t, BT)
        for begin in range(0, tile, BT):
            first = start + begin
            k = _keys(keys, first, begin + t < left, k_t, k_e, E, EP, BT)
            if AHEAD:
                real, following = following, _real(valid, first + BT, begin + BT + t < left, m_t, BT)
            else:
                real = _real(valid, first, begin + t < left, m_t, BT)
            score = _scored(k, x, w, real, scale, I, IP)
            tl.store(scores + first + t, score, mask=begin + t < there)
            if EMITS:
                hits |= (score >= least).to(tl.int32) << (begin // BT)
        if EMITS:
            tiles, program = tl.num_programs(0), tl.program_id(0)
            counts += b * (tiles + 1)
            if program == 0:
                tl.store(counts + tiles, 0)
            entries += (b * tiles + program) * tile
            _emit(hits, score, scores + start, start, counts + program, entries, BT, STEPS)
    else:
        for begin in range(0, tile, BT):
            first = tl.program_id(0).to(tl.int64) * tile + begin
            held = first + t < T
            k, real = _keys(keys, first, held, k_t, k_e, E, EP, BT), _real(valid, first, held, m_t, BT)
            for j in range(min(BQ, Q - asked)):
                x, w, limit = _asked(query, weights, end, j, T, q_q, q_i, q_e, w_q, w_i, e_q, I, E, IP, EP)
                score = _scored(k, x, w, (first + t < limit) & real, scale, I, IP)
                tl.store(scores + j * T + first + t, score, mask=held)


def score_tokens(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    end: torch.Tensor,
    scale: float,
    threshold: torch.Tensor | None,
) -> tuple[torch.Tensor, Candidates | None]:
    """Of checked arguments the scores, and with a threshold, fp32 [B] or [B, 2] for one query each and up to 512K
    columns (a bit of int32 for each TOKENS of a program), also the candidates that it leaves."""
    batch, queries, heads, dim = query.shape
    columns = keys.shape[1]
    scores = torch.empty((batch, queries, columns), dtype=torch.float32, device=query.device)
    part = TOKENS if queries == 1 or keys.element_size() == 4 else 2 * TOKENS
    tile = part if queries > 1 else part * triton.cdiv(columns, TILES * part)
    tiles, candidates = triton.cdiv(columns, max(tile, 1)), None
    if threshold is not None:
        sizes = ((batch, tiles + 1), (batch, tiles, tile, 2))
        candidates = Candidates(*(torch.empty(size, dtype=torch.int32, device=query.device) for size in sizes))
    if scores.numel() == 0:
        return scores, candidates
    valid, end = valid.view(torch.uint8), end.expand(batch, queries)
    together = 1 if queries == 1 else _QUERIES
    emitted, steps = (scores, scores, scores), triton.next_power_of_2(tile // part)
    if threshold is not None and candidates is not None:
        emitted = (threshold, candidates.counts, candidates.entries.view(torch.int64))
    _index[(tiles, triton.cdiv(queries, together), batch)](
        query, weights, keys, valid, end, scores, *emitted, columns, queries, tile, scale,
        *query.stride(), *weights.stride(), *keys.stride(), *valid.stride(), *end.stride(), emitted[0].stride(0),
        I=heads, E=dim, IP=padded(heads), EP=padded(dim), BT=part, BQ=together, EMITS=candidates is not None,
        STEPS=steps if candidates is not None else 1, AHEAD=queries == 1 and steps > 2,
        **options(query, num_warps=_WARPS, num_stages=4 if queries == 1 else 3),
    )  # fmt: skip
    return scores, candidates


def index_scores(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    end: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """As the reference; tiles of fixed shape, so that no sum depends on what else is asked."""
    check_index_arguments(query, weights, keys, valid, end)
    return score_tokens(query, weights, keys, valid, end, scale, None)[0]


def index_topk(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor,
    end: torch.Tensor,
    k: int,
    *,
    scale: float,
    hint: torch.Tensor | None = None,
    threshold: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference; no guess is needed."""
    scores = index_scores(query, weights, keys, valid, end, scale=scale)
    chosen = gvr_topk(scores.flatten(0, 1), k, hint=hint, threshold=threshold)
    return chosen.view(*scores.shape[:2], k), scores  # type: ignore[union-attr]
