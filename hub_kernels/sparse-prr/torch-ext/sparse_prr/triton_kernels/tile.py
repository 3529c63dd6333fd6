"""What attention over one block is, once: the speculative, the serial and the repair kernel inline this routine, at the
same number of warps, so that their bits are the same."""

import triton
import triton.language as tl

WARPS = 4  # of every kernel that inlines `attend_tile`: another number gives other bits


def padded(size: int) -> int:
    """The power of two, 16 at least, that a tile of `size` takes: tl.dot's smallest side."""
    return max(16, triton.next_power_of_2(size))


def padded_group(size: int) -> int:
    """As `padded`, of query heads: 8 at least, the smallest side of a product's columns."""
    return max(8, triton.next_power_of_2(size))


def part_of(block_size: int, dim: int, element_size: int) -> int:
    """Tokens of a block that are held at a time: K and V take at most 64 KiB of shared memory."""
    return max(16, min(block_size, 2**15 // (padded(dim) * element_size)))


def check_block_size(size: int) -> None:
    """Raise ValueError for blocks that kernels can't take: parts of another size would be read beyond, or left out."""
    if size < 16 or size & (size - 1):
        raise ValueError(f"block_size: expected a power of two from 16, got {size}")


@triton.jit
def load_query(query, stride_g, stride_d, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr):
    """[GP, DP] of one KV head; 0 beyond G and D."""
    g, d = tl.arange(0, GP)[:, None], tl.arange(0, DP)[None, :]
    return tl.load(query + g * stride_g + d * stride_d, mask=(g < G) & (d < D), other=0.0)


@triton.jit
def _mix(weights, v, TOKENS: tl.constexpr):
    """The weighted sum of v [ST, DP] for each query head, [GP, DP]; the tokens are that axis of the weights."""
    if TOKENS == 0:
        return tl.trans(tl.dot(tl.trans(v), weights, input_precision="ieee"))
    else:
        return tl.dot(weights, v, input_precision="ieee")


@triton.jit
def _attend_part(
    query, keys, values, valid, first, end, columns, q_g, q_d, k_t, k_d, v_t, v_d, m_t, scale,
    G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """(output [GP, DP], peak [GP], total [GP]) over the columns first .. first + ST - 1."""
    # Up to 8 query heads are the columns of the products, and the tokens the rows: half the instructions of 16 rows
    # that are mostly padding (Llama's shape: attention 9.5 us against 10.8)
    TOKENS: tl.constexpr = 0 if GP < 16 else 1
    i, d = tl.arange(0, ST), tl.arange(0, DP)
    # 32 bits inside a block: a fifth of the instructions were addresses. What isn't a block may lie anywhere
    inside = i < tl.maximum(tl.minimum(tl.minimum(end, columns) - first, ST), 0).to(tl.int32)
    held = inside[:, None] & (d < D)[None, :]
    # Validity, V, K and the query in this order, not masked by validity: all are in flight before the first is used.
    # What came first had its way through shared memory before the loads behind it. What isn't attended may be NaN, and
    # is put out after
    bits = tl.load(valid + first * m_t + i * m_t, mask=inside, other=0)
    v = tl.load(values + first * v_t + (i[:, None] * v_t + d[None, :] * v_d), mask=held, other=0.0)
    k = tl.load(keys + first * k_t + (i[:, None] * k_t + d[None, :] * k_d), mask=held, other=0.0)
    q = load_query(query, q_g, q_d, G, D, GP, DP)
    seen = inside & (bits != 0)
    v = tl.where(seen[:, None], v, 0.0)
    if TOKENS == 0:
        logits = tl.dot(k, tl.trans(q), input_precision="ieee") * scale
    else:
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(tl.expand_dims(seen, 1 - TOKENS), logits, float("-inf"))
    peak = tl.max(logits, axis=TOKENS)
    weights = tl.exp2(logits - tl.expand_dims(tl.where(peak == float("-inf"), 0.0, peak), TOKENS))
    total = tl.sum(weights, axis=TOKENS)
    if v.dtype == tl.float32:
        output = _mix(weights, v, TOKENS)
    else:  # high and low half: as exact as fp32 weights, at no measurable cost (max error 2.4e-4 against 2.8e-4)
        high = weights.to(v.dtype)
        rest = _mix((weights - high.to(tl.float32)).to(v.dtype), v, TOKENS)
        # An infinite value times a low half is nothing to add
        output = _mix(high, v, TOKENS) + tl.where(rest - rest == 0, rest, 0.0)
    return output, peak, total


@triton.jit
def attend_tile(
    query, keys, values, valid, first, end, columns, q_g, q_d, k_t, k_d, v_t, v_d, m_t, scale,
    G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """(output [GP, DP], peak [GP], total [GP]) over the columns first .. first + S - 1, fp32, base 2, ST at a time.

    query: pointer to the KV head's [G, D].  keys, values, valid: to the batch row's (and head's) column 0.
    scale: of the base-2 logits.
    """
    o, m, l = _attend_part(
        query, keys, values, valid, first, end, columns, q_g, q_d, k_t, k_d, v_t, v_d, m_t, scale, G, D, GP, DP, ST
    )  # fmt: skip
    for part in tl.static_range(1, S // ST):
        o2, m2, l2 = _attend_part(
            query, keys, values, valid, first + part * ST, end, columns, q_g, q_d, k_t, k_d, v_t, v_d, m_t, scale,
            G, D, GP, DP, ST,
        )  # fmt: skip
        top = tl.maximum(m, m2)
        safe = tl.where(top == float("-inf"), 0.0, top)
        one, two = tl.exp2(m - safe), tl.exp2(m2 - safe)
        o = o * one[:, None] + o2 * two[:, None]
        l = l * one + l2 * two
        m = top
    return o, m, l


@triton.jit
def store_tile(
    output, peak, total, o, m, l, at, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Write one block's partials to slot `at` of the contiguous [.., G, D] and [.., G] buffers."""
    g, d = tl.arange(0, GP), tl.arange(0, DP)
    at = at.to(tl.int64) * G
    tl.store(output + (at + g[:, None]) * D + d[None, :], o, mask=(g < G)[:, None] & (d < D)[None, :])
    tl.store(peak + at + g, m, mask=g < G)
    tl.store(total + at + g, l, mask=g < G)
