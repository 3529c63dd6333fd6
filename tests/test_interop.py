"""A patched model under what people put around a model: pipelines, streamers, chat templates, generation configs,
assistants."""

import threading

import pytest
import torch
from models import SPARSE, greedy, prompt, tiny_llama
from texts import save_llama, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
    pipeline,
)

from hf_sparse_prr import SparseCache, patch_model, patching
from hf_sparse_prr.hooks import cache_argument

pytestmark = pytest.mark.compat
PRR = dict(SPARSE, speculate=True)
TEXT = "The hill is green. The sea is blue. The sand is yellow. Off we go. " * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True)


@pytest.fixture
def loaded(folder):
    """(model, tokenizer): the model is patched and stock again after the test."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    model.to(torch.get_default_device())
    tokenizer.pad_token_id, tokenizer.padding_side = 0, "left"
    with patch_model(model, **PRR):
        yield model, tokenizer


def ids_of(tokenizer, text):
    return tokenizer(text, return_tensors="pt").input_ids.to(torch.get_default_device())


# Pipelines


def test_a_pipeline_gives_the_text_of_generate(loaded):
    model, tokenizer = loaded
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device=model.device)
    (answer,) = generate(TEXT, max_new_tokens=24, do_sample=False, return_full_text=False)
    assert model.sparse_prr.stats()["selector_calls"] > 0
    new = greedy(model, ids_of(tokenizer, TEXT))
    assert answer["generated_text"] == tokenizer.decode(new[0], skip_special_tokens=True)


def test_a_pipeline_pads_a_batch_and_gives_the_texts_of_one_by_one(loaded):
    model, tokenizer = loaded
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device=model.device)
    asked = dict(max_new_tokens=24, do_sample=False, return_full_text=False)
    texts = [TEXT, TEXT[100:], "Off we go."]
    together = generate(texts, batch_size=3, **asked)
    alone = [generate(text, **asked) for text in texts]
    assert together == alone


def test_a_pipeline_of_a_chat(loaded):
    model, tokenizer = loaded
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device=model.device)
    chat = [{"role": "user", "content": TEXT}]
    (answer,) = generate(chat, max_new_tokens=24, do_sample=False)
    assert model.sparse_prr.stats()["selector_calls"] > 0
    new = greedy(model, ids_of(tokenizer, f"[user] {TEXT}[assistant]"))
    said = answer["generated_text"][-1]
    assert said == {"role": "assistant", "content": tokenizer.decode(new[0], skip_special_tokens=True)}


def test_a_pipeline_of_a_patched_adapter(loaded):
    peft = pytest.importorskip("peft")
    model, tokenizer = loaded
    model.sparse_prr.unpatch()
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    with patch_model(adapted, **PRR) as handle:
        generate = pipeline("text-generation", model=adapted, tokenizer=tokenizer, device=model.device)
        (answer,) = generate(TEXT, max_new_tokens=24, do_sample=False, return_full_text=False)
        assert handle.stats()["selector_calls"] > 0
        with adapted.disable_adapter():
            (without,) = generate(TEXT, max_new_tokens=24, do_sample=False, return_full_text=False)
        new = adapted.generate(input_ids=ids_of(tokenizer, TEXT), max_new_tokens=24, do_sample=False)[0, -24:]
    assert answer["generated_text"] == tokenizer.decode(new, skip_special_tokens=True) != without["generated_text"]


# Streamers and chats


def test_a_text_iterator_streamer_in_another_thread(loaded):
    model, tokenizer = loaded
    ids = ids_of(tokenizer, TEXT)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=greedy, args=(model, ids), kwargs=dict(streamer=streamer))
    thread.start()
    pieces = list(streamer)
    thread.join(60)
    assert "".join(pieces) == tokenizer.decode(greedy(model, ids)[0])
    assert model.sparse_prr.stats()["selector_calls"] > 0


def test_two_turns_of_a_chat_over_one_cache(loaded):
    """The second turn's template begins with the first one's: what both have is kept, the rest is read anew."""
    model, tokenizer = loaded

    def ids(chat):
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return asked["input_ids"].to(model.device)

    chat = [{"role": "user", "content": TEXT}]
    first, cache = ids(chat), SparseCache(model)
    assert tokenizer.decode(first[0]) == f"[user] {TEXT}[assistant]"
    assert torch.equal(greedy(model, first, **{cache_argument(): cache}), greedy(model, first))
    chat += [{"role": "assistant", "content": " It is blue."}, {"role": "user", "content": "And the sand?"}]
    second = ids(chat)
    same = int((first[0] == second[0, : first.shape[1]]).long().cumprod(0).sum())
    assert same > 100
    cache.crop(same - cache.get_seq_length())
    assert torch.equal(greedy(model, second, **{cache_argument(): cache}), greedy(model, second))
    assert model.sparse_prr.stats()["selector_calls"] > 0


# Generation configs


def test_a_generation_config_file_is_followed(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    GenerationConfig(max_new_tokens=9, do_sample=False, num_beams=2, pad_token_id=0).save_pretrained(tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path).eval().to(torch.get_default_device()), prompt(150)
    with patch_model(model, **PRR) as handle:
        out = model.generate(ids)
        assert out.shape[1] == 159
        assert torch.equal(out, model.generate(ids, max_new_tokens=9, do_sample=False, num_beams=2))
        given = GenerationConfig.from_pretrained(tmp_path, num_beams=1)
        assert torch.equal(model.generate(ids, generation_config=given)[:, -9:], greedy(model, ids, 9, num_beams=1))
        assert handle.stats()["selector_calls"] > 0
        assert model.generation_config.num_beams == 2


@pytest.mark.parametrize("kind", ["static", "offloaded"])
def test_a_cache_named_in_a_generation_config_is_the_users_choice(kind, monkeypatch):
    """It runs stock, which is said once a process; a cache of generate()'s own would be a SparseCache."""
    monkeypatch.setattr(patching, "_PROCESS_WARNINGS", set())
    if kind == "offloaded" and not torch.cuda.is_available():
        pytest.skip("transformers offloads from a GPU")
    model, ids = tiny_llama(), prompt(150)
    asked = GenerationConfig(max_new_tokens=6, do_sample=False, cache_implementation=kind, disable_compile=True)
    stock = model.generate(ids, generation_config=asked)
    with patch_model(model, **SPARSE) as handle, pytest.warns(UserWarning, match="stock"):
        assert torch.equal(model.generate(ids, generation_config=asked), stock)
    assert handle.stats()["selector_calls"] == 0


# Assistants


def test_an_assistant_with_another_tokenizer(loaded, tmp_path):
    """Drafts are text: an unpatched assistant of another vocabulary changes no id."""
    model, tokenizer = loaded
    assistant, other = tiny_llama(seed=1, layers=1, vocab_size=302), tiny_tokenizer()
    ids = ids_of(tokenizer, TEXT)
    plain = greedy(model, ids)
    both = dict(tokenizer=tokenizer, assistant_tokenizer=other)
    assert torch.equal(greedy(model, ids, assistant_model=assistant, **both), plain)
    assert not hasattr(assistant, "sparse_prr")
