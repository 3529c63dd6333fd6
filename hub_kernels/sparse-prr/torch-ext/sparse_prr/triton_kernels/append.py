"""New keys and values into a K/V buffer."""

import torch
import triton
import triton.language as tl

from ..reference.append import check_append_arguments
from .launch import options, wait_for_previous
from .tile import padded


@triton.jit
def _append(
    keys, values, new_keys, new_values, end, count,
    k_b, k_h, k_t, k_d, v_b, v_h, v_t, v_d, nk_b, nk_h, nk_t, nk_d, nv_b, nv_h, nv_t, nv_d, e_b,
    DK: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t, d = tl.load(end + b * e_b).to(tl.int64) - count + i, tl.arange(0, DP)
    k = tl.load(new_keys + b * nk_b + h * nk_h + i * nk_t + d * nk_d, mask=d < DK)
    v = tl.load(new_values + b * nv_b + h * nv_h + i * nv_t + d * nv_d, mask=d < DV)
    tl.store(keys + b * k_b + h * k_h + t * k_t + d * k_d, k, mask=d < DK)
    tl.store(values + b * v_b + h * v_h + t * v_t + d * v_d, v, mask=d < DV)


def append_states(
    keys: torch.Tensor, values: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor, end: torch.Tensor
) -> None:
    """As the reference. One program a new column and KV head."""
    check_append_arguments(keys, values, new_keys, new_values, end)
    batch, heads, count, dim = new_keys.shape
    if new_keys.numel() == 0:
        return
    wide = new_values.shape[3]
    _append[(count, heads, batch)](
        keys, values, new_keys, new_values, end, count,
        *keys.stride(), *values.stride(), *new_keys.stride(), *new_values.stride(), *end.stride(),
        DK=dim, DV=wide, DP=padded(max(dim, wide)), **options(keys, num_warps=1),
    )  # fmt: skip
