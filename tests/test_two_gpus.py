"""Two GPUs give the answers of one, however the work is spread: layers, heads, or prompts.

HF_SPARSE_PRR_TEST_DEVICE=cuda pytest tests/test_two_gpus.py runs all of it, with -m slow what two GPUs gain.
"""

import json
import subprocess
import sys

import pytest
import torch
from accelerate import dispatch_model
from models import SPARSE, VOCABULARY, greedy, left_pad, prompt, tiny
from sharded import PROMPT, shard
from texts import save_llama, tiny_tokenizer
from transformers import AutoModelForCausalLM

from hf_sparse_prr import SparseCache, patch_model
from hf_sparse_prr.patches import INDEXED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")]
INFLLM = dict(selector="infllm_v2", budget=256, block_size=32, dense_layers=0)


def spread(model, first, second):
    """Layers alternate between two devices; the rest is on the first one."""
    layers = {f"model.layers.{i}": (first, second)[i % 2] for i in range(model.config.num_hidden_layers)}
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    keys = model._skip_keys_device_placement  # as from_pretrained does: a cache stays where its layers are
    return dispatch_model(model, {**layers, **dict.fromkeys(rest, first)}, skip_keys=keys)


@pytest.mark.parametrize("settings", [SPARSE, INFLLM], ids=["quest", "infllm_v2"])
@pytest.mark.parametrize("speculate", [False, True])
def test_generate_gives_the_ids_of_one_gpu(settings, speculate):
    seen = []
    for first, second in ((0, 0), (0, 1), (1, 0)):
        device = torch.device("cuda", first)
        model = tiny("llama").to(device)
        if first != second:
            model = spread(model, first, second)
        with patch_model(model, **settings, speculate=speculate) as handle:
            seen.append([])
            for ids in (prompt(400), prompt(300, batch=2)):
                seen[-1].append(greedy(model, ids.to(device), 40).cpu())
            ids, mask = left_pad([prompt(300)[0], prompt(150, seed=1)[0]], 37)
            seen[-1].append(greedy(model, ids.to(device), 30, attention_mask=mask.to(device)).cpu())
            assert handle.report().backend in ("triton", "cuda")
            assert handle.stats()["selector_calls"] > 0
        assert torch.cuda.current_device() == 0
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("model_type", ["llama", *INDEXED])
def test_device_map_gives_the_ids_of_one_gpu(model_type, tmp_path):
    """Two layers of four elsewhere, by from_pretrained; one of GLM-MoE-DSA takes tokens of a layer that isn't there.
    Two turns over one cache, beams, and side state that lives with its layer."""
    halves = {f"model.layers.{i}": int(i in (1, 2)) for i in range(4)}
    halves |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)
    tiny(model_type, layers=4).save_pretrained(tmp_path)
    settings = {} if model_type in INDEXED else SPARSE
    seen = []
    for device_map in ({"": 0}, halves):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map).eval()
        places = {parameter.device for parameter in model.model.layers.parameters()}
        assert len(places) == (1 if device_map == {"": 0} else 2)
        with patch_model(model, **settings, speculate=True) as handle:
            cache, ids = SparseCache(model), prompt(300).to(model.device)
            first = model.generate(ids, max_new_tokens=20, do_sample=False, past_key_values=cache)
            longer = torch.cat([first, prompt(40, seed=1).to(first.device)], dim=1)
            second = model.generate(longer, max_new_tokens=20, do_sample=False, past_key_values=cache)
            beams = greedy(model, ids, 12, num_beams=2)
            assert handle.stats()["selector_calls"] > 0
            for layer, module in zip(cache.layers, model.model.layers, strict=True):
                held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor) and value.numel()]
                assert held and {value.device for value in held} == {module.self_attn.o_proj.weight.device}
        seen.append([each.cpu() for each in (first, second, beams)])
        assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_tensor_parallel_gives_the_ids_of_one_gpu(tmp_path):
    types = ("llama", "qwen3", "glm4", *INDEXED)
    models = {name: tiny(name, vocab_size=VOCABULARY + 1) for name in types}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    for (name, model), ranks in zip(models.items(), shard(*(tmp_path / name for name in types)), strict=True):
        ids = prompt(PROMPT)
        stock = greedy(model, ids).tolist()
        with patch_model(model, **({} if name in INDEXED else SPARSE), speculate=True):
            patched = greedy(model, ids).tolist()
        for rank in ranks:
            assert rank["sharded"] and rank["stock"] == stock and rank["patched"] == patched, name
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name / "saved").state_dict()
        assert all(torch.equal(saved[key].cpu(), value.cpu()) for key, value in model.state_dict().items()), name


def answer(folder, prompts, out, processes, *options):
    """Records of `hf_sparse_prr.launch`, and the seconds from the first prompt to the last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    asked = ("--model", folder, "--prompts", prompts, "--out", out, *options)
    done = subprocess.run(
        [*command, "hf_sparse_prr.launch", *map(str, asked)], capture_output=True, text=True, cwd=folder, timeout=500
    )
    assert done.returncode == 0, done.stderr
    seconds = json.loads(out.with_name(out.name + ".run.json").read_text())["totals"]["seconds"]
    return [json.loads(line) for line in out.read_text().splitlines()], seconds


def test_data_parallel_gives_the_answers_of_one_gpu(tmp_path):
    folder, prompts = save_llama(tmp_path), tmp_path / "prompts.jsonl"
    texts = [f"The sea is blue. Off we go. {index} " * (4 + 7 * (index % 4)) for index in range(12)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    options = ("--tokens", 40, "--budget", 96, "--block-size", 16, "--speculate", "--dtype", "float32")
    one, _ = answer(folder, prompts, tmp_path / "one.jsonl", 1, *options)
    two, _ = answer(folder, prompts, tmp_path / "two.jsonl", 2, *options)
    assert [record["ids"] for record in two] == [record["ids"] for record in one]
    assert {record["process"] for record in two} == {0, 1}
    assert any(record["stats"]["selector_calls"] for record in two)


@pytest.mark.slow
def test_two_gpus_answer_nearly_twice_as_many_prompts(tmp_path):
    """A random Llama of 16 layers, 64 prompts of 4K tokens, 128 new ones each."""
    sizes = dict(vocab_size=400, hidden_size=1024, intermediate_size=4096, num_attention_heads=16, head_dim=64)
    tiny("llama", layers=16, num_key_value_heads=4, **sizes).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    text = tokenizer.decode(tokenizer("The sea is blue. Off we go. " * 800).input_ids[:4096])
    prompts, few = tmp_path / "prompts.jsonl", tmp_path / "few.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{index} {text}"}) + "\n" for index in range(64)))
    few.write_text("".join(prompts.read_text().splitlines(keepends=True)[:4]))
    options = ("--tokens", 128, "--budget", 1024, "--speculate")
    answer(tmp_path, few, tmp_path / "few_answers.jsonl", 2, *options)  # kernels are compiled once, and kept
    (_, one), (_, two) = (answer(tmp_path, prompts, tmp_path / f"{n}.jsonl", n, *options) for n in (1, 2))
    print(f"64 prompts: {one:.1f} s on one GPU, {two:.1f} s on two, {one / two:.2f}x")
    assert one / two >= 1.9
