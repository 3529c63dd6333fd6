"""The command line: what it refuses and how, and one run of it on a tiny model."""

import copy
import json
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from models import tiny
from texts import CHAT, save_llama, tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from hf_sparse_prr import cli
from hf_sparse_prr.commands import app, generate, terminal
from hf_sparse_prr.demo.passkey import PASSKEY, island, passkey_prompt
from hf_sparse_prr.demo.prompt import text_prompt
from hf_sparse_prr.patches import INDEXED

pytestmark = pytest.mark.compat
TOO_SMALL = ["--budget", "64", "--block-size", "32"]  # two blocks, three are forced


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["generate", *(str(argument) for argument in arguments)])


def refused(result: Result, code: int, *words: str) -> None:
    """The command ended with `code` and one line on stderr that has every one of the words; stdout is empty."""
    assert result.exit_code == code, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in line for word in words), line
    assert result.stdout == ""


def test_main_names_the_remedy_without_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "typer" else object())
    with pytest.raises(SystemExit, match=r"needs typer, .*pip install 'hf_sparse_prr\[demo\]'"):
        cli.main()


def test_ctrl_c_while_it_is_imported_is_one_line_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "hf_sparse_prr.commands", Slow("commands"))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == terminal.EXIT_STOPPED
    assert capsys.readouterr().err == "stopped\n"


def test_help_lists_the_subcommand() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "generate" in result.stdout


def test_missing_text_file_is_named(llama: Path, tmp_path: Path) -> None:
    missing = tmp_path / "nothing.txt"
    refused(call("--model", llama, "--file", missing, "--prompt", "Why?"), terminal.EXIT_USAGE, "nothing.txt")


