"""From per-block partials to the attention output, the same bits however the partials came about."""

import torch

from .attend import Partials, block_partials, exp2, shifted
from .sums import tree_sum


def merge_partials(partials: Partials) -> torch.Tensor:
    """Canon(A): O = sum_b w_b o_b / sum_b w_b l_b with w_b = 2^(m_b - max m), summed in a fixed tree over slots.

    Returns:
        fp32 [B, H, G, D]; 0 where no slot holds a token.
    """
    if partials.output.shape[2] == 0:
        batch, heads, _, group, dim = partials.output.shape
        return partials.output.new_zeros((batch, heads, group, dim))
    weights = exp2(shifted(partials.peak, partials.peak.amax(dim=2, keepdim=True)))
    both = torch.cat([partials.output, partials.total[..., None]], dim=-1)  # one tree for both sums
    output, total = tree_sum(weights[..., None] * both, 2).split([partials.output.shape[-1], 1], dim=-1)
    return torch.where(total == 0, 0.0, output / total)


def slots_of(blocks: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """int64 [B, H, K]: where each of `blocks` stands in `among` ([B, H, J]); -1 where it doesn't, or is unused."""
    equal = (blocks[..., :, None] == among[..., None, :]) & (blocks[..., :, None] >= 0)
    if equal.shape[-1] == 0:
        return torch.full_like(blocks, -1, dtype=torch.int64)
    return torch.where(equal.any(dim=-1), equal.to(torch.int8).argmax(dim=-1), -1)


def check_partials(predicted: torch.Tensor, partials: Partials | None) -> None:
    """ValueError where blocks were predicted and nothing was computed."""
    if partials is None and predicted.shape[2]:
        raise ValueError(f"partials: expected those of {predicted.shape[2]} predicted blocks, got None")


def repair_merge(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    selected: torch.Tensor,
    end: torch.Tensor,
    predicted: torch.Tensor,
    partials: Partials | None,
    *,
    scale: float,
    block_size: int,
) -> torch.Tensor:
    """Attention over `selected`, taking what `partials` already holds and computing the rest (PRR, arXiv 2606.30389).

    What was predicted and not selected is dropped. The result equals, bit for bit, that of an empty prediction.

    Args:
        query .. end: as in `block_partials`.  selected: int32 [B, H, K], ascending, -1 last.
        predicted: int32 [B, H, J], in any order, and `partials` over it; J may be 0, and without `partials` has to be.

    Returns:
        fp32 [B, H, G, D].
    """

    def attend(blocks: torch.Tensor) -> Partials:
        return block_partials(query, keys, values, valid, start, blocks, end, scale=scale, block_size=block_size)

    check_partials(predicted, partials)
    if partials is None:
        return merge_partials(attend(selected))
    slot = slots_of(selected, predicted)
    missing = selected.masked_fill(slot >= 0, -1)
    fresh = attend(missing)
    row, head, rank = (slot >= 0).nonzero(as_tuple=True)
    taken = slot[row, head, rank]
    for target, source in zip(fresh, partials, strict=True):
        target[row, head, rank] = source[row, head, taken]
    return merge_partials(fresh)
