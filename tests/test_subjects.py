"""Models under evaluation, by name."""

import pytest

from hf_sparse_prr.demo.loading import LoadError
from hf_sparse_prr.evidence.subjects import load_subject
from hf_sparse_prr.evidence.tasks import Bytes, Sentences


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
