"""From per-block partials to the attention output, the same bits however the partials came about."""

import torch

from .attend import Partials, block_partials, check_attention_arguments, exp2, shifted
from .check import FP32, INT32, expect
from .sums import tree_sum


def check_partials(
    partials: Partials, sizes: tuple[int | None, ...] = (None,) * 5, device: torch.device | None = None
) -> None:
    """Raise ValueError unless they are partials, on that device and of these sizes: B, H, K, G, D. None is any."""
    # By its fields: traced code hands over those of another copy of this package
    if getattr(partials, "_fields", None) != Partials._fields:
        raise ValueError(f"partials: expected Partials, got {type(partials).__name__}")
    output, peak, total = partials
    expect("partials.output", output, "B, H, K, G, D", sizes, FP32, device)
    expect("partials.peak", peak, "B, H, K, G", output.shape[:4], FP32, output.device)
    expect("partials.total", total, "B, H, K, G", output.shape[:4], FP32, output.device)


def check_repair_arguments(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor,
    start: torch.Tensor,
    selected: torch.Tensor,
    end: torch.Tensor,
    predicted: torch.Tensor,
    partials: Partials | None,
    block_size: int,
) -> int:
    """Raise ValueError for what the host can tell is outside the contract of `repair_merge`.

    Returns:
        block_size as an int.
    """
    data = (query, keys, values, valid, start)
    block_size = check_attention_arguments(*data, selected, end, block_size, name="selected")
    batch, heads, group, dim = query.shape
    expect("predicted", predicted, "B, H, J", (batch, heads, None), INT32, query.device)
    guesses = predicted.shape[2]
    if partials is not None:
        check_partials(partials, (batch, heads, guesses, group, dim), query.device)
    elif guesses:
        raise ValueError(f"partials: expected those of {guesses} predicted blocks, got None")
    return block_size


def merge_partials(partials: Partials) -> torch.Tensor:
    """Canon(A): O = sum_b w_b o_b / sum_b w_b l_b with w_b = 2^(m_b - max m), summed in a fixed tree over slots.

    Returns:
        fp32 [B, H, G, D]; 0 where no slot holds a token.

    Raises:
        ValueError: anything but `Partials`, shapes, dtypes or devices outside of theirs.
    """
    check_partials(partials)
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
        predicted: int32 [B, H, J], in any order, and `partials` over it, which is taken at its word; J may be 0, and
            without `partials` has to be.

    Returns:
        fp32 [B, H, G, D].

    Raises:
        ValueError: shapes, dtypes, devices or block_size outside the above.
    """
    data = (query, keys, values, valid, start, selected, end, predicted)
    block_size = check_repair_arguments(*data, partials, block_size)

    def attend(blocks: torch.Tensor) -> Partials:
        return block_partials(query, keys, values, valid, start, blocks, end, scale=scale, block_size=block_size)

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
