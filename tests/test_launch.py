"""A file of prompts over several processes: in order, once each, through kills and Ctrl-C."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from models import greedy
from texts import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse_prr import launch, patch_model
from hf_sparse_prr.launch_answers import Answers, RunError

pytestmark = [
    pytest.mark.compat,
    pytest.mark.xdist_group("sharded"),  # one launch at a time
    pytest.mark.skipif(
        torch.get_default_device().type == "cuda", reason="computes on a CPU; on GPUs: test_two_gpus.py"
    ),
]
SETTINGS = dict(budget=96, block_size=16, speculate=True)
TOKENS, LONG = 30, 150
BAD = {2: "not JSON", 4: '["a list"]', 5: '{"id": 5}', 6: '{"prompt": 6}', 8: json.dumps({"prompt": "sea " * 3000})}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"), chat=True)


def texts(many=8):
    return [f"The sea is blue. Off we go. {index} " * (4 + 7 * (index % 4)) for index in range(many)]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Blank lines don't count, but have a number."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [json.dumps({"id": f"q{index}", "prompt": text}) for index, text in enumerate(texts())]
    path.write_text("\n\n".join(records) + "\n")
    return path


def options(llama, prompts, out, *more, tokens=TOKENS):
    given = (
        "--model",
        llama,
        "--prompts",
        prompts,
        "--out",
        out,
        "--tokens",
        tokens,
        "--budget",
        96,
        "--block-size",
        16,
    )
    return [str(part) for part in (*given, "--speculate", "--cpu", *more)]


def start(folder, *arguments):
    """Two gloo processes, a session of their own. Not in the repository: -m would find its sources first."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    return subprocess.Popen(
        [*command, "hf_sparse_prr.launch", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=folder,
    )


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path):
    """All of the records that doesn't depend on who answers, and when. Another number of threads rounds the shares."""
    varies = ("process", "seconds", "first_token_seconds")
    found = [{key: value for key, value in record.items() if key not in varies} for record in records(path)]
    for record in found:
        if (share := record["stats"]["hit_rate_weighted"]) is not None:
            record["stats"]["hit_rate_weighted"] = round(share, 5)
    return found


@pytest.fixture(scope="module")
def alone(llama, prompts, tmp_path_factory):
    """The answers of one process."""
    out = tmp_path_factory.mktemp("alone") / "answers.jsonl"
    assert launch.main(options(llama, prompts, out)) == 0
    return out


def test_answers_are_those_of_generate(llama, alone):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(llama), AutoTokenizer.from_pretrained(llama)
    handle = patch_model(model, **SETTINGS)
    found = records(alone)
    assert [record["line"] for record in found] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert [record["id"] for record in found] == [f"q{index}" for index in range(8)]
    for record, text in zip(found, texts(), strict=True):
        ids = torch.tensor([tokenizer(text).input_ids])
        handle.reset_stats()
        new = greedy(model, ids, TOKENS)[0].tolist()
        assert record["ids"] == new and record["text"] == tokenizer.decode(new)
        assert record["stats"] == {name: handle.stats()[name] for name in launch.STATISTICS}
        assert (record["prompt_tokens"], record["new_tokens"]) == (ids.shape[1], TOKENS)
        assert 0 < record["first_token_seconds"] < record["seconds"]
    assert any(record["stats"]["selector_calls"] for record in found)
    assert not all(record["stats"]["selector_calls"] for record in found)  # a row that fits its budget


def test_a_finished_run_is_left_as_it_is(llama, prompts, alone, capsys):
    before = alone.stat()
    assert launch.main(options(llama, prompts, alone)) == 0
    assert "all 8 prompts are answered already" in capsys.readouterr().err
    assert alone.stat() == before
    assert sorted(path.name for path in alone.parent.iterdir()) == ["answers.jsonl", "answers.jsonl.run.json"]
    assert json.loads(alone.with_name("answers.jsonl.run.json").read_text())["totals"]["now"] == 8


