"""Write a store as a parquet table, a row for each rollout, and read rewards from such a table.

The table has all of a rollout but its routes. Other programs can write new rewards and advantages
into it; `from_parquet` writes a new store that has the old rollouts with these numbers.

Shape suffixes (docs/glossary.md): C, N, V.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.collect.reward import checked_reward
from megatron_r3.collect.writing import new_store, writing
from megatron_r3.data.store import Rollout, RolloutStore, StoreError, write_shard
from megatron_r3.data.store.shard import Shard
from megatron_r3.data.whole_file import whole_file
from megatron_r3.replay.words import one_line

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as missing:  # an optional dependency: training does not need it
    raise ValueError("parquet needs pyarrow: pip install 'megatron-r3[parquet]'") from missing

KEY = ("policy_version", "group", "sample")  # the columns that say which rollout a row is
ROWS = 1024  # rows that are read at a time
# of a rollout: old reward, new reward, old advantage, new advantage
_Scores = tuple[float, float, float | None, float | None]


# the type to which each column that is read is cast
_TYPES = {
    **dict.fromkeys(KEY, pa.int64()),
    **dict.fromkeys(("reward", "advantage"), pa.float64()),
    "tokens": pa.list_(pa.int32()),
}


def to_parquet(directory: Path, path: Path) -> int:
    """Write the table, whole or not at all; returns the number of its rollouts.

    Raises:
        StoreError: the store is damaged, or the table cannot be written.
    """
    store = RolloutStore([directory], mixed_policies=True)
    with writing(path):
        schema, first = _schema(store), 0
        with whole_file(path) as file, pq.ParquetWriter(file, schema) as writer:
            for shard in store.shards:
                rows = [_row(store, shard, i, first + i) for i in range(shard.num_rollouts)]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                first += shard.num_rollouts
    return len(store)


def _schema(store: RolloutStore) -> pa.Schema:
    """The columns; optional ones come last, and only if some rollout has a value for them."""
    names = (*KEY, "prompt_digest", "num_tokens", "prompt_length")
    columns: dict[str, pa.DataType] = {
        **dict.fromkeys(names, pa.int64()),
        "reward": pa.float32(),
        "tokens": pa.list_(pa.int32()),
        "response": pa.list_(pa.bool_()),
        "logprobs": pa.list_(pa.float32()),
        "recorded": pa.list_(pa.bool_()),
        "turns": pa.list_(pa.list_(pa.int32(), 2)),
        **dict.fromkeys(("shard", "engine", "engine_version", "model"), pa.string()),
    }
    if not np.isnan(store.index.columns["advantage"]).all():
        columns["advantage"] = pa.float32()
    if store.column("num_versions").any():
        columns["versions"] = pa.list_(pa.list_(pa.int64(), 2))
    if store.column("num_kept").any():
        columns |= dict.fromkeys(("kept_sizes", "kept_ids"), pa.list_(pa.int32()))
    return pa.schema(columns)


def _row(store: RolloutStore, shard: Shard, index: int, rollout: int) -> dict[str, Any]:
    fields, kept = store.fields(rollout), store.kept(rollout)
    versions_C2 = shard.versions_C2(index)
    return {
        **{name: int(shard.tensors[name][index]) for name in (*KEY, "prompt_digest", "num_tokens")},
        # argmax of booleans is the first True
        "prompt_length": int(np.argmax(fields["response"])),
        "reward": float(shard.tensors["reward"][index]),
        **fields,
        "turns": shard.turns(index).tolist(),
        "shard": shard.path.name,
        "engine": shard.info.engine,
        "engine_version": shard.info.engine_version,
        "model": shard.info.model,
        # pyarrow drops these values if the schema has no such columns
        "advantage": shard.advantage(index),
        "versions": None if versions_C2 is None else versions_C2.tolist(),
        "kept_sizes": None if kept is None else kept.sizes_N,
        "kept_ids": None if kept is None else kept.ids_V,
    }


def from_parquet(path: Path, directory: Path, out: Path) -> int:
    """Write a new store, the old one with the table's rewards; returns how many rewards changed.

    A row is found by its `policy_version`, `group` and `sample`, so rows may come in any order. If
    the table has `tokens`, they must be those of the store. If the store has advantages, the table
    must have a column `advantage`, because the advantages in the store belong to the old rewards.
    Null stands for no advantage.

    Raises:
        StoreError: the table cannot be read or has columns of other types; a rollout has no row, a
            row has no rollout, two rows name one rollout or a row has other tokens; a group has new
            rewards and only old advantages; `out` exists already or cannot be written.
        RewardError: a reward or an advantage is no finite number.
    """
    store = RolloutStore([directory], mixed_policies=True)
    rows = _rows(path, store, directory)
    first, groups = 0, defaultdict[tuple[int, int], list[_Scores]](list)
    with new_store(out) as folder:
        for shard in store.shards:
            numbers = range(first, first + shard.num_rollouts)
            first += shard.num_rollouts
            old = [store.rollout(i) for i in numbers]
            new = [
                _rewarded(rollout, rows, store.name(i), path)
                for rollout, i in zip(old, numbers, strict=True)
            ]
            for a, b in zip(old, new, strict=True):
                scores = a.reward, b.reward, a.advantage, b.advantage
                groups[a.policy_version, a.group].append(scores)
            with writing(out):
                write_shard(folder, shard.info, new)
        return sum(_changed(scores, *group, path) for group, scores in groups.items())


def _changed(scores: list[_Scores], version: int, group: int, path: Path) -> int:
    """How many rewards of a group changed."""
    changed = [(before, after) for old, new, before, after in scores if old != new]
    # An advantage of 0 may stay if all new rewards of the group are equal.
    spread = len({new for _, new, _, _ in scores}) > 1
    had = any(before or (spread and before is not None) for before, _ in changed)
    if had and all(before == after for before, after in changed):
        raise StoreError(
            f"{path}: {len(changed)} rewards of policy version {version}, group {group} changed "
            "and none of their advantages, which belong to the old rewards: put new advantages "
            "into the column advantage, or nulls, so that training makes them from the rewards"
        )
    return len(changed)


def _rows(
    path: Path, store: RolloutStore, directory: Path
) -> dict[tuple[int, ...], dict[str, Any]]:
    """The rows by (policy version, group, sample), each with its number in the table.

    A file of a kilobyte can hold a billion rows that are all the same. So reading ends at the first
    row of a rollout that is not in the store or has had a row before.
    """
    known = set(zip(*(store.column(name).tolist() for name in KEY), strict=True))
    has_advantages = not np.isnan(store.index.columns["advantage"]).all()
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    for number, row in enumerate(_read(path, has_advantages)):
        for name in KEY:
            if row[name] is None:
                raise StoreError(f"{path}: row {number} has no {name}")
        key = tuple(row[name] for name in KEY)
        if key not in known:
            raise StoreError(f"{path}: row {number}: {directory} has no rollout {_text(key)}")
        if key in rows:
            raise StoreError(f"{path}: rows {rows[key]['row']} and {number} are both {_text(key)}")
        rows[key] = {**row, "row": number}
    return rows


def _read(path: Path, has_advantages: bool) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            there = file.schema_arrow.names
            missing = [name for name in (*KEY, "reward") if name not in there]
            if missing:
                raise StoreError(f"{path}: no column {', '.join(missing)}")
            if has_advantages and "advantage" not in there:
                raise StoreError(
                    f"{path}: no column advantage: the store's advantages belong to the old "
                    "rewards; add a column advantage with new ones, or with nulls"
                )
            schema = pa.schema({name: kind for name, kind in _TYPES.items() if name in there})
            for batch in file.iter_batches(ROWS, columns=schema.names):
                table = pa.Table.from_batches([batch]).select(schema.names)
                yield from table.cast(schema).to_pylist()
    except StoreError:
        raise
    except Exception as error:  # pyarrow raises many kinds: OSError, KeyError, OverflowError
        reason = one_line(str(error), 300)
        raise StoreError(f"{path}: not readable as a table of rollouts ({reason})") from error


def _rewarded(
    rollout: Rollout, rows: dict[tuple[int, ...], dict[str, Any]], where: str, path: Path
) -> Rollout:
    """The rollout with the reward and advantage of its row; the row is removed from `rows`."""
    key = (rollout.policy_version, rollout.group, rollout.sample)
    row = rows.pop(key, None)
    if row is None:
        raise StoreError(
            f"{path}: no row for {where}, which is {_text(key)}, or two rollouts of the store have "
            "these three numbers"
        )
    if "tokens" in row and not np.array_equal(row["tokens"], rollout.tokens_N):
        raise StoreError(f"{path}: row {row['row']}, {_text(key)}, has other tokens than {where}")
    reward = checked_reward(row["reward"], f"{path}: row {row['row']}, {_text(key)}, has reward")
    # float32, as the store holds it: otherwise .1 would count as a change of the stored .1
    return replace(rollout, reward=float(np.float32(reward)), advantage=_advantage(row, path, key))


def _advantage(row: dict[str, Any], path: Path, key: Sequence[int]) -> float | None:
    given = row.get("advantage")
    if given is None:
        return None
    where = f"{path}: row {row['row']}, {_text(key)}, has advantage"
    return float(np.float32(checked_reward(given, where)))


def _text(key: Sequence[int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(KEY, key, strict=True))
