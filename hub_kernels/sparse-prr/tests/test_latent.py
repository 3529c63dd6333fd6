"""Attention over listed latents: a float64 oracle, and what must change no bit."""

import numpy as np
import pytest
import torch

from .drawn import FORMATS, INTERPRETED

NAN, INF = float("nan"), float("inf")
B, T, C, A = 2, 70, 24, 8
SCALE = 0.3


def draw(seed, *sizes, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(seed).standard_normal(sizes), dtype=dtype)


@pytest.fixture(params=FORMATS, ids=str)
def dtype(request):
    return request.param


def latent_problem(
    dtype, queries=3, heads=4, slots=9, channels=C, rotated=A, columns=T, batch=B, lengths=(1.0, 0.5, 0.0), holes=0.0
):
    """(query, latents, ropes, tokens). The lists of a batch row's queries are `lengths` full, in turn; a share `holes`
    of a list is unused slots between used ones."""
    query = draw(4, batch, queries, heads, channels + rotated, dtype=dtype)
    latents, ropes = draw(5, batch, columns, channels, dtype=dtype), draw(6, batch, columns, rotated, dtype=dtype)
    rng, tokens = np.random.default_rng(7), np.full((batch, queries, slots), -1)
    for b, q in np.ndindex(batch, queries):
        listed = round(slots * lengths[q % len(lengths)])
        tokens[b, q, :listed] = np.sort(rng.choice(columns, listed, replace=False))
        tokens[b, q, rng.random(slots) < holes] = -1
    return query, latents, ropes, torch.tensor(tokens, dtype=torch.int32)


def nothing(tokens):
    return tokens[:, :, :0], None


def attend(ops, query, latents, ropes, tokens, scale=SCALE):
    return ops.latent_attention(query, latents, ropes, tokens, *nothing(tokens), scale=scale)


def oracle(query, latents, ropes, tokens, scale=SCALE):
    """float64 [B, Q, H, C]"""
    q, keys = query.double().cpu().numpy(), torch.cat([latents, ropes], dim=-1).double().cpu().numpy()
    channels = latents.shape[2]
    expected = np.zeros((*query.shape[:3], channels))
    for b, i in np.ndindex(*tokens.shape[:2]):
        listed = [t for t in tokens[b, i].tolist() if t >= 0]
        if listed:
            logits = q[b, i] @ keys[b, listed].T * scale
            weights = np.exp(logits - logits.max(1, keepdims=True))
            expected[b, i] = weights / weights.sum(1, keepdims=True) @ keys[b, listed][:, :channels]
    return expected


def poison(latents, ropes, tokens):
    """NaN and infinities in every row that no query of its batch row lists."""
    for b in range(latents.shape[0]):
        unlisted = torch.ones(latents.shape[1], dtype=torch.bool)
        unlisted[tokens[b][tokens[b] >= 0].long()] = False
        latents[b, unlisted], ropes[b, unlisted] = NAN, INF


# Chunks of 64 slots and less, groups of 32 heads and less, channels that aren't a power of two; a list of one slot
@pytest.mark.parametrize(
    ("channels", "rotated", "heads", "slots"),
    [(C, A, 4, 9), (C, A, 5, 1), (80, 16, 33, 150), (20, 3, 1, 129), (16, 16, 40, 64), (512, 64, 17, 70)],
)
def test_latent_attention_equals_float64(ops, dtype, assert_close, channels, rotated, heads, slots):
    problem = latent_problem(
        dtype, heads=heads, slots=slots, channels=channels, rotated=rotated, columns=2 * slots + 5, holes=0.1
    )
    poison(*problem[1:])
    scale = (channels + rotated) ** -0.5
    output = attend(ops, *problem, scale=scale)  # before the oracle, whose memory it could take over
    assert output.dtype == torch.float32 and output.is_contiguous()
    keys = torch.cat([part[~part.isnan() & ~part.isinf()] for part in problem[1:3]])
    assert_close(output, oracle(*problem, scale=scale), dtype, magnitude=keys.abs().max().item())


@pytest.mark.parametrize("scale", [30.0, 1e-4, 0.0, -0.3])
def test_latent_attention_between_the_largest_and_the_mean(ops, dtype, assert_close, scale):
    """Chunks far below the best one, which may come first or last; all weights the same; a negative scale."""
    query, latents, ropes, tokens = latent_problem(dtype, slots=130, columns=200)
    query = (query * 8).round() / 8  # products that fp32 holds: at a scale of 30 the last bit of a logit would show
    latents, ropes = (latents * 8).round() / 8, (ropes * 8).round() / 8
    output = attend(ops, query, latents, ropes, tokens, scale=scale)
    assert_close(output, oracle(query, latents, ropes, tokens, scale=scale), dtype, magnitude=10.0)


