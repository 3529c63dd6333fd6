"""`hf-sparse-prr generate`: answer from a long text with dense, serial sparse and PRR decoding, side by side."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
import typer
from rich.console import Console

from hf_sparse_prr import SparseConfig, patch_model
from hf_sparse_prr.commands.arguments import check_device
from hf_sparse_prr.commands.show import as_document, as_tables
from hf_sparse_prr.commands.terminal import (
    EXIT_DIFFERENT,
    EXIT_FETCH,
    EXIT_MODEL,
    EXIT_USAGE,
    Bar,
    CommandError,
    one_line_errors,
)
from hf_sparse_prr.demo.compare import compare
from hf_sparse_prr.demo.loading import LoadError, load_model
from hf_sparse_prr.demo.passkey import PASSKEY, passkey_prompt
from hf_sparse_prr.demo.progress import Progress
from hf_sparse_prr.demo.prompt import decode, text_prompt
from hf_sparse_prr.demo.smollm2 import FetchError, ensure_smollm2

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO_CONTEXT = 4096


class Dtype(str, Enum):
    """The number formats a model can be run in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def generate(
    model: Annotated[
        Path | None, typer.Option(help="A model folder or a .gguf file.", show_default="SmolLM2-135M-Instruct")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text file to answer from.", show_default="a text with a passkey in it")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What to ask about --file; the model continues it.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send --file and --prompt in the model's chat form.")] = False,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens at most.")] = 32,
    budget: Annotated[int, typer.Option(help="Tokens attended per KV head and step.")] = 1024,
    selector: Annotated[str, typer.Option(help="How blocks are scored: quest or infllm_v2; auto is quest.")] = "auto",
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a block: 16, 32, 64 or 128.", show_default="auto")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens: a text is cut to it.", show_default=str(DEMO_CONTEXT))
    ] = None,
    depth: Annotated[float, typer.Option(min=0.0, max=1.0, help="Where in the own text the passkey is.")] = 0.25,
    dtype: Annotated[Dtype, typer.Option(help="The model's number format.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Answer from a long text three times over one prefill: dense, serial sparse and PRR decoding.

    Exit codes: 0 done, 1 serial and PRR tokens differ (a bug), 2 wrong argument or file, 3 the model cannot be loaded
    or is not supported, 4 the default model could not be fetched, 130 stopped.
    """
    out, notes = Console(), Console(stderr=True)
    with one_line_errors(notes):
        text = _read(file, prompt, chat)
        settings = _settings(budget, block_size, selector)
        with Bar(notes) as bar:
            loaded, tokenizer = _load(model, dtype, device, settings, bar)
            limit = _limit(loaded, context, tokens)
            passkey = None
            if text is None:
                ids, passkey = _own_prompt(tokenizer, min(context or DEMO_CONTEXT, limit), depth)
            else:
                ids, cut = _text_prompt(tokenizer, text, prompt or "", limit, chat)
                if cut:
                    notes.print(f"the text's last {cut} tokens are cut: the prompt may have {limit}")
            result = compare(loaded, ids, tokens, settings, bar)
    texts = [decode(tokenizer, run.ids) for run in result.runs]
    if as_json:
        print(json.dumps(as_document(result, texts, passkey), indent=2))
    else:
        as_tables(out, result, texts, passkey)
    if not result.identical:
        raise typer.Exit(EXIT_DIFFERENT)


def _read(file: Path | None, prompt: str | None, chat: bool) -> str | None:
    """Return the user's text, None where the command is to use its own."""
    if file is None:
        if prompt is not None or chat:
            raise CommandError("expected a text in --file for --prompt and --chat, got none", EXIT_USAGE)
        return None
    if prompt is None:
        raise CommandError("expected a --prompt: what to ask about --file", EXIT_USAGE)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--file: expected a UTF-8 text file, got {file}: {error}", EXIT_USAGE) from error


def _settings(budget: int, block_size: int | None, selector: str) -> dict[str, Any]:
    """Return the SparseConfig fields that were asked for, checked before anything slow starts."""
    settings: dict[str, Any] = {"budget": budget, "selector": selector}
    if block_size is not None:
        settings["block_size"] = block_size
    try:
        SparseConfig(**settings)
    except ValueError as error:
        raise CommandError(error, EXIT_USAGE) from error
    return settings


def _load(
    path: Path | None, dtype: Dtype, device: str, settings: dict[str, Any], progress: Progress
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model, fetching the default one on first use, and see that it can be patched."""
    check_device(device)
    try:
        path = ensure_smollm2(progress) if path is None else path
        progress(f"loading {path.name}", 0, None)
        model, tokenizer = load_model(path, getattr(torch, dtype.value))
        cast(Any, model).to(device)
    except FetchError as error:
        raise CommandError(error, EXIT_FETCH) from error
    except LoadError as error:
        raise CommandError(error, EXIT_MODEL) from error
    try:
        with patch_model(model, **settings):
            return model, tokenizer
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CommandError(error, EXIT_MODEL) from error


def _limit(model: PreTrainedModel, context: int | None, new_tokens: int) -> int:
    """Return how many tokens the prompt may have: what was asked for, within the model's positions."""
    positions: int = model.config.get_text_config().max_position_embeddings
    room = positions - new_tokens
    if room < 1 or (context or 0) > room:
        raise CommandError(
            f"expected --context and --tokens within the model's {positions} positions, "
            f"got {context or 'no'} context and {new_tokens} new tokens",
            EXIT_USAGE,
        )
    return context or room


def _own_prompt(tokenizer: PreTrainedTokenizerBase, length: int, depth: float) -> tuple[torch.Tensor, str]:
    try:
        return passkey_prompt(tokenizer, length, depth), PASSKEY
    except ValueError as error:
        raise CommandError(error, EXIT_USAGE) from error


def _text_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, question: str, limit: int, chat: bool
) -> tuple[torch.Tensor, int]:
    try:
        return text_prompt(tokenizer, text, question, limit, chat)
    except ValueError as error:
        raise CommandError(error, EXIT_USAGE) from error
