"""Some prompts of a run with answers and rewards: of its first and of its last collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_r3.data.store import RolloutStore
from megatron_r3.loop.report import Run
from megatron_r3.loop.report_numbers import number
from megatron_r3.replay.words import one_line

SHOWN = 4  # of a collection, from different prompts
_MOST = 400  # letters of a prompt and of an answer


def samples(runs: Sequence[Run]) -> list[tuple[str, str, list[list[str]]]]:
    """Of each run whose rollouts are there: its name, why they cannot be read, rows of a table."""
    found = []
    for run in runs:
        try:
            error, rows = "", _rows(run)
        except (OSError, ValueError) as wrong:  # a page is of use without them
            error, rows = str(wrong), []
        if error or rows:
            found.append((run.name, error, rows))
    return found


def _rows(run: Run) -> list[list[str]]:
    folder = run.directory / "rollouts"
    sizes = {event["collection"]: event["rollouts"] for event in run.of("collected")}
    if not sizes or not folder.is_dir():
        return []
    store, words = RolloutStore([folder], mixed_policies=True), _words(run.directory)
    rewards = store.column("reward")
    rows = []
    for collection in sorted({0, max(sizes)} & sizes.keys()):
        size = sizes[collection]
        first = np.arange(0, size, max(size // SHOWN, 1))[:SHOWN] + collection * size
        for index in first[first < len(store)].tolist():
            fields = store.fields(index)
            tokens, start = fields["tokens"].tolist(), int(fields["response"].argmax())
            texts = (one_line(words(ids), _MOST) for ids in (tokens[:start], tokens[start:]))
            rows.append([str(collection), *texts, number(float(rewards[index]))])
    return rows


def _words(directory: Path) -> Callable[[list[int]], str]:
    """How tokens are shown: as text if the policy has a tokenizer, as ids if not."""
    files = sorted(directory.glob("policies/v[0-9]*[0-9]/tokenizer.json"))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        files = []
    if not files:
        return lambda ids: " ".join(map(str, ids))
    tokenizer = Tokenizer.from_file(str(files[-1]))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))