@pytest.mark.parametrize(
    ("batch", "queries", "heads", "slots"), [(B, 3, 4, 0), (B, 0, 4, 9), (0, 3, 4, 9), (B, 3, 0, 9), (B, 1, 4, 0)]
)
def test_latent_attention_of_nothing(ops, batch, queries, heads, slots):
    output = attend(ops, *latent_problem(torch.float32, queries, heads, slots, batch=batch))
    assert output.shape == (batch, queries, heads, C) and output.dtype == torch.float32
    assert not output.any()


def test_latent_attention_is_zero_where_nothing_is_listed(ops, dtype, assert_same_bits):
    """Even if the query, or all there is to read, is NaN."""
    query, latents, ropes, tokens = latent_problem(dtype, queries=4, slots=70)
    query[0, 1], tokens[0, 1], tokens[1] = NAN, -1, -1
    latents[1], ropes[1] = NAN, NAN
    output = attend(ops, query, latents, ropes, tokens)
    assert_same_bits(output[1], torch.zeros(4, 4, C))
    assert_same_bits(output[0, 1:3], torch.zeros(2, 4, C))
    assert output[0, 0].all() and output[0, 3].all()


def test_latent_attention_does_not_depend_on_the_prediction(ops, dtype, assert_same_bits):
    query, latents, ropes, tokens = latent_problem(dtype)
    serial = attend(ops, query, latents, ropes, tokens)
    everything = torch.arange(T, dtype=torch.int32).flip(0).expand(B, 3, -1)
    for predicted in (tokens, everything, torch.full_like(tokens, -1), tokens[:, :, :2], everything[:, :, :1]):
        held = ops.gather_tokens(latents, ropes, predicted)
        repaired = ops.latent_attention(query, latents, ropes, tokens, predicted, held, scale=SCALE)
        assert_same_bits(repaired, serial)


def test_latent_attention_does_not_depend_on_neighbours_or_on_what_is_not_listed(ops, dtype, assert_same_bits):
    query, latents, ropes, tokens = latent_problem(dtype)
    together = attend(ops, query, latents, ropes, tokens)
    for b in range(B):
        for i in range(tokens.shape[1]):
            part, listed = query[b : b + 1, i : i + 1], tokens[b : b + 1, i : i + 1]
            assert_same_bits(attend(ops, part, latents[b : b + 1], ropes[b : b + 1], listed)[0, 0], together[b, i])
    poison(latents, ropes, tokens)
    assert_same_bits(attend(ops, query, latents, ropes, tokens), together)


@pytest.mark.parametrize(
    ("channels", "rotated", "heads", "queries", "slots"),
    [(C, A, 5, 30, 150), (80, 16, 33, 12, 129), (C, A, 1, 26, 70), (512, 64, 128, 6, 300)],
)
def test_latent_attention_in_parts_has_the_bits_of_the_whole(
    ops, dtype, assert_same_bits, channels, rotated, heads, queries, slots
):
    """A prompt is cut in any way: queries one by one, with and without the other batch row, in parts, at once."""
    if INTERPRETED and channels == 512:
        pytest.skip("a minute in the interpreter")
    lengths = (1.0, 0.02, 0.45, 0.0, 0.9)
    problem = latent_problem(dtype, queries, heads, slots, channels, rotated, 2 * slots, lengths=lengths, holes=0.05)
    query, latents, ropes, tokens = problem
    query[1, 0] = NAN
    tokens[:, 2, : slots // 2] = -1  # whole chunks between used ones, and before all others
    whole = attend(ops, *problem)
    for i in range(0, queries, 5 if INTERPRETED else 1):
        mine = slice(i, i + 1)
        assert_same_bits(attend(ops, query[:, mine], latents, ropes, tokens[:, mine]), whole[:, mine])
    for b, part in ((0, slice(3, 7)), (1, slice(0, 3 if INTERPRETED else queries - 1))):
        row = slice(b, b + 1)
        alone = attend(ops, query[row, part], latents[row], ropes[row], tokens[row, part])
        assert_same_bits(alone, whole[row, part])


def test_latent_attention_unused_slots_at_the_end_change_no_bit(ops, dtype, assert_same_bits):
    query, latents, ropes, tokens = latent_problem(dtype, slots=100, columns=150, lengths=(1.0, 0.6, 0.0))
    expected = attend(ops, query, latents, ropes, tokens)
    for more in (1, 28, 29, 500):
        longer = torch.cat([tokens, torch.full((B, 3, more), -1, dtype=torch.int32)], dim=2)
        assert_same_bits(attend(ops, query, latents, ropes, longer), expected)


def test_latent_attention_of_views(ops, dtype, assert_same_bits):
    """Buffers of a cache with room behind the tokens, a query with heads before queries, every second of something."""
    problem = latent_problem(dtype, slots=70, heads=5, holes=0.1)
    query, latents, ropes, tokens = problem
    expected = attend(ops, *problem)
    capacity = T + 9
    rows, keys = (torch.full((B, 1, capacity, size), NAN, dtype=dtype) for size in (C, A))
    rows[:, 0, :T], keys[:, 0, :T] = latents, ropes
    swapped = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same_bits(attend(ops, swapped, rows[:, 0], keys[:, 0], tokens), expected)
    views = []
    for tensor in problem:
        wide = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        wide[..., ::2] = tensor
        views.append(wide[..., ::2])
    assert_same_bits(attend(ops, *views), expected)
    columns_last = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (latents, ropes)]
    assert_same_bits(attend(ops, query, *columns_last, tokens), expected)
    one = [part[:1].expand(B, -1, -1) for part in (latents, ropes)]
    shared = attend(ops, query[:, :1].expand(-1, 3, -1, -1), *one, tokens[:1].expand(B, -1, -1))
    assert_same_bits(shared[0], attend(ops, query[:1, :1].expand(-1, 3, -1, -1), latents[:1], ropes[:1], tokens[:1])[0])


