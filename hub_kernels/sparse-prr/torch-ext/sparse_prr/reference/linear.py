"""Linear layers of a decode step with what stands around them: norm before, gate or residual after."""

from collections.abc import Sequence

import torch

from .check import FLOATS, expect

MOST = 3  # weights of one call: query, key and value


def check_linear_arguments(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    norm: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None,
) -> None:
    """Raise ValueError for what the host can tell is outside the contract of `grouped_linear`."""
    expect("x", x, "B, X", (None, None), FLOATS)
    (batch, wide), device = x.shape, x.device
    if not 1 <= len(weights) <= MOST or (gated and len(weights) != 2):
        allowed = "2, a gate's and what it gates" if gated else f"1 to {MOST}"
        raise ValueError(f"weights: expected {allowed}, got {len(weights)}")
    dtypes = (weights[0].dtype,) if isinstance(weights[0], torch.Tensor) else FLOATS
    for at, weight in enumerate(weights):
        rows = weights[0].shape[0] if gated and at else None
        expect(f"weights[{at}]", weight, "Y, X", (rows, wide), dtypes if dtypes[0] in FLOATS else FLOATS, device)
        if weight.numel() and wide > 1 and weight.stride(1) != 1:
            raise ValueError(f"weights[{at}]: expected rows without gaps, got strides {weight.stride()}")
    if biases is not None:
        if len(biases) != len(weights):
            raise ValueError(f"biases: expected {len(weights)}, got {len(biases)}")
        for at, (bias, weight) in enumerate(zip(biases, weights, strict=True)):
            expect(f"biases[{at}]", bias, "Y", (weight.shape[0],), dtypes, device)
    if norm is not None:
        expect("norm", norm, "X", (wide,), dtypes, device)
    if residual is not None:
        rows = weights[0].shape[0] if gated else sum(weight.shape[0] for weight in weights)
        expect("residual", residual, "B, Y", (batch, rows), dtypes, device)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [.., X] over its root mean square, times `weight` [X], rounded before and after that product."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The outputs of linear layers that share an input, side by side: [B, Y], Y all their channels.

    Rounded to the weights' dtype where modules called one after the other round: `x`, what the norm divides and what it
    scales, a linear layer's sum (fp32, bias included), SiLU, its product, and the sum with the residual. The order of a
    sum over X is the implementation's, and the same for every batch row.

    Args:
        x: [B, X], any float dtype.  weights: 1 to 3 of [Y, X], rows without gaps, one dtype; they are read where
            they are, on a GPU before the kernel in front is done: nothing may write them in a step.
        biases: as many of [Y].  norm: [X], the weight of an RMS norm (with `eps`) of x before them.
        gated: two weights of one shape; SiLU of the first's output times the second's, [B, Y] of one of them.
        residual: [B, Y], added last.

    Raises:
        ValueError: shapes, dtypes, strides or devices outside the above.
    """
    check_linear_arguments(x, weights, biases, norm, gated, residual)
    x = x.to(weights[0].dtype)
    if norm is not None:
        x = rms_norm(x, norm, eps)
    outputs = []
    for at, weight in enumerate(weights):
        output = (x.float()[:, None] * weight.float()).sum(dim=2)  # no matmul: its bits change with the shape
        outputs.append((output if biases is None else output + biases[at].float()).to(weight.dtype))
    output = torch.nn.functional.silu(outputs[0]) * outputs[1] if gated else torch.cat(outputs, dim=1)
    return output if residual is None else residual + output
