"""Every kernel once on small hostile shapes, for compute-sanitizer, which pytest would drown:

compute-sanitizer --tool memcheck python hub_kernels/sparse-prr/tests/sanitize.py [a variant's folder]
compute-sanitizer --tool racecheck python ...
"""

import sys
from pathlib import Path

import kernels
import torch

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "torch-ext" / "sparse_prr"


def decode_step(ops, dtype, group, dim, size):
    """One token of a batch with ragged starts and ends, holes, and unused slots in every list."""
    batch, heads, columns = 2, 2, 9 * size + 5
    blocks = -(-columns // size)
    keys, values = (torch.randn(batch, heads, columns, dim, dtype=dtype) for _ in range(2))
    query, new = torch.randn(batch, heads, group, dim, dtype=dtype), torch.randn(batch, heads, 1, dim, dtype=dtype)
    valid = torch.rand(batch, columns) > 0.2
    start, end = torch.tensor([0, 7]), torch.tensor([columns, columns - size - 1])
    ops.append_states(keys, values, new, new, end)
    lower, upper = (
        torch.zeros(batch, heads, blocks, dim, dtype=dtype),
        torch.zeros(batch, heads, blocks, dim, dtype=dtype),
    )
    ops.update_summaries(keys, valid, start, lower, upper, end, columns, size)
    windows = size // 16
    means = torch.zeros(batch, heads, blocks, windows, dim, dtype=dtype)
    filled = torch.zeros(batch, heads, blocks, windows, dtype=torch.bool)
    ops.compress_keys(keys, valid, start, means, filled, end, columns, window=32, stride=16)
    last = (end - start) // size - 1
    forced = torch.stack([torch.zeros_like(last), last, last + 1], dim=1).int()[:, None]
    options = dict(scale=dim**-0.5, block_size=size)
    data = (query, keys, values, valid, start)
    for scores in (
        ops.quest_scores(query, lower, upper, 1, last),
        ops.infllm_scores(query, means, filled, 1, last, end - start, scale=dim**-0.5, stride=16),
    ):
        selected, free = ops.select_blocks(scores, forced, 4)
        early = torch.cat([forced.expand(-1, heads, -1), free.flip(2)[:, :, :2]], dim=2)
        partials = ops.block_partials(*data, early, end, **options)
        repaired = ops.repair_merge(*data, selected, end, early, partials, **options)
        assert torch.equal(repaired, ops.repair_merge(*data, selected, end, early[:, :, :0], None, **options))
        ema = torch.full((batch, 3), 0.3)
        step = ops.ema_step(scores, torch.zeros_like(scores), torch.zeros_like(scores), ema, 1, last)
        numbers = torch.zeros(batch, heads, 7, dtype=torch.float64)
        ops.tally(numbers, selected, free, early, step.importance, 1, last)
        ops.gvr_topk(step.expected.flatten(0, 1), 3)


def long_rows(ops):
    """Each way to the top-k of a long row, with and without a guess; also one that leaves nothing, and ties."""
    for rows, columns, k in ((1, 131_075, 2048), (9, 131_075, 2048), (1, 1_100_000, 600), (140, 20_001, 600)):
        rising = torch.arange(columns, dtype=torch.float32).expand(rows, -1).contiguous()  # all winners in few tiles
        ops.gvr_topk(rising, k, threshold=ops.topk_threshold(rising, k))
    for rows in (1, 3, 140):
        for scores in (torch.randn(rows, 9001), torch.zeros(rows, 9001)):
            threshold = ops.topk_threshold(scores, 600)
            for guess in (None, threshold, threshold[:, 0], torch.full((rows,), float("nan"))):
                ops.gvr_topk(scores, 600, threshold=guess, lengths=torch.full((rows,), 8990))


def indexer_step(ops, dtype):
    """Tokens selected by an indexer and attended to, one query and several."""
    batch, columns, channels = 2, 3001, 80
    keys, valid = torch.randn(batch, columns, 32, dtype=dtype), torch.rand(batch, columns) > 0.1
    latents, ropes = torch.randn(batch, columns, channels, dtype=dtype), torch.randn(batch, columns, 16, dtype=dtype)
    for queries in (1, 18):
        query, weights = torch.randn(batch, queries, 5, 32, dtype=dtype), torch.rand(batch, queries, 5)
        end = torch.arange(columns - queries + 1, columns + 1)[None]
        guess = torch.full((batch * queries, 2), 0.1)
        for threshold in (None, guess, guess * float("nan")):
            tokens, _ = ops.index_topk(query, weights, keys, valid, end, 200, scale=0.2, threshold=threshold)
        asked = torch.randn(batch, queries, 3, channels + 16, dtype=dtype)
        ops.latent_attention(asked, latents, ropes, tokens, tokens[:, :, :0], None, scale=0.1)
        ops.listed_attention(asked[..., :channels], asked[..., channels:], latents, ropes, tokens, scale=0.1)


def prompt(ops, dtype):
    """Queries under a mask, heads and columns that don't fill a tile."""
    nope, rope = torch.randn(2, 3, 133, 40, dtype=dtype), torch.randn(2, 3, 133, 12, dtype=dtype)
    keys, values = torch.randn(2, 3, 190, 40, dtype=dtype), torch.randn(2, 3, 190, 24, dtype=dtype)
    seen = torch.rand(2, 133, 190) > 0.5
    ops.masked_attention(nope, rope, keys, torch.randn(2, 190, 12, dtype=dtype), values, seen, 57, scale=0.1)


def latent_token(ops, dtype):
    """Between the projections of a token: heads that don't fill a program, and channels that no tile."""
    batch, columns, heads, dim, channels, rotated = 2, 33, 11, 24, 80, 12
    latents, ropes = (
        torch.randn(batch, columns, channels, dtype=dtype),
        torch.randn(batch, columns, rotated, dtype=dtype),
    )
    keys, end = torch.randn(batch, columns, 20, dtype=dtype), torch.tensor([1, columns])
    queries = torch.randn(batch, heads, dim + rotated, dtype=dtype)
    compressed, norm = torch.randn(batch, channels + rotated, dtype=dtype), torch.randn(channels, dtype=dtype)
    cos = sin = torch.randn(1, rotated, dtype=dtype)
    ops.latent_append(compressed, cos, sin, norm, latents, ropes, end, eps=1e-6)
    asked, key, own = (torch.randn(size, dtype=dtype) for size in ((batch, 9, 20), (batch, 20), 20))
    for interleaved in (False, True):
        ops.index_append(key, cos, sin, own, own, keys, end, eps=1e-6, interleaved=interleaved)
        ops.index_queries(asked, torch.randn(batch, 9), cos, sin, share=0.5, interleaved=interleaved)
    up = torch.randn(heads, dim, channels, dtype=dtype)
    ops.absorb_queries(queries[..., :dim], queries[..., dim:], cos, sin, up)
    ops.absorb_values(torch.randn(batch, heads, channels), torch.randn(heads, 13, channels, dtype=dtype))


def linear_layers(ops, dtype):
    """Short rows, of which a program takes several tiles, and long ones; weights that end within a tile."""
    for channels, rows in ((80, (5, 2, 3)), (300, (4001, 67)), (2048, (2500,)), (2100, (33, 7, 9))):
        x, norm = torch.randn(2, channels, dtype=dtype), torch.randn(channels, dtype=dtype)
        weights, biases = [[torch.randn(n, *w, dtype=dtype) for n in rows] for w in ((channels,), ())]
        residual = torch.randn(2, sum(rows), dtype=dtype)
        ops.grouped_linear(x, weights, norm=norm, eps=1e-6)
        ops.grouped_linear(x, weights, biases, residual=residual)
        ops.grouped_linear(x, [weights[0], weights[0]], norm=norm, eps=1e-6, gated=True)


def scored_rows(ops):
    """Candidates that the indexer's scorer leaves, of programs of one step, two and eight: winners spread, winners in
    one place, winners that are equal."""
    for columns in (9001, 20_001, 131_000):
        query, weights = torch.randn(3, 1, 4, 32, dtype=torch.bfloat16), torch.rand(3, 1, 4)
        keys, valid = torch.randn(3, columns, 32, dtype=torch.bfloat16), torch.rand(3, columns) > 0.1
        keys[1, 4000:4900] += query[1, 0, :1]
        keys[2, 4000:7000] = 3 * query[2, 0, :1]
        asked = (query, weights, keys, valid, torch.tensor([[columns], [columns - 9], [columns]]))
        scores = ops.index_scores(*asked, scale=0.2)[:, 0]
        for k in (64, 2048):
            guess = ops.topk_threshold(scores, k)
            for threshold in (guess, guess[:, 0], guess - 9, guess + 9, guess * float("nan")):
                ops.index_topk(*asked, k, scale=0.2, threshold=threshold)


def main():
    torch.set_default_device("cuda")
    ops = kernels.get_local_kernel(FOLDER)
    for shape in ((torch.bfloat16, 4, 128, 64), (torch.float16, 3, 80, 16), (torch.float32, 16, 64, 32)):
        decode_step(ops, *shape)
    for columns in (1, 31, 2049, 20001):
        for scores in (torch.randn(3, columns), torch.zeros(3, columns), torch.full((3, columns), float("nan"))):
            ops.gvr_topk(scores, 61, lengths=torch.tensor([columns, columns // 2, 0]))
    for columns, slots, k in ((700, 3, 61), (2049, 40, 61), (9000, 3, 509), (9000, 1, 3000), (20001, 33, 61)):
        scores = torch.randn(2, 3, columns)
        forced = torch.arange(0, columns, columns // slots, dtype=torch.int32)[:slots].expand(2, 3, -1).contiguous()
        ops.select_blocks(scores.scatter(2, forced.long(), float("nan")), forced, k)
    long_rows(ops)
    scored_rows(ops)
    for dtype in (torch.bfloat16, torch.float32):
        indexer_step(ops, dtype)
        prompt(ops, dtype)
        latent_token(ops, dtype)
        linear_layers(ops, dtype)
    torch.cuda.synchronize()
    print("every kernel ran:", ops.backend)


if __name__ == "__main__":
    main()
