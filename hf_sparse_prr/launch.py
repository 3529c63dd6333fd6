"""Answer a file of prompts on every GPU, each process with a whole model.

    accelerate launch -m hf_sparse_prr.launch --model path/to/model --prompts prompts.jsonl --out answers.jsonl

Needs accelerate: pip install 'hf_sparse_prr[demo]'. Prompts are handed out one at a time, the longest first, so that no
process waits long for another; answers come in the order of the prompts. Interrupted or killed, the same command goes
on where it stopped, with as many processes as you like. `launch_answers.py` says what is written, and where.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from argparse import Namespace
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from hf_sparse_prr.demo.loading import LoadError, load_any
from hf_sparse_prr.demo.prompt import decode
from hf_sparse_prr.launch_answers import Answers, DiskError, RunError
from hf_sparse_prr.launch_arguments import UsageError, identity_of, parse, settings_of
from hf_sparse_prr.launch_processes import Bar, for_each, from_main, join, open_store
from hf_sparse_prr.launch_prompts import BadLine, PromptFile, encode
from hf_sparse_prr.patching import PatchHandle, patch_model

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXIT_USAGE, EXIT_MODEL, EXIT_STOPPED = 2, 3, 130
STATISTICS = ("selector_calls", "hit_rate", "hit_rate_weighted", "extra_rate", "repaired_blocks", "bytes_read")
SHOWN = 5  # bad lines in an error


class MemoryLimit(RuntimeError):
    """A prompt that doesn't fit the memory; the message says which."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command in this process, one of those that a launcher started, or alone. Returns the exit code.

    0 done; 2 an argument, a file or a prompt is wrong, or the disk is full; 3 the model can't be loaded, isn't
    supported, or has no memory for a prompt; 130 stopped.
    """
    asked = parse(arguments)
    state = join(asked.cpu)
    code = 0
    try:
        _run(asked, state)
    except (UsageError, RunError) as error:  # the same in every process
        code = EXIT_USAGE
        _say(state, f"error: {error}")
    except (LoadError, MemoryLimit) as error:  # maybe in this one alone
        code = EXIT_MODEL
        print(f"error: process {state.process_index}: {error}", file=sys.stderr)
    except DiskError as error:
        code = EXIT_USAGE
        print(f"error: process {state.process_index}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher sends its own after the terminal's
        code = EXIT_STOPPED
        _say(state, "stopped; the same command goes on from here")
    return code


def _say(state: PartialState, line: str) -> None:
    if state.is_main_process:
        print(line, file=sys.stderr)


def _run(asked: Namespace, state: PartialState) -> None:
    settings = settings_of(asked)
    asked.dtype = asked.dtype or ("bfloat16" if state.device.type == "cuda" else "float32")
    try:
        prompts = PromptFile(asked.prompts)
    except OSError as error:
        raise UsageError(f"--prompts: expected a file that can be read, got {asked.prompts} ({error})") from error
    answers = Answers(asked.out, {"run": identity_of(asked, prompts.sha256, settings)})
    if from_main(state, answers.begin):
        return _say(state, f"{asked.out}: all {len(prompts.lines)} prompts are answered already")

    bad = _problems(for_each(state, prompts.lines, _Check(prompts)))
    _refuse(asked, bad)  # before a model is loaded
    model, tokenizer = load_any(asked.model, getattr(torch, asked.dtype))
    cast(Any, model).to(state.device)
    check = _Check(prompts, tokenizer, asked.tokens, model.config.get_text_config().max_position_embeddings)
    lengths = for_each(state, [line for line in prompts.lines if line not in bad], check)
    bad |= _problems(lengths)
    _refuse(asked, bad)
    try:
        handle = patch_model(model, **settings)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise LoadError(str(error)) from error
    generation: Any = model.generation_config
    if generation.pad_token_id is None:  # else every call says that it takes the end of text
        ends = generation.eos_token_id
        generation.pad_token_id = ends[0] if isinstance(ends, list) else ends
    answer = _Answerer(asked, prompts, model, tokenizer, handle)
    failed = _answer_all(state, answers, prompts, bad, lengths, answer, asked.bad_lines == "fatal")
    return _say(state, f"{asked.out}: {len(prompts.lines) - failed} answers, {failed} bad lines")


def _answer_all(
    state: PartialState,
    answers: Answers,
    prompts: PromptFile,
    bad: dict[int, str],
    lengths: dict[int, Any],
    answer: _Answerer,
    fatal: bool,
) -> int:
    """Take prompts until none is left; the main process then waits for the others and joins what all wrote. Returns how
    many lines have no answer, in the main process.

    bad: what is wrong with a line.  fatal: a prompt that doesn't fit the memory ends the run, with MemoryLimit.
    """
    done, lines = from_main(state, lambda: set(answers.done())), prompts.lines
    todo = sorted(set(lines) - done, key=lambda line: (line not in bad, -lengths[line] if line not in bad else 0, line))
    if done:
        _say(state, f"{len(done)} of {len(lines)} prompts were answered before")
    store, begun = open_store(state), time.perf_counter()
    with Bar(state, store, len(done), len(lines)):
        part = answers.writer(state.process_index)
        while (turn := store.add("next", 1) - 1) < len(todo):
            line = todo[turn]
            if line not in bad:
                try:
                    record = answer(line)
                except torch.OutOfMemoryError as error:
                    bad[line] = f"expected a prompt that fits the memory, got {lengths[line]} tokens ({error})"
                    if fatal:
                        raise MemoryLimit(f"line {line}: {bad[line]}; --bad-lines skip goes on") from error
                    torch.cuda.empty_cache()
            if line in bad:
                record = {"line": line, **prompts.id_of(line), "error": bad[line]}
            part.write({**record, "process": state.process_index})
            store.add("done", 1)
        part.close()
        store.add("finished", 1)
        while state.is_main_process and store.add("finished", 0) < state.num_processes:
            time.sleep(0.05)  # in Python, where Ctrl-C is heard
    if state.is_main_process:
        took = dict(processes=state.num_processes, seconds=time.perf_counter() - begun, now=len(todo))
        return answers.finish(lines, took)
    return 0


@dataclass
class _Check:
    """Of a line: the length of its prompt in tokens, 0 without a tokenizer; what is wrong with it, as text."""

    prompts: PromptFile
    tokenizer: PreTrainedTokenizerBase | None = None
    tokens: int = 0
    positions: int = 0

    def __call__(self, line: int) -> int | str:
        try:
            record = self.prompts.read(line)
            if self.tokenizer is None:
                return 0
            length = len(encode(record, self.tokenizer))
        except BadLine as error:
            return str(error)
        if length + self.tokens > self.positions:
            return f"expected at most {self.positions - self.tokens} tokens before {self.tokens} new ones, got {length}"
        return length


def _problems(found: dict[int, int | str]) -> dict[int, str]:
    return {line: value for line, value in found.items() if isinstance(value, str)}


def _refuse(asked: Namespace, bad: dict[int, str]) -> None:
    if bad and asked.bad_lines == "fatal":
        first = "; ".join(f"line {line}: {bad[line]}" for line in sorted(bad)[:SHOWN])
        rest = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise UsageError(f"{asked.prompts}: {first}{rest}. --bad-lines skip answers the others")


@dataclass
class _Answerer:
    """Of a line: its record, all but the process."""

    asked: Namespace
    prompts: PromptFile
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    handle: PatchHandle

    def __call__(self, line: int) -> dict[str, Any]:
        record = self.prompts.read(line)
        ids = torch.tensor([encode(record, self.tokenizer)], device=self.model.device)
        options: dict[str, Any] = dict(do_sample=False)
        if self.asked.seed is not None:
            torch.manual_seed(self.asked.seed + line)  # whichever process it is that answers
            options = dict(do_sample=True)
        self.handle.reset_stats()
        clock = _Clock()
        out = cast(Any, self.model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.asked.tokens,
            num_beams=1,
            streamer=clock,
            **options,
        )
        new, stats = out[0, ids.shape[1] :].tolist(), self.handle.stats()
        return {
            "line": line,
            **self.prompts.id_of(line),
            "text": decode(self.tokenizer, new),
            "ids": new,
            "prompt_tokens": ids.shape[1],
            "new_tokens": len(new),
            "first_token_seconds": clock.times[1] - clock.times[0],
            "seconds": clock.times[-1] - clock.times[0],
            "stats": {name: stats[name] for name in STATISTICS},
        }


class _Clock:
    """A streamer that keeps the time: generate() hands it the prompt, then each token, then says that it ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # threads of gloo that outlive the interpreter have aborted a process that was done
