"""What a benchmark checks before it times anything: one decode step against oracles that share no code with it."""

from types import ModuleType

import torch

from . import kernel_loader
from .decode import Token, select
from .layer import SparseLayer
from .selectors import SELECTORS, Scope

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # of the largest expected value


class ExactnessError(RuntimeError):
    """A result that isn't what it has to be: a bug, and no figure is worth anything."""


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest expected value; inf where NaN differ."""
    if not torch.equal(got.isnan(), expected.isnan()):
        return float("inf")
    known = ~expected.isnan()
    got, expected = got[known].double(), expected[known].double()
    return float((got - expected).abs().max() / expected.abs().max()) if len(got) else 0.0


def _near(field: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float, step: int) -> float:
    distance = _distance(got, expected)
    if not distance <= tolerance:
        raise ExactnessError(f"{field} of step {step}: expected within {tolerance:g} of its oracle, got {distance:.3g}")
    return distance


def dense_over(
    layer: SparseLayer, query: torch.Tensor, blocks: torch.Tensor, column: int, scale: float
) -> torch.Tensor:
    """fp64 [B, H, G, D]: plain softmax attention of `query` over the tokens of `blocks` [B, H, K] up to `column`, of
    rows without padding."""
    size = layer.plan.block_size
    tokens = (blocks.long()[..., None] * size + torch.arange(size, device=blocks.device)).flatten(2)
    seen = (tokens >= 0) & (tokens <= column)
    index = tokens.clamp(0, column)[..., None].expand(-1, -1, -1, query.shape[3])
    keys, values = (buffer.gather(2, index).double() for buffer in (layer.keys, layer.values))
    logits = scale * query.double() @ keys.transpose(2, 3)
    return torch.softmax(logits.masked_fill(~seen[:, :, None], float("-inf")), dim=-1) @ values


def best_blocks(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of [B, H, N] by a stable sort, ascending; there must be k that aren't NaN."""
    order = torch.sort(scores.masked_fill(scores.isnan(), float("-inf")), dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(dim=-1).values


def check_bits(what: str, got: torch.Tensor, expected: torch.Tensor, of: str = "serial decoding") -> None:
    """ExactnessError where two results differ in a bit."""
    if not torch.equal(got, expected):
        difference = float((got.double() - expected.double()).abs().max())
        raise ExactnessError(f"{what}: expected the bits of {of}, got a difference of {difference:.3g}")


def check_serial(
    layer: SparseLayer,
    query: torch.Tensor,
    token: Token,
    kernels: ModuleType,
    scale: float,
    serial: tuple[torch.Tensor, torch.Tensor],
) -> dict[str, float]:
    """Check one step of a layer without padding, all of whose rows select.

    Args:
        serial: output fp32 [B, H, G, D], blocks int32 [B, H, K].

    Returns:
        How far scores and output are from their oracles, relative to the largest value.

    Raises:
        ExactnessError: the output isn't dense attention over its blocks; the blocks aren't the forced ones and the best
            by score; a score isn't the reference's.
    """
    plan, step, dtype = layer.plan, token.step, layer.keys.dtype
    scores = select(layer, query, token, kernels, scale).scores
    scope = Scope(plan.sink_blocks, token.last, token.column + 1 - token.start, scale)
    reference = kernel_loader.resolve("reference").module
    expected = SELECTORS[plan.selector].scores(reference, query, layer.summaries, scope, plan)
    far = {"scores_error": _near("scores", scores, expected, TOLERANCE[dtype], step)}

    newest = token.column // plan.block_size
    forced = [*range(plan.sink_blocks), *range(newest - plan.local_blocks + 1, newest + 1)]
    wanted = torch.tensor(forced, device=scores.device).expand(*scores.shape[:2], -1)
    wanted = torch.cat([wanted, best_blocks(scores, plan.free_blocks)], dim=-1).sort(dim=-1).values
    if not torch.equal(serial[1].long(), wanted):
        wrong = int((serial[1].long() != wanted).sum())
        raise ExactnessError(
            f"selection of step {step}: expected the forced blocks and the best by a stable sort, got {wrong} others"
        )
    dense = dense_over(layer, query, serial[1], token.column, scale)
    return {**far, "output_error": _near("output", serial[0], dense, TOLERANCE[dtype], step)}
