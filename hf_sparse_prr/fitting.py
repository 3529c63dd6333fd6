"""A decode token for which every batch row fits its budget: what the first layer of full attention has found holds for
the layers behind it too, so that they do what stock attention does and little else.

Looked at again in each layer it took a third as long again as stock, on the host.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .cache import SparseCache
    from .layer import SparseLayer
    from .patching import PatchHandle
    from .tokens import Step


class Fitting(NamedTuple):
    """The token in column `begin`, of so many batch rows.  attention: what the first layer took, on `device`."""

    begin: int
    batch: int
    device: torch.device
    attention: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

    def goes_on(self, layer: "SparseLayer", hidden_states: torch.Tensor, training: bool) -> bool:
        """Whether the layer is the next one to see this token, as far as the host can tell, and has room for it.
        Gradients and inference mode take the other way, that makes ordinary tensors."""
        return (
            layer.is_initialized
            and layer.length == self.begin < layer.keys.shape[2]
            and hidden_states.shape[:2] == (self.batch, 1)
            and hidden_states.device == self.device == layer.device
            and not (training or torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        )

    def attend(
        self,
        module: torch.nn.Module,
        layer: "SparseLayer",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append, and attend to all there is: [B, 1, H*G, D], and weights where the implementation has any.

        query: [B, H*G, 1, D].  key, value: [B, H, 1, D].
        """
        keys, values = layer.append_fitting(key, value)
        if "sliding_window" in module.__dict__:  # as `SparseGQA`
            kwargs["sliding_window"] = module.sliding_window
        return self.attention(module, query, keys, values, None, dropout=0.0, scaling=module.scaling, **kwargs)


def fitting_of(
    handle: "PatchHandle", cache: "SparseCache", step: "Step", attention: Callable[..., Any]
) -> Fitting | None:
    """What the layers behind the first one of full attention need to know of this token. None where one of them might
    select, mask or trace something."""
    plain = step.count == 1 and step.first_decode == 0 and step.validity is None and step.dense_reason is None
    if not plain or cache.tokens.padded or handle.config.trace or torch.compiler.is_compiling():
        return None
    plan = handle.sparse_plan
    if plan is not None and cache.tokens.any_longer(step.begin, plan.fits):
        return None
    leader = cache.layers[cache.leader]
    return Fitting(step.begin, leader.batch_size, leader.device, attention)
