"""Retrieval tasks, one small file each: `task(form, rng, length, depth=None, **counts) -> Episode`.

All that is random comes from the `random.Random` that is handed in, whose stream doesn't change with Python versions.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_sparse_prr.evidence.tasks.copying import copying
from hf_sparse_prr.evidence.tasks.episode import Episode
from hf_sparse_prr.evidence.tasks.forms import Bytes, Form, Sentences
from hf_sparse_prr.evidence.tasks.needle import (
    needle_multi_key,
    needle_multi_query,
    needle_multi_value,
    needle_single,
)
from hf_sparse_prr.evidence.tasks.passkey import passkey
from hf_sparse_prr.evidence.tasks.recall import recall
from hf_sparse_prr.evidence.tasks.tracking import tracking

__all__ = ["TASKS", "Bytes", "Episode", "Form", "Sentences"]

TASKS: dict[str, Callable[..., Episode]] = {
    task.__name__: task
    for task in (
        needle_single,
        needle_multi_key,
        needle_multi_value,
        needle_multi_query,
        tracking,
        recall,
        copying,
        passkey,
    )
}
