"""Models under evaluation, by name."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_sparse_prr.demo.loading import LoadError
from hf_sparse_prr.evidence.subjects import load_subject
from hf_sparse_prr.evidence.tasks import Bytes, Sentences
from hf_sparse_prr.evidence.tiny import load_tiny, tiny_model


def test_a_tiny_model_reads_bytes():
    subject = load_subject("tiny:llama")
    assert isinstance(subject.form, Bytes) and subject.tokenizer is None
    assert not subject.indexed and subject.longest == 32768 and subject.encode("ab") == [97, 98]
    assert load_subject("tiny:deepseek_v32").indexed


@pytest.mark.xdist_group("smollm2")
def test_a_path_is_read_with_its_tokenizer(smollm2):
    from hf_sparse_prr.demo.smollm2 import ensure_smollm2

    subject = load_subject(str(ensure_smollm2()))
    assert isinstance(subject.form, Sentences) and subject.longest == 8192
    assert subject.tokenizer.decode(subject.encode(" The sea is blue.")) == " The sea is blue."


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"family: expected one of llama, .*, got 'gpt2'"):
        load_subject("tiny:gpt2")
    with pytest.raises(LoadError, match=r"expected a model folder with a config\.json"):
        load_subject(str(tmp_path))


def test_a_folder_as_train_tiny_writes_it_is_read_in_bytes(tmp_path):
    load_tiny("llama").save_pretrained(tmp_path)
    subject = load_subject(str(tmp_path))
    assert isinstance(subject.form, Bytes) and subject.tokenizer is None
    assert subject.fingerprint == load_subject("tiny:llama").fingerprint
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="transformers could not load it"):
        load_subject(str(tmp_path))


@pytest.mark.parametrize("opens", [True, False])
def test_a_tokenizer_opens_prompts_as_it_opens_texts(tmp_path, opens):
    words = Tokenizer(models.WordLevel({"<s>": 0, "?": 1, "a": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if opens:
        words.post_processor = processors.TemplateProcessing(single="<s> $A ?", special_tokens=[("<s>", 0), ("?", 1)])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    subject = load_subject(str(tmp_path))
    assert isinstance(subject.form, Sentences) and list(subject.form.opening) == ([0] if opens else [])
    assert subject.encode("a b") == [2, 1]


def test_other_weights_have_another_fingerprint():
    subjects = [load_subject("tiny:llama") for _ in range(3)]
    subjects[1].model.load_state_dict(tiny_model("llama").state_dict())
    first, second, third = (each.fingerprint for each in subjects)
    assert first == third != second
