"""Small models and prompts that every test uses."""

import contextlib

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from hf_sparse_prr import decode

TOLERANCE = {  # of outputs whose arithmetic may be ordered differently
    torch.float32: dict(rtol=2e-5, atol=2e-5),
    torch.bfloat16: dict(rtol=2e-2, atol=2e-2),
    torch.float16: dict(rtol=5e-3, atol=5e-3),
}
SPARSE = dict(budget=80, block_size=16, dense_layers=0)  # 5 blocks, 3 of them forced
VOCABULARY = 97
# One layer of each kind: dense MLPs where a family may begin with them, 2 of 4 experts a token elsewhere
EXPERTS = {
    "qwen2_moe": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "glm4_moe": dict(
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, use_qk_norm=True
    ),
}
# Latent attention with an indexer: keys of 24 and values of 20 channels; 16 index heads, so that few scores tie
INDEXED = dict(
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=32,
    kv_lora_rank=32,
    q_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
    index_topk=40,
    index_n_heads=16,
    index_head_dim=16,
)
EXPERTS.update(deepseek_v32=INDEXED, glm_moe_dsa=INDEXED)


def tiny(model_type: str, seed: int = 0, layers: int = 3, dtype: torch.dtype = torch.float32, **overrides):
    """A random model of a family, eval mode: 4 query heads over 2 KV heads of dim 8, no eos, pad id 0."""
    torch.manual_seed(seed)
    settings = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=8192,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    settings.update(EXPERTS.get(model_type, {}))
    if model_type == "glm_moe_dsa":  # the second layer takes the tokens of the first
        settings["indexer_types"] = ["full", "shared", "full", "shared"][:layers]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**settings, **overrides}))
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    return model.to(dtype).eval()


def tiny_llama(**settings) -> LlamaForCausalLM:
    return tiny("llama", **settings)


def prompt(length: int = 150, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random ids without the pad id."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (batch, length), generator=generator, device="cpu")
    return ids.to(torch.get_default_device())


def left_pad(rows: list[torch.Tensor], extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention_mask) of 1-D rows, padded on the left to the longest, and by `extra` columns more."""
    width = max(len(row) for row in rows) + extra
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = row
        mask[index, width - len(row) :] = 1
    return ids, mask


def greedy(model, ids: torch.Tensor, tokens: int = 24, **kwargs) -> torch.Tensor:
    """Only the new ids."""
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, **kwargs)
    return out[:, -tokens:]


@contextlib.contextmanager
def predicting(monkeypatch, choose):
    """Make every prediction what `choose(layer, token)` returns, int32 [B, H, P]."""

    def expect(layer, prior, token, heads, *_):
        predicted = choose(layer, token)
        return torch.cat([token.forced.expand(-1, heads, -1), predicted], dim=2), predicted

    with monkeypatch.context() as patch:
        patch.setattr(decode, "expect", expect)
        yield