@pytest.mark.parametrize("queries", [1, 26])
def test_latent_attention_of_listed_rows_that_are_not_finite(ops, dtype, assert_close, queries):
    """They count as they are: a NaN spoils the query, +inf as a logit too, and -inf is a weight of 0."""
    query, latents, ropes, tokens = latent_problem(dtype, queries, slots=66, lengths=(1.0,))
    query[..., C] = query[..., C].abs() + 0.1
    columns = [int(tokens[0, 0, slot]) for slot in (0, 1, 65)]
    for b, column, value in ((0, columns[1], NAN), (1, 3, INF), (0, columns[2], -INF)):
        changed = ropes.clone()
        changed[b, column, 0] = value
        with np.errstate(invalid="ignore"):
            expected = oracle(query, latents, changed, tokens)
        output = attend(ops, query, latents, changed, tokens)
        assert np.isnan(expected).any() == (value != -INF)
        assert_close(output, expected, dtype, magnitude=5.0)
    ropes[0, tokens[0, 0, :64].long(), 0] = -INF  # of a whole chunk, the first
    with np.errstate(invalid="ignore"):
        expected = oracle(query, latents, ropes, tokens)
    assert np.isfinite(expected[0, 0]).all()
    assert_close(attend(ops, query, latents, ropes, tokens), expected, dtype, magnitude=5.0)
    latents[0, columns[0], 1] = INF  # a value too: channels that it is no part of stay as they are
    query[..., 1] = query[..., 1].abs() * -1 - 0.1
    with np.errstate(invalid="ignore"):
        expected = oracle(query, latents, ropes, tokens)
    assert np.isnan(expected[0, 0, :, 1]).all() and np.isfinite(expected[0, 0, :, 2:]).all()
    assert_close(attend(ops, query, latents, ropes, tokens), expected, dtype, magnitude=5.0)
    assert attend(ops, query[:1], latents[:1], ropes[:1], tokens[:1, :, :1])[0, 0].isnan().all()  # 0 / 0


@pytest.mark.skipif(not torch.empty(0).is_cuda, reason="needs a GPU with 6 GB free")
@pytest.mark.parametrize("queries", [1, 12])
def test_latent_attention_of_more_elements_than_an_int32_counts(ops, assert_same_bits, queries):
    columns, few = 2**22 + 2**16, 300
    query, latents, ropes, tokens = latent_problem(torch.bfloat16, queries, 128, few, 512, 64, few, 1, lengths=(1.0,))
    expected = attend(ops, query, latents, ropes, tokens)
    rows, keys = (torch.empty(1, columns, size, dtype=torch.bfloat16) for size in (512, 64))
    rows[:, -few:], keys[:, -few:] = latents, ropes
    assert_same_bits(attend(ops, query, rows, keys, tokens + columns - few), expected)


def test_gather_tokens(ops, dtype):
    _, latents, ropes, tokens = latent_problem(dtype)
    rows = ops.gather_tokens(latents, ropes, tokens)
    assert rows.shape == (*tokens.shape, C + A) and rows.dtype == dtype
    for at in np.ndindex(*tokens.shape):
        token = int(tokens[at])
        held = torch.zeros(C + A, dtype=dtype) if token < 0 else torch.cat([latents[at[0], token], ropes[at[0], token]])
        assert torch.equal(rows[at], held)
