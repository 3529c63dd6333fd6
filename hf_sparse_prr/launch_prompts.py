"""The prompts of a launch: a JSON Lines file whose lines are found by number, read one at a time and checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_sparse_prr.demo.prompt import encode_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WANTED = 'an object with "prompt" (text) or "messages" (a chat)'


class BadLine(ValueError):
    """A line that holds no prompt; the message says what was expected."""


class PromptFile:
    """Where each line begins, so that no process holds all prompts: of 128K tokens each, a thousand are gigabytes.

    Attributes:
        lines: numbers, from 1, of the lines that aren't blank.
        sha256: of the whole file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offsets: dict[int, int] = {}
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets[number] = offset
                digest.update(line)
                offset += len(line)
        self.lines = list(self._offsets)
        self.sha256 = digest.hexdigest()

    def read(self, number: int) -> dict[str, Any]:
        """The record of a line: "prompt" or "messages", maybe an "id", and whatever else it has. Raises BadLine."""
        with self.path.open("rb") as file:
            file.seek(self._offsets[number])
            line = file.readline()
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:  # JSON can escape half a character
            raise BadLine(f"expected Unicode text, got {_short(line)} ({error.reason})") from error
        except (ValueError, RecursionError) as error:  # not UTF-8, or not JSON, which has no NaN, or too deep
            raise BadLine(f"expected JSON, got {_short(line)} ({error})") from error
        if not isinstance(record, dict):
            raise BadLine(f"expected {WANTED}, got {_short(line)}")
        prompt, messages = record.get("prompt"), record.get("messages")
        if (prompt is None) == (messages is None):
            raise BadLine(f"expected {WANTED}, got {'neither' if prompt is None else 'both'}")
        if prompt is not None and not isinstance(prompt, str):
            raise BadLine(f'expected "prompt" to be text, got {type(prompt).__name__}')
        if messages is not None:
            _check_messages(messages)
        return record

    def id_of(self, number: int) -> dict[str, Any]:
        """The "id" that an answer to the line carries; nothing where it has none, or is no prompt."""
        try:
            record = self.read(number)
        except BadLine:
            return {}
        return {"id": record["id"]} if "id" in record else {}


def encode(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of a record's prompt; a chat goes through the tokenizer's chat template. Raises BadLine."""
    if "messages" in record and record["messages"] is not None:
        if not tokenizer.chat_template:
            raise BadLine('"messages": expected a tokenizer with a chat template, got one without')
        ids = encode_chat(tokenizer, record["messages"])
    else:
        ids = list(tokenizer(record["prompt"]).input_ids)
    if not ids:
        raise BadLine("expected a prompt of at least one token, got none")
    return ids


def _check_messages(messages: Any) -> None:
    wanted = '"messages" to be a list of {"role": text, "content": text}'
    if not isinstance(messages, list) or not messages:
        raise BadLine(f"expected {wanted}, got {_short(json.dumps(messages).encode())}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise BadLine(f"expected {wanted}, got one that is {_short(json.dumps(message).encode())}")


def _short(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return repr(text if len(text) <= 40 else text[:37] + "...")
