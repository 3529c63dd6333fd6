"""transformers' SDPA attention over a SparseCache on an NVIDIA GPU: never cuDNN, and where nothing is padded neither a
mask nor repeated K/V heads."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.backends.cuda import (
    can_use_flash_attention,
    cudnn_sdp_enabled,
    enable_cudnn_sdp,
    flash_sdp_enabled,
    math_sdp_enabled,
    mem_efficient_sdp_enabled,
)
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.nn.attention.bias import SDPAParams  # from here torch.compile can trace it
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# What a caller may hand to the attention function that only transformers' own implements
_STOCK_ONLY = {"is_causal", "position_bias", "softcap"}


def on_gpu(implementation: str, device: torch.device) -> bool:
    """Whether `gpu_attention` is for a model with this attention implementation. Elsewhere stock runs as it is."""
    return (
        implementation == "sdpa"
        and device.type == "cuda"
        and torch.version.hip is None
        and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
    )


def without_cudnn() -> AbstractContextManager[Any]:
    """SDPA by those backends that the user has enabled but cuDNN, unless it's the only one.

    cuDNN builds a plan for each new K/V length: 49 to 59 ms on an H200. Entering and leaving takes 1 us on the host,
    torch's own sdpa_kernel 9 us. torch.compile can trace only that.
    """
    return _traceable() if torch.compiler.is_compiling() else _cudnn_off()


@contextmanager
def _cudnn_off() -> Iterator[None]:
    others = flash_sdp_enabled() or mem_efficient_sdp_enabled() or math_sdp_enabled()
    if not (others and cudnn_sdp_enabled()):
        yield
        return
    enable_cudnn_sdp(False)
    try:
        yield
    finally:
        enable_cudnn_sdp(True)


def _traceable() -> AbstractContextManager[Any]:
    enabled = _cur_sdpa_kernel_backends()
    return sdpa_kernel([backend for backend in enabled if backend != SDPBackend.CUDNN_ATTENTION] or enabled)


def flash_takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether torch's flash kernel is enabled and takes these as they are: half precision, heads of up to 256."""
    inputs = SDPAParams(query, keys, values, None, 0.0, False, True)
    return query.shape[3] % 8 == 0 and can_use_flash_attention(inputs)


def flash_lower_right(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> torch.Tensor:
    """[B, Q, H*G, D] of the last Q tokens, each attending up to itself. query: [B, H*G, Q, D].

    The op aligns `is_causal` at the lower right, SDPA at the upper left. torch.nn.attention.bias.causal_lower_right
    leads to the same op, but is itself a float tensor [2, Q, T], and transformers repeats the K/V heads for it.
    """
    output = torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, 0.0, True, scale=scaling)[0]
    return output.transpose(1, 2).contiguous()


def packed(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """[B, 1, H*G, D] of one token: the query heads of a group stand as query tokens of their KV head.

    So transformers 5.24 does it. 5.17 repeats the K/V heads, as flash takes no mask and the memory-efficient kernel no
    groups.
    """
    grouped = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[3])
    output = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return output.reshape(query.shape[0], 1, query.shape[1], values.shape[3])


def gpu_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As sdpa_attention_forward, for the newest tokens. causal: the mask says no more than that.

    Stock is left with what flash doesn't take, like float32, and with padded prompts of several tokens: they need a
    mask, and the kernel that takes one needs repeated heads.
    """
    count, length = query.shape[2], keys.shape[2]
    with without_cudnn():
        if not kwargs.keys() & _STOCK_ONLY:
            if causal and count in (1, length):
                mask = None
            elif causal and flash_takes(query, keys, values):
                return flash_lower_right(query, keys, values, scaling), None
            elif count == 1 and mask is not None and mask.shape[1] == 1:
                return packed(query, keys, values, mask, scaling), None
        return sdpa_attention_forward(module, query, keys, values, mask, scaling=scaling, **kwargs)
