"""A store and a table of its rollouts: everything but the routes, a row a rollout.

What has one number a rollout, its reward, can come back: to score rollouts again elsewhere.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.rollouts.fresh import new_store
from megatron_r3.rollouts.reward import checked_reward
from megatron_r3.store import Rollout, RolloutStore, StoreError, write_shard
from megatron_r3.store.shard import Shard

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as missing:  # an extra: training does not need it
    raise ValueError("parquet takes pyarrow: pip install 'megatron-r3[parquet]'") from missing

__all__ = ["from_parquet", "to_parquet"]

KEY = ("policy_version", "group", "sample")
ROWS = 1024  # read at a time


def to_parquet(directory: Path, path: Path) -> int:
    """Write the table, whole or not at all; returns how many rollouts it has.

    Raises:
        StoreError: the store is damaged.
    """
    store = RolloutStore([directory], mixed_policies=True)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    os.close(descriptor)
    try:
        with pq.ParquetWriter(name, _schema()) as writer:
            first = 0
            for shard in store.shards:
                rows = [_row(store, shard, i, first + i) for i in range(shard.num_rollouts)]
                writer.write_table(pa.Table.from_pylist(rows, schema=_schema()))
                first += shard.num_rollouts
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return len(store)


def _schema() -> pa.Schema:
    columns = (*KEY, "prompt_digest", "num_tokens", "prompt_length")
    numbers = [(name, pa.int64()) for name in columns]
    texts = [(name, pa.string()) for name in ("shard", "engine", "engine_version", "model")]
    lists = [("tokens", pa.int32()), ("response", pa.bool_()), ("logprobs", pa.float32())]
    return pa.schema(
        [
            *numbers,
            ("reward", pa.float32()),
            *((name, pa.list_(kind)) for name, kind in lists),
            ("recorded", pa.list_(pa.bool_())),
            ("turns", pa.list_(pa.list_(pa.int32(), 2))),
            *texts,
        ]
    )


def _row(store: RolloutStore, shard: Shard, index: int, rollout: int) -> dict[str, Any]:
    fields = store.fields(rollout)
    return {
        **{name: int(shard.tensors[name][index]) for name in (*KEY, "prompt_digest", "num_tokens")},
        "prompt_length": int(np.argmax(fields["response"])),
        "reward": float(shard.tensors["reward"][index]),
        **fields,
        "turns": shard.turns(index).tolist(),
        "shard": shard.path.name,
        "engine": shard.info.engine,
        "engine_version": shard.info.engine_version,
        "model": shard.info.model,
    }


def from_parquet(path: Path, directory: Path, out: Path) -> int:
    """Write a new store, the old one with the table's rewards; returns how many changed.

    Rows are found by `policy_version`, `group` and `sample`, in any order; where the table has
    `tokens`, they must be the store's.

    Raises:
        StoreError: a rollout without a row, a row without a rollout, two of one name, other tokens.
        RewardError: a reward that is no finite number.
    """
    store = RolloutStore([directory], mixed_policies=True)
    rows = _rows(path)
    changed = first = 0
    with new_store(out) as folder:
        for shard in store.shards:
            numbers = range(first, first + shard.num_rollouts)
            first += shard.num_rollouts
            old = [store.rollout(i) for i in numbers]
            new = [
                _rewarded(one, rows, store.name(i), path)
                for one, i in zip(old, numbers, strict=True)
            ]
            changed += sum(a.reward != b.reward for a, b in zip(old, new, strict=True))
            write_shard(folder, shard.info, new)
        if rows:
            raise StoreError(f"{path}: {directory} has no rollout {_text(next(iter(rows)))}")
    return changed


def _rows(path: Path) -> dict[tuple[int, ...], dict[str, Any]]:
    """The rows by name, each with its number."""
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for number, row in enumerate(_read(path)):
        key = tuple(row[name] for name in KEY)
        if key in rows:
            raise StoreError(f"{path}: rows {rows[key]['row']} and {number} are both {_text(key)}")
        rows[key] = {**row, "row": number}
    return rows


def _read(path: Path) -> Iterator[dict[str, Any]]:
    wanted = [*KEY, "reward"]
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in wanted if name not in names]
            if missing:
                raise StoreError(f"{path}: no column {', '.join(missing)}")
            wanted += ["tokens"] if "tokens" in names else []
            for batch in file.iter_batches(ROWS, columns=wanted):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path}: not a readable parquet file ({error})") from error


def _rewarded(
    rollout: Rollout, rows: dict[tuple[int, ...], dict[str, Any]], where: str, path: Path
) -> Rollout:
    """The rollout with its row's reward; the row is taken out."""
    key = (rollout.policy_version, rollout.group, rollout.sample)
    row = rows.pop(key, None)
    if row is None:
        raise StoreError(f"{path}: no row for {where}: {_text(key)}; or two rollouts of that name")
    if "tokens" in row and not np.array_equal(row["tokens"], rollout.tokens_N):
        raise StoreError(f"{path}: row {row['row']}, {_text(key)}, has other tokens than {where}")
    reward = checked_reward(row["reward"], f"{path}: row {row['row']}, {_text(key)}, has reward")
    return replace(rollout, reward=float(np.float32(reward)))


def _text(key: Sequence[int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(KEY, key, strict=True))