def test_text_file_of_another_encoding_is_refused(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes("Fähre".encode("latin-1"))
    refused(call("--model", llama, "--file", file, "--prompt", "Why?"), terminal.EXIT_USAGE, "UTF-8", "latin.txt")


def test_text_and_prompt_belong_together(llama: Path) -> None:
    refused(call("--model", llama, "--file", llama / "config.json"), terminal.EXIT_USAGE, "--prompt")
    refused(call("--model", llama, "--prompt", "Why?"), terminal.EXIT_USAGE, "--file")
    refused(call("--model", llama, "--chat"), terminal.EXIT_USAGE, "--file")


def test_model_that_is_not_there_is_named() -> None:
    refused(call("--model", "no/such/model"), terminal.EXIT_MODEL, "no/such/model", "config.json", ".gguf")


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04 something else")
    refused(call("--model", file), terminal.EXIT_MODEL, "GGUF")


def test_folder_without_a_config_points_at_its_gguf(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    refused(call("--model", tmp_path), terminal.EXIT_MODEL, "config.json", "weights.gguf")


def test_unsupported_model_is_refused_with_the_supported_types(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=400, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    refused(call("--model", tmp_path), terminal.EXIT_MODEL, "gpt2", "llama")


def test_settings_that_cannot_be_are_refused(llama: Path) -> None:
    refused(call("--model", llama, "--block-size", "17"), terminal.EXIT_USAGE, "block_size", "17")
    result = call("--model", llama, *TOO_SMALL)
    assert result.exit_code in (terminal.EXIT_USAGE, terminal.EXIT_MODEL)
    assert "budget" in result.stderr


def test_context_beyond_the_models_positions_is_refused(llama: Path) -> None:
    refused(call("--model", llama, "--context", 1020, "--tokens", 8), terminal.EXIT_USAGE, "1024 positions")
    refused(call("--model", llama, "--context", 5), terminal.EXIT_USAGE, "tokens: expected at least")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_device_that_is_not_there_is_refused(llama: Path) -> None:
    refused(call("--model", llama, "--device", "cuda"), terminal.EXIT_USAGE, "cuda")
    refused(call("--model", llama, "--device", "tpu"), terminal.EXIT_USAGE, "--device: expected cpu, cuda, cuda:1, ..")


def test_ctrl_c_is_one_line_and_130(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "load_model", interrupted)
    result = call("--model", llama)
    assert result.exit_code == terminal.EXIT_STOPPED
    assert "stopped" in result.stderr


def test_generate_prints_one_json_document(llama: Path) -> None:
    result = call("--model", llama, "--context", 300, "--tokens", 12, "--budget", 128, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    dense, serial, prr = document["runs"].values()
    assert document["identical"] is True
    assert document["prompt_tokens"] == 300
    assert document["passkey"] == PASSKEY
    assert serial["ids"] == prr["ids"]
    assert [len(run["ids"]) for run in (dense, serial, prr)] == [12, 12, 12]
    assert sum(layer["selector_calls"] for layer in dense["layers"]) == 0
    # One sparse layer; the prompt's last token is dense.
    assert sum(layer["selector_calls"] for layer in serial["layers"]) == 11
    assert any(layer["hit_rate"] is not None for layer in prr["layers"])


@pytest.mark.parametrize("model_type", INDEXED)
def test_generate_runs_models_with_an_indexer_beside_stock(
    model_type: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny(model_type, vocab_size=400, max_position_embeddings=1024).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = call("--model", tmp_path, "--context", 300, "--tokens", 8, "--json")
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout)["runs"]
    assert list(runs) == ["stock", "serial sparse", "PRR"]
    assert runs["stock"]["ids"] == runs["serial sparse"]["ids"] == runs["PRR"]["ids"]
    shown = call("--model", tmp_path, "--context", 300, "--tokens", 3)
    assert shown.exit_code == 0 and "serial and PRR tokens: identical" in shown.stdout


def test_generate_prints_answers_times_and_hit_rates(llama: Path) -> None:
    result = call("--model", llama, "--context", 300, "--tokens", 4, "--budget", 128)
    assert result.exit_code == 0, result.output
    for words in ("dense", "serial sparse", "PRR", "serial and PRR tokens: identical", "hit rate", "prefill", "sparse"):
        assert words in result.stdout


def test_generate_reports_differing_tokens_by_its_exit_code(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = generate.compare

    def differing(*arguments: object) -> object:
        result = real(*arguments)
        result.prr.ids[0] += 1
        return result

    monkeypatch.setattr(generate, "compare", differing)
    result = call("--model", llama, "--context", 300, "--tokens", 2, "--budget", 128)
    assert result.exit_code == terminal.EXIT_DIFFERENT
    assert "DIFFERENT" in result.stdout


def test_generate_cuts_a_long_text_and_says_so(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    file.write_text("The harbour was quiet. " * 400)
    text = ("--file", file, "--prompt", "Was it quiet?", "--context", 200)
    result = call("--model", llama, *text, "--tokens", 2, "--budget", 128, "--json")
    assert result.exit_code == 0, result.output
    assert 190 < json.loads(result.stdout)["prompt_tokens"] <= 200
    assert "are cut" in result.stderr


@pytest.mark.parametrize("tokens", [200, 301, 2000])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.75, 1.0])
def test_passkey_prompt_has_the_length_and_the_depth(
    tokenizer: PreTrainedTokenizerFast, tokens: int, depth: float
) -> None:
    ids = passkey_prompt(tokenizer, tokens, depth, passkey="90817")
    assert ids.shape == (1, tokens)
    text = tokenizer.decode(ids[0])
    assert text.endswith("The pass key is")
    before, key, _ = text.partition("The pass key is 90817.")
    assert key
    assert {letter for letter in text if letter.isdigit()} == set("90817")
    if tokens == 2000:
        assert abs(len(before) / len(text) - depth) < 0.06


def test_passkey_prompt_is_the_same_each_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert torch.equal(passkey_prompt(tokenizer, 500, 0.5), passkey_prompt(tokenizer, 500, 0.5))


def test_passkey_prompt_refuses_what_cannot_be(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="tokens: expected at least"):
        passkey_prompt(tokenizer, 10, 0.5)
    with pytest.raises(ValueError, match=r"depth: expected a number from 0 to 1, got 1\.5"):
        passkey_prompt(tokenizer, 500, 1.5)


def test_island_has_no_number() -> None:
    assert not any(letter.isdigit() for sentence in islice(island(), 100) for letter in sentence)


def test_text_prompt_keeps_the_question_whole(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "".join(islice(island(), 50))
    ids, cut = text_prompt(tokenizer, text, "Who came home?", limit=120)
    assert ids.shape[1] <= 120
    assert cut > 0
    assert tokenizer.decode(ids[0]).endswith("Who came home?")
    assert text_prompt(tokenizer, "Short.", "Who?", limit=120)[1] == 0
    with pytest.raises(ValueError, match="context: expected more than"):
        text_prompt(tokenizer, text, "Who came home?", limit=5)
    with pytest.raises(ValueError, match="chat template"):
        text_prompt(tokenizer, text, "Who came home?", limit=None, chat=True)


def test_text_prompt_in_chat_form(tokenizer: PreTrainedTokenizerFast) -> None:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = CHAT
    ids, cut = text_prompt(chatty, "The sea was calm.", "How was the sea?", limit=None, chat=True)
    assert chatty.decode(ids[0]) == "[user] The sea was calm.\n\nHow was the sea?[assistant]"
    assert cut == 0


def test_text_prompt_of_no_tokens_is_refused() -> None:
    nothing = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="prompt: expected at least one token, got none"):
        text_prompt(nothing, "a text", "a question", limit=120)
