"""Attention over listed latents: a float64 oracle, and what must change no bit."""

import numpy as np
import pytest
import torch

NAN = float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
B, T, C, A = 2, 70, 24, 8


def draw(seed, *sizes, dtype=torch.float32):
    return torch.tensor(np.random.default_rng(seed).standard_normal(sizes), dtype=dtype)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def latent_problem(dtype, queries=3, heads=4, slots=9):
    query = draw(4, B, queries, heads, C + A, dtype=dtype)
    latents, ropes = draw(5, B, T, C, dtype=dtype), draw(6, B, T, A, dtype=dtype)
    rng, tokens = np.random.default_rng(7), np.full((B, queries, slots), -1)
    for b in range(B):
        for q in range(queries):
            held = [slots, 4, 0][q % 3]
            tokens[b, q, :held] = np.sort(rng.choice(T, held, replace=False))
    return query, latents, ropes, torch.tensor(tokens, dtype=torch.int32)


def nothing(tokens):
    return tokens[:, :, :0], None


def test_latent_attention_equals_float64(ops, dtype, assert_close):
    query, latents, ropes, tokens = latent_problem(dtype)
    q, keys = query.double().cpu().numpy(), torch.cat([latents, ropes], dim=-1).double().cpu().numpy()
    expected = np.zeros((*query.shape[:3], C))
    for b, i in np.ndindex(*tokens.shape[:2]):
        listed = [t for t in tokens[b, i].tolist() if t >= 0]
        if listed:
            logits = q[b, i] @ keys[b, listed].T * 0.3
            weights = np.exp(logits - logits.max(1, keepdims=True))
            expected[b, i] = weights / weights.sum(1, keepdims=True) @ keys[b, listed][:, :C]
    output = ops.latent_attention(query, latents, ropes, tokens, *nothing(tokens), scale=0.3)
    assert output.dtype == torch.float32
    assert_close(output, expected, dtype, magnitude=np.abs(keys).max())


def test_latent_attention_does_not_depend_on_the_prediction(ops, dtype, assert_same_bits):
    query, latents, ropes, tokens = latent_problem(dtype)
    serial = ops.latent_attention(query, latents, ropes, tokens, *nothing(tokens), scale=0.3)
    everything = torch.arange(T, dtype=torch.int32).flip(0).expand(B, 3, -1)
    for predicted in (tokens, everything, torch.full_like(tokens, -1), tokens[:, :, :2], everything[:, :, :1]):
        held = ops.gather_tokens(latents, ropes, predicted)
        repaired = ops.latent_attention(query, latents, ropes, tokens, predicted, held, scale=0.3)
        assert_same_bits(repaired, serial)


def test_latent_attention_does_not_depend_on_neighbours_or_on_what_is_not_listed(ops, dtype, assert_same_bits):
    query, latents, ropes, tokens = latent_problem(dtype)
    together = ops.latent_attention(query, latents, ropes, tokens, *nothing(tokens), scale=0.3)
    for b in range(B):
        for i in range(tokens.shape[1]):
            part, listed = query[b : b + 1, i : i + 1], tokens[b : b + 1, i : i + 1]
            alone = ops.latent_attention(
                part, latents[b : b + 1], ropes[b : b + 1], listed, *nothing(listed), scale=0.3
            )
            assert_same_bits(alone[0, 0], together[b, i])
        unlisted = torch.ones(T, dtype=torch.bool)
        unlisted[tokens[b][tokens[b] >= 0].long()] = False
        latents[b, unlisted], ropes[b, unlisted] = NAN, NAN
    assert_same_bits(ops.latent_attention(query, latents, ropes, tokens, *nothing(tokens), scale=0.3), together)


def test_gather_tokens(ops, dtype):
    _, latents, ropes, tokens = latent_problem(dtype)
    rows = ops.gather_tokens(latents, ropes, tokens)
    assert rows.shape == (*tokens.shape, C + A) and rows.dtype == dtype
    for at in np.ndindex(*tokens.shape):
        token = int(tokens[at])
        held = torch.zeros(C + A, dtype=dtype) if token < 0 else torch.cat([latents[at[0], token], ropes[at[0], token]])
        assert torch.equal(rows[at], held)
