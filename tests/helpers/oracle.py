"""An independent decode step, in float64 and plain loops, fed by what an attention module was given."""

import math
from typing import NamedTuple
from unittest import mock

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def stock_query(attention, hidden, embeddings):
    """The post-RoPE query [B, H*G, Q, D] that the stock class hands to its attention function."""
    seen = []

    def capture(module, query, key, value, mask, **_):
        seen.append(query)
        return query.transpose(1, 2), None

    with mock.patch.object(type(ALL_ATTENTION_FUNCTIONS), "get_interface", return_value=capture):
        attention.stock.forward(attention, hidden, embeddings, None)
    return seen[0]


class Row(NamedTuple):
    """One KV head of one batch row, as the query in its last token sees it. float64."""

    queries: torch.Tensor  # [G, D]
    keys: torch.Tensor  # [T, D]
    valid: list[bool]
    start: int
    length: int
    members: dict[int, list[int]]  # valid columns of each block that has one
    plan: object
    scale: float
    dtype: torch.dtype  # of the cache


def quest_scores(row):
    """The largest q.k that the box around a block's keys allows."""
    scores = {}
    for block, tokens in row.members.items():
        low, high = row.keys[tokens].min(dim=0).values, row.keys[tokens].max(dim=0).values
        bounds = [float(torch.maximum(query * low, query * high).sum()) for query in row.queries]
        scores[block] = max(bounds) if row.plan.group == "max" else sum(bounds)
    return scores


def infllm_scores(row):
    """Softmax over means of 32 keys every 16, summed over the heads, the maximum of those that end in a block."""
    means, scores = {}, {}
    for begin in range(0, row.length - 31, 16):
        tokens = [t for t in range(row.start + begin, row.start + begin + 32) if row.valid[t]]
        if tokens:
            means[begin + 32] = row.keys[tokens].mean(dim=0).to(row.dtype).double()  # as they are kept
    if not means:
        return scores
    logits = torch.stack([row.queries @ mean * row.scale for mean in means.values()])
    for end, share in zip(means, torch.softmax(logits, dim=0).sum(dim=1).tolist(), strict=True):
        block = (end - 1) // row.plan.block_size
        scores[block] = max(scores.get(block, 0.0), share)
    return scores


SCORES = {"quest": quest_scores, "infllm_v2": infllm_scores}


def select_blocks(queries, keys, valid, start, column, plan, scale, dtype):
    """Block ids of one KV head that the query at `column` attends to; None where the row fits its budget."""
    size, length = plan.block_size, column + 1 - start
    if math.ceil(length / size) <= plan.blocks:
        return None
    newest = (length - 1) // size
    members = {
        block: [t for t in range(start + block * size, start + (block + 1) * size) if t <= column and valid[t]]
        for block in range(newest + 1)
    }
    members = {block: tokens for block, tokens in members.items() if tokens}
    forced = [*range(plan.sink_blocks), *range(newest - plan.local_blocks + 1, newest + 1)]
    scores = SCORES[plan.selector](Row(queries, keys, valid, start, length, members, plan, scale, dtype))
    ranked = sorted((-score, block) for block, score in scores.items() if block not in forced)
    free = [block for _, block in ranked[: plan.free_blocks]]
    return sorted([*(block for block in forced if block in members), *free])


def attend(queries, keys, values, tokens, scale):
    """Softmax attention of queries [G, D] over the listed tokens."""
    logits = queries @ keys[tokens].T * scale
    return torch.softmax(logits, dim=-1) @ values[tokens]


def check_layer(attention, hidden, embeddings, output, layer, cache, plan, entry):
    """(expected, got) of one module's output for the last token; `entry` is its trace entry, checked on the way."""
    column = layer.length - 1
    head_dim, group = attention.head_dim, attention.num_key_value_groups
    valid, start = cache.tokens.valid, cache.tokens.start
    heads, dtype = layer.keys.shape[1], layer.keys.dtype
    query = stock_query(attention, hidden, embeddings)[:, :, -1].double()
    context = torch.zeros((hidden.shape[0], heads, group, head_dim), dtype=torch.float64)
    for row in range(hidden.shape[0]):
        bits, first = valid[row].tolist(), int(start[row])
        for head in range(heads):
            keys, values = layer.keys[row, head].double(), layer.values[row, head].double()
            queries = query[row, head * group : (head + 1) * group]
            chosen = select_blocks(queries, keys, bits, first, column, plan, attention.scaling, dtype)
            if chosen is None:
                tokens = [t for t in range(column + 1) if bits[t]]
            else:
                tokens = [t for t in range(first, column + 1) if bits[t] and (t - first) // plan.block_size in chosen]
            traced = [block for block in entry.selected[row, head].tolist() if block >= 0]
            assert traced == (chosen or []), (row, head, traced, chosen)
            if tokens:
                context[row, head] = attend(queries, keys, values, tokens, attention.scaling)
    expected = attention.o_proj(context.flatten(1).to(output.dtype))
    return expected, output[:, -1]
