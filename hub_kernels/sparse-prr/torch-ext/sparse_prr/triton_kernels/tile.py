"""What attention over one block is, once: the speculative, the serial and the repair kernel inline this routine, at the
same number of warps, so that their bits are the same."""

import triton
import triton.language as tl

WARPS = 4  # of every kernel that inlines `attend_tile`: another number gives other bits


def padded(size: int) -> int:
    """The power of two, 16 at least, that a tile of `size` takes: tl.dot's smallest side."""
    return max(16, triton.next_power_of_2(size))


def part_of(block_size: int, dim: int, element_size: int) -> int:
    """Tokens of a block that are held at a time: K and V take at most 64 KiB of shared memory."""
    return max(16, min(block_size, 2**15 // (padded(dim) * element_size)))


@triton.jit
def load_query(query, stride_g, stride_d, G: tl.constexpr, D: tl.constexpr, GP: tl.constexpr, DP: tl.constexpr):
    """[GP, DP] of one KV head; 0 beyond G and D."""
    g, d = tl.arange(0, GP)[:, None], tl.arange(0, DP)[None, :]
    return tl.load(query + g * stride_g + d * stride_d, mask=(g < G) & (d < D), other=0.0)


@triton.jit
def _attend_part(
    query, keys, values, valid, first, end, columns, k_t, k_d, v_t, v_d, m_t, scale,
    D: tl.constexpr, DP: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """(output [GP, DP], peak [GP], total [GP]) over the columns first .. first + ST - 1."""
    t, d = first + tl.arange(0, ST), tl.arange(0, DP)
    inside = (t < end) & (t < columns)
    held = inside[:, None] & (d < D)[None, :]
    # Validity, V and K in this order, not masked by validity: all are in flight before the first is used. With K first,
    # its way through shared memory came before V's loads. What isn't attended may be NaN, and is put out after
    bits = tl.load(valid + t * m_t, mask=inside, other=0)
    v = tl.load(values + t[:, None] * v_t + d[None, :] * v_d, mask=held, other=0.0)
    k = tl.load(keys + t[:, None] * k_t + d[None, :] * k_d, mask=held, other=0.0)
    seen = inside & (bits != 0)
    v = tl.where(seen[:, None], v, 0.0)
    logits = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    logits = tl.where(seen[None, :], logits, float("-inf"))
    peak = tl.max(logits, axis=1)
    weights = tl.exp2(logits - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    total = tl.sum(weights, axis=1)
    if v.dtype == tl.float32:
        output = tl.dot(weights, v, input_precision="ieee")
    else:  # high and low half: as exact as fp32 weights, at no measurable cost (max error 2.4e-4 against 2.8e-4)
        high = weights.to(v.dtype)
        rest = tl.dot((weights - high.to(tl.float32)).to(v.dtype), v)
        # An infinite value times a low half is nothing to add
        output = tl.dot(high, v) + tl.where(rest - rest == 0, rest, 0.0)
    return output, peak, total


@triton.jit
def attend_tile(
    query, keys, values, valid, first, end, columns, k_t, k_d, v_t, v_d, m_t, scale,
    D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, ST: tl.constexpr,
):  # fmt: skip
    """(output [GP, DP], peak [GP], total [GP]) of query [GP, DP] over the columns first .. first + S - 1, fp32, base 2,
    ST at a time.

    keys, values, valid: pointers to the batch row's (and head's) column 0.  scale: of the base-2 logits.
    """
    o, m, l = _attend_part(
        query, keys, values, valid, first, end, columns, k_t, k_d, v_t, v_d, m_t, scale, D, DP, ST
    )  # fmt: skip
    for part in tl.static_range(1, S // ST):
        o2, m2, l2 = _attend_part(
            query, keys, values, valid, first + part * ST, end, columns, k_t, k_d, v_t, v_d, m_t, scale, D, DP, ST
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
