"""An independent Quest decode step, in float64 and plain loops, fed by what an attention module was given."""

import math

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def select_blocks(queries, keys, valid, start, column, *, block_size, blocks, sink, local):
    """Block ids of one KV head that the query at `column` attends to; None where the row fits its budget.

    queries [G, D], keys [T, D] float64, valid [T] list of bool.
    """
    length = column + 1 - start
    if math.ceil(length / block_size) <= blocks:
        return None
    newest = (column - start) // block_size
    members = {
        block: [
            t for t in range(start + block * block_size, start + (block + 1) * block_size) if t <= column and valid[t]
        ]
        for block in range(newest + 1)
    }
    forced = [block for block in [*range(sink), *range(newest - local + 1, newest + 1)] if members[block]]
    scored = []
    for block in range(sink, newest - local + 1):
        if not members[block]:
            continue
        box = keys[members[block]]
        low, high = box.min(dim=0).values, box.max(dim=0).values
        bound = sum(float(torch.maximum(query * low, query * high).sum()) for query in queries)
        scored.append((-bound, block))
    free = [block for _, block in sorted(scored)[: blocks - sink - local]]
    return sorted([*forced, *free])


def attend(queries, keys, values, tokens, scale):
    """Softmax attention of queries [G, D] over the listed tokens."""
    logits = queries @ keys[tokens].T * scale
    return torch.softmax(logits, dim=-1) @ values[tokens]


def check_layer(attention, hidden, embeddings, output, layer, cache, plan, entries):
    """Compare one module's output for the last token with the oracle; `entries` is its trace entry or None."""
    column = layer.length - 1
    head_dim, group = attention.head_dim, attention.num_key_value_groups
    valid, start = cache.tokens.valid, cache.tokens.start
    heads = layer.keys.shape[1]
    query = attention.q_proj(hidden).view(*hidden.shape[:-1], -1, head_dim).transpose(1, 2)
    query = rotate(query, embeddings[0].unsqueeze(1), embeddings[1].unsqueeze(1))[:, :, -1].double()
    context = torch.zeros((hidden.shape[0], heads, group, head_dim), dtype=torch.float64)
    for row in range(hidden.shape[0]):
        bits = valid[row].tolist()
        for head in range(heads):
            keys, values = layer.keys[row, head].double(), layer.values[row, head].double()
            queries = query[row, head * group : (head + 1) * group]
            chosen = select_blocks(
                queries, keys, bits, int(start[row]), column,
                block_size=plan.block_size, blocks=plan.blocks, sink=plan.sink_blocks, local=plan.local_blocks,
            )  # fmt: skip
            if chosen is None:
                tokens = [t for t in range(column + 1) if bits[t]]
            else:
                first = int(start[row])
                tokens = [
                    t
                    for block in chosen
                    for t in range(first + block * plan.block_size, first + (block + 1) * plan.block_size)
                    if t <= column and bits[t]
                ]
            if entries is not None:
                traced = [block for block in entries.selected[row, head].tolist() if block >= 0]
                assert traced == (chosen or []), (row, head, traced, chosen)
            if tokens:
                context[row, head] = attend(queries, keys, values, tokens, attention.scaling)
    expected = attention.o_proj(context.flatten(1).to(output.dtype))
    return expected, output[:, -1]
