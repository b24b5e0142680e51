"""Some prompts of a run with answers and rewards: of its first and of its last collection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatron_r3.data.store import RolloutStore
from megatron_r3.loop.report import Run
from megatron_r3.loop.report_numbers import Group
from megatron_r3.loop.report_tables import escaped, number, table

SHOWN = 4  # of a collection, from different prompts
_MOST = 400  # letters of a prompt and of an answer
_HEAD = ("collection", "prompt", "answer", "reward")


def samples(groups: Sequence[Group]) -> str:
    """A section with a table for each run whose rollouts are there; empty without any."""
    runs = [run for group in groups for run in group.runs]
    parts = []
    for run in runs:
        try:
            rows = _rows(run)
        except (OSError, ValueError) as error:  # a page is of use without them
            parts.append(f"<p>{escaped(f'{run.name}: {error}', 500)}</p>")
            continue
        if rows:
            unfold = " open" if len(runs) == 1 else ""
            parts.append(
                f"<details{unfold}><summary>{escaped(run.name)}: the first and the last "
                f"collection</summary>{table(_HEAD, rows)}</details>"
            )
    return f"<section><h2>Prompts and answers</h2>{''.join(parts)}</section>" if parts else ""


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
            texts = (escaped(words(ids), _MOST) for ids in (tokens[:start], tokens[start:]))
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
