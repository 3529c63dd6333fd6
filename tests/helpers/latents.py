"""What the tests of models with an indexer share."""

import torch
from models import left_pad, prompt

TOPK, LENGTH = 40, 160  # selected tokens, and those of a row that is four times as long
# 1e-5 of the largest logit, 5.6: stock's own logits move by 1.6e-5 when its tokens come one by one
CLOSE = dict(rtol=1e-5, atol=5e-5)


def forward(model, ids, cache, mask=None, **kwargs):
    """The model's output for the new ids [B, Q]; the mask covers what the cache holds as well."""
    positions = None if mask is None or mask.dim() > 2 else (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, **kwargs)


def padded():
    return left_pad([prompt(LENGTH)[0], prompt(LENGTH - 37, seed=1)[0], prompt(30, seed=2)[0]])


def picked_layers(model):
    return len(model.config.layer_types) - list(getattr(model.config, "indexer_types", None) or []).count("shared")


def full_layers(model):
    types = getattr(model.config, "indexer_types", None) or ["full"] * 3
    return [kind == "full" for kind in types]