def test_two_processes_answer_as_one(llama, prompts, alone, tmp_path):
    """Also when they sample: a seed belongs to a line, not to a process."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    process = start(tmp_path, *options(llama, prompts, two, "--seed", 7))
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert launch.main(options(llama, prompts, one, "--seed", 7)) == 0
    assert [record["ids"] for record in records(one)] != [record["ids"] for record in records(alone)]
    assert answers(two) == answers(one)
    assert {record["process"] for record in records(two)} == {0, 1}
    assert errors.count("8/8") >= 1 and "two.jsonl: 8 answers, 0 bad lines" in errors


@pytest.fixture(scope="module")
def long(llama, prompts, tmp_path_factory):
    """The answers of one process, long enough to be interrupted."""
    out = tmp_path_factory.mktemp("long") / "answers.jsonl"
    assert launch.main(options(llama, prompts, out, tokens=LONG)) == 0
    return out


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_a_run_goes_on_where_it_was_stopped(sent, llama, prompts, long, tmp_path, capsys):
    out = tmp_path / "answers.jsonl"
    asked = options(llama, prompts, out, tokens=LONG)
    process, parts = start(tmp_path, *asked), tmp_path / "answers.jsonl.parts"
    deadline = time.monotonic() + 90
    while sum(part.read_bytes().count(b"\n") for part in parts.glob("*.jsonl")) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    if sent == signal.SIGKILL:
        psutil.Process(process.pid).children()[0].kill()  # one process is gone, and the launcher ends the other
    else:
        process.send_signal(sent)  # to the launcher, whose processes have sessions of their own
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert not out.exists()
    if sent == signal.SIGINT:
        assert "stopped; the same command goes on from here" in errors
    kept = {record["line"]: record for part in parts.glob("*.jsonl") for record in records(part)}
    assert 2 <= len(kept) < 8

    with next(parts.glob("*.jsonl")).open("ab") as file:
        file.write(b'{"line": 15, "ids": [1, 2')  # as a power cut leaves it
    assert launch.main(asked) == 0
    assert f"{len(kept)} of 8 prompts were answered before" in capsys.readouterr().err
    found = records(out)
    assert [record["line"] for record in found] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert all(record["new_tokens"] == LONG for record in found)
    assert all(kept.get(record["line"], record) == record for record in found), "an answer was computed again"
    assert answers(out) == answers(long)
    assert not parts.exists()


@pytest.fixture
def spoiled(tmp_path):
    """Lines 1, 3, 7 are good, 3 is a chat."""
    lines = {1: json.dumps({"prompt": "The sea"}), 7: json.dumps({"prompt": "The sand", "id": None}), **BAD}
    lines[3] = json.dumps({"messages": [{"role": "user", "content": "Is the sea blue?"}]})
    path = tmp_path / "spoiled.jsonl"
    path.write_text("\n".join(lines[number] for number in range(1, 9)) + "\n")
    return path


def test_bad_lines_are_named_and_fatal(llama, spoiled, tmp_path, capsys):
    assert launch.main(options(llama, spoiled, tmp_path / "a.jsonl")) == launch.EXIT_USAGE
    error = capsys.readouterr().err
    for words in (
        "line 2: expected JSON, got 'not JSON'",
        'line 4: expected an object with "prompt" (text) or "messages" (a chat), got \'["a list"]\'',
        'line 5: expected an object with "prompt" (text) or "messages" (a chat), got neither',
        'line 6: expected "prompt" to be text, got int',
    ):
        assert words in error
    assert "line 8" not in error  # only a tokenizer can tell
    spoiled.write_text(BAD[8])
    assert launch.main(options(llama, spoiled, tmp_path / "b.jsonl")) == launch.EXIT_USAGE
    assert "line 1: expected at most 994 tokens before 30 new ones, got" in capsys.readouterr().err


def test_bad_lines_are_skipped_by_choice(llama, spoiled, tmp_path, capsys):
    out = tmp_path / "a.jsonl"
    assert launch.main(options(llama, spoiled, out, "--bad-lines", "skip")) == 0
    assert "a.jsonl: 3 answers, 5 bad lines" in capsys.readouterr().err
    found = records(out)
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record["line"] for record in found if "error" in record] == [*BAD]
    assert "id" not in found[0] and found[6]["id"] is None
    asked = AutoTokenizer.from_pretrained(llama)("[user] Is the sea blue?[assistant]")
    assert found[2]["prompt_tokens"] == len(asked.input_ids)


@pytest.mark.parametrize(
    "line, words",
    [
        (b"\xff\xfe\xfd", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b'{"prompt": "a", "id": NaN}', "expected JSON"),
        (b'{"prompt": "a", "id": 1e999}', "expected JSON"),
        (b'{"prompt": "\\ud800"}', "expected Unicode text"),
        (b'{"prompt": ""}', "expected a prompt of at least one token, got none"),
        (b'{"prompt": "a", "messages": []}', "got both"),
        (b'{"messages": []}', 'expected "messages" to be a list'),
        (b'{"messages": [{"role": "user"}]}', 'expected "messages" to be a list'),
    ],
)
def test_what_no_prompt_is(line, words, llama, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_bytes(line)
    assert launch.main(options(llama, tmp_path / "p.jsonl", tmp_path / "a.jsonl")) == launch.EXIT_USAGE
    assert "line 1: " in (error := capsys.readouterr().err) and words in error


def test_a_line_that_was_refused_may_be_mended(llama, tmp_path, capsys):
    asked = options(llama, tmp_path / "p.jsonl", tmp_path / "a.jsonl", tokens=2)
    (tmp_path / "p.jsonl").write_text("no prompt")
    assert launch.main(asked) == launch.EXIT_USAGE
    (tmp_path / "p.jsonl").write_text('{"prompt": "The sea"}')
    assert launch.main(asked) == 0, capsys.readouterr().err
    assert [record["line"] for record in records(tmp_path / "a.jsonl")] == [1]


def test_a_damaged_answer_is_named(tmp_path):
    held = Answers(tmp_path / "a.jsonl", {"run": {}})
    assert not held.begin()
    (held.parts / "0-x.jsonl").write_bytes(b'{"line": 1}\n\0\0\n')
    with pytest.raises(RunError, match=r"expected answers in .*0-x.jsonl, got b'\\x00\\x00'; remove that line"):
        held.done()


def test_a_full_disk_is_one_line_and_the_run_goes_on(llama, prompts, alone, tmp_path, capsys, monkeypatch):
    asked, write = options(llama, prompts, tmp_path / "a.jsonl"), os.write

    def nearly_full(file, data):
        if b'"line": 5' in data:
            write(file, data[:9])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", nearly_full)
        assert launch.main(asked) == launch.EXIT_USAGE
    assert "expected room for answers, got" in (error := capsys.readouterr().err) and "No space left" in error
    assert launch.main(asked) == 0
    assert answers(tmp_path / "a.jsonl") == answers(alone)


def test_answers_of_another_run_are_not_touched(llama, prompts, alone, tmp_path, capsys):
    before = alone.read_bytes()
    assert launch.main(options(llama, prompts, alone, "--seed", 3)) == launch.EXIT_USAGE
    assert "expected answers of the same run" in (error := capsys.readouterr().err) and "another seed" in error
    assert alone.read_bytes() == before
    foreign = tmp_path / "notes.jsonl"
    foreign.write_text("mine")
    assert launch.main(options(llama, prompts, foreign)) == launch.EXIT_USAGE
    assert "expected a file that isn't there yet" in capsys.readouterr().err
    assert foreign.read_text() == "mine"


def test_two_runs_at_once_are_refused(llama, prompts, tmp_path, capsys):
    parts = tmp_path / "a.jsonl.parts"
    parts.mkdir()
    with (parts / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert launch.main(options(llama, prompts, tmp_path / "a.jsonl")) == launch.EXIT_USAGE
    assert "expected no other run at work" in capsys.readouterr().err


@pytest.mark.parametrize("choice", ["skip", "fatal"])
def test_a_prompt_that_does_not_fit_the_memory(choice, llama, prompts, alone, tmp_path, capsys, monkeypatch):
    answer, out = launch._Answerer.__call__, tmp_path / "a.jsonl"

    def short_of_memory(self, line):
        if line == 5:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return answer(self, line)

    monkeypatch.setattr(launch._Answerer, "__call__", short_of_memory)
    asked = options(llama, prompts, out, "--bad-lines", choice)
    code, length = launch.main(asked), records(alone)[2]["prompt_tokens"]
    said = f"expected a prompt that fits the memory, got {length} tokens (tried to allocate 3 GiB)"
    if choice == "skip":
        assert code == 0 and "7 answers, 1 bad lines" in capsys.readouterr().err
        assert records(out)[2] == {"line": 5, "id": "q2", "error": said, "process": 0}
        return
    assert code == launch.EXIT_MODEL and not out.exists()
    assert f"process 0: line 5: {said}; --bad-lines skip goes on" in capsys.readouterr().err
    assert launch.main(options(llama, prompts, out, "--bad-lines", "skip")) == 0
    assert [record.get("error") for record in records(out)] == [None, None, said, None, None, None, None, None]


@pytest.mark.parametrize(
    "more, words",
    [
        (("--prompts", "nowhere.jsonl"), "--prompts: expected a file that can be read, got nowhere.jsonl"),
        (("--out", "."), "--out: expected a file, got ., a folder"),
        (("--budget", "16"), "budget: expected"),
        (("--config", "nowhere.json"), "--config: expected a JSON file, got nowhere.json"),
    ],
)
def test_wrong_arguments_are_one_line(more, words, llama, prompts, tmp_path, capsys):
    assert launch.main(options(llama, prompts, tmp_path / "a.jsonl", *more)) == launch.EXIT_USAGE
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_not_there(prompts, tmp_path, capsys):
    assert launch.main(options(tmp_path / "none.gguf", prompts, tmp_path / "a.jsonl")) == launch.EXIT_MODEL
    assert "no such file or folder" in capsys.readouterr().err


def test_settings_come_from_a_file_and_options_before_it(llama, prompts, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(budget=128, local_blocks=3, ema=[0.4, 0.1, 0.25])))
    out = tmp_path / "a.jsonl"
    assert launch.main(options(llama, prompts, out, "--config", config, tokens=2)) == 0
    settings = json.loads((tmp_path / "a.jsonl.run.json").read_text())["run"]["settings"]
    assert settings == dict(SETTINGS, local_blocks=3, ema=[0.4, 0.1, 0.25])


def test_accelerate_launches_it(llama, prompts, alone, tmp_path):
    """On a CPU accelerate starts one process; the parser is its own."""
    out = tmp_path / "a.jsonl"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m"]
    done = subprocess.run(
        [*command, "hf_sparse_prr.launch", *options(llama, prompts, out)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert answers(out) == answers(alone)
