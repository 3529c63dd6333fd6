"""A profile that was made up, so that the runtime that reads it is tested without a GPU."""

from hf_sparse_prr.profile import At, Cell, Key, Profile, device_name

RATIOS, HITS = (0.5, 1.0, 2.0), (0.0, 0.5, 0.95, 1.0)


def made_up(key, best=0.5, worst=1.25, contexts=(64, 4096), serial=20.0):
    """A step takes `best` of a serial one where everything is hit and `worst` of it where nothing is; half and twice as
    many predictions take 10% more."""

    def at(context):
        grown = serial * (1 + context / 4096)

        def cell(ratio, rate):
            hit = min(rate, ratio)
            step = grown * (worst + (best - worst) * hit) * (1.0 if ratio == 1.0 else 1.1)
            return Cell(ratio, hit, 0.2 * grown * (1.1 - hit), step)

        cells = tuple(cell(ratio, rate) for ratio in RATIOS for rate in HITS if rate <= ratio)
        return At(context, 0.3 * grown, grown, {ratio: 0.3 * grown * ratio for ratio in RATIOS}, cells)

    return Profile(key, {"torch": "made up"}, tuple(map(at, contexts)))


def key_of(model, handle, batch=1):
    """What a patched tiny model asks for."""
    config, plan, kernels = model.config, handle.sparse_plan, handle.kernels
    return Key(
        device_name(model.device), kernels.backend, kernels.version, config.num_attention_heads,
        config.num_key_value_heads, config.head_dim, str(model.dtype).removeprefix("torch."), batch, plan.selector,
        plan.block_size, plan.blocks,
    )  # fmt: skip
