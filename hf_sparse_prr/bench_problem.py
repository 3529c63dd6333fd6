"""What `bench segment` times: layers whose K/V don't fit a GPU's L2 together, and one token after some that were
decoded, with predictions that hit as many blocks as is asked."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .bench import successive
from .config import DEFAULT_EMA, LayerPlan
from .decode import Selection, Token, decode_token, expect, select, token_at
from .layer import SparseLayer
from .predictor import Expected, Memory
from .report import Statistics
from .selectors import SELECTORS
from .shapes import Shape
from .tokens import Tokens

COLD = 8  # times a GPU's L2 that the layers' K/V and summaries of one serial token take together
_MOST = 64  # layers
_FREE = 0.7  # of the GPU's free memory that they may take
_CHUNK = 2**16  # tokens that are made at once
Rate = float | None  # the share of the free blocks that is predicted; None: what the EMA predicts


class Case(NamedTuple):
    """One layer and its query of the timed token.

    query: [B, H, G, D].  selection: of the token.  hint: the winners of the token before, None without one.
    expected: by hit rate.
    """

    layer: SparseLayer
    query: torch.Tensor
    selection: Selection
    hint: torch.Tensor | None
    expected: dict[Rate, Expected]


def predicted_at(
    rate: float, free: torch.Tensor, scores: torch.Tensor, seed: int, slots: int | None = None
) -> torch.Tensor:
    """int32 [B, H, P], ascending: of each KV head's selected blocks `free` [B, H, K], all in use, the share `rate`,
    rounded to whole blocks, and for the rest others that have a score [B, H, N]; -1, last, where none are left.

    slots: P, by default K; fewer hold fewer hits.
    """
    generator = torch.Generator().manual_seed(seed)  # of the CPU: the same on every device
    free, others = free.cpu().long(), ~scores.cpu().isnan()
    slots, blocks = slots or free.shape[2], scores.shape[2]
    kept = min(round(rate * free.shape[2]), slots)
    order = torch.rand(free.shape, generator=generator).argsort(dim=2)
    others.scatter_(2, free, False)
    drawn = torch.rand(scores.shape, generator=generator).masked_fill(~others, -1.0)
    wrong = drawn.topk(min(slots - kept, blocks), dim=2)
    wrong_ids = wrong.indices.masked_fill(wrong.values < 0, blocks)
    guessed = free.new_full((*free.shape[:2], slots), blocks)  # past every id: where nothing is left to predict
    guessed[..., :kept] = free.gather(2, order[..., :kept])
    guessed[..., kept : kept + wrong_ids.shape[2]] = wrong_ids
    guessed = guessed.sort(dim=2).values
    return guessed.masked_fill(guessed == blocks, -1).to(scores.device, torch.int32)


def cold_layers(
    shape: Shape, context: int, plan: LayerPlan, batch: int, dtype: torch.dtype, device: torch.device
) -> int:
    """As many layers as a serial token reads COLD times the GPU's L2 in, if they fit its memory; one on a CPU."""
    if device.type != "cuda":
        return 1
    keys = torch.empty((1, 1, 1, shape.head_dim), dtype=dtype, device="meta")
    token = 2 * shape.head_dim * keys.element_size()
    summary = sum(each.numel() * each.element_size() for each in SELECTORS[plan.selector].allocate(keys, 1, plan))
    summaries = -(-context // plan.block_size) * summary
    read = batch * shape.kv_heads * (plan.blocks * plan.block_size * token + summaries)
    held = batch * shape.kv_heads * (context * token + summaries)
    wanted = -(-COLD * torch.cuda.get_device_properties(device).L2_cache_size // read)
    return max(1, min(wanted, _MOST, int(_FREE * torch.cuda.mem_get_info(device)[0] / held)))


class Problem:
    """Attention layers without padding that hold `context` tokens each, and the tokens that follow.

    keys, values: random normal.  queries: of each layer [B, H, G, D] a token, random normal, each correlated with the
    one before it.  plans: "serial" and "prr".
    """

    def __init__(
        self,
        shape: Shape,
        context: int,
        plans: dict[str, LayerPlan],
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: int,
        steps: int,
        correlation: float,
        kernels: ModuleType,
    ) -> None:
        self.context, self.steps, self.plans, self.device = context, steps, plans, device
        self.kernels, self.scale = kernels, shape.head_dim**-0.5
        self.layers = [SparseLayer(max_length=context + steps) for _ in range(layers)]
        self.tokens, self.counters = Tokens(), Statistics(1)
        self._options: dict[str, Any] = dict(device=device, dtype=dtype)
        self._generator = torch.Generator(device).manual_seed(0)
        self._sizes = (batch, shape.kv_heads, shape.head_dim)
        for layer in self.layers:
            layer.plan = plans["prr"]
        for begin in range(0, context, _CHUNK):
            self._append(min(_CHUNK, context - begin))
        size = (batch, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        self.queries = [successive(lambda: self._normal(*size), steps, correlation) for _ in self.layers]

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self._generator, **self._options)

    def _append(self, count: int) -> None:
        """As the cache does, with the summaries of their blocks."""
        batch, heads, dim = self._sizes
        length = self.tokens.length + count
        step = self.tokens.plan(None, batch, count, length, min(length, self.context))
        for layer in self.layers:
            layer.update(self._normal(batch, heads, count, dim), self._normal(batch, heads, count, dim))
        self.tokens.commit(step, batch, self.layers[0].capacity, self.device)
        for layer in self.layers:
            if layer.is_due(length - 1):
                layer.summarise(self.kernels, self.tokens.on(self.device))

    def append(self, step: int) -> Token:
        """The token of a step, new in every layer."""
        self._append(1)
        return token_at(self.tokens, self.context + step, step, self.plans["prr"], self.device)

    def decode(
        self, index: int, name: str, memory: Memory, token: Token, counters: Statistics
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a patched layer with that plan and memory runs between its projections: fp32 [B, H, G, D], and the
        blocks attended to."""
        layer, kept = self.layers[index], self.layers[index].memory
        layer.plan, layer.memory = self.plans[name], memory
        try:
            query = self.queries[index][token.step]
            return decode_token(layer, 0, query, token, self.kernels, self.scale, counters, False)
        finally:
            layer.plan, layer.memory = self.plans["prr"], kept

    def case(self, index: int, token: Token, rates: Sequence[Rate]) -> Case:
        """A layer before it decodes `token`."""
        layer, query = self.layers[index], self.queries[index][token.step]
        prior, heads = layer.memory.prior, query.shape[1]
        selection = select(layer, query, token, self.kernels, self.scale)
        forced = token.forced.expand(-1, heads, -1)
        expected: dict[Rate, Expected] = {}
        for rate in rates:
            if rate is None:
                ema = layer.memory.coefficients(DEFAULT_EMA, query.shape[0], self.device)
                expected[rate] = expect(layer, prior, token, heads, self.kernels, ema)
            else:
                predicted = predicted_at(rate, selection.free, selection.scores, index)
                expected[rate] = Expected(torch.cat([forced, predicted], dim=2), predicted)
        return Case(layer, query, selection, None if prior is None else prior.winners, expected)
