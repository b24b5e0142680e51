"""What one process has found in a store, in columns, so that it can tell all others.

A job of 1,024 ranks has one look at a store's directory and at the heads of its shards. The others
get this index, and make a shard of it when they ask for one: no file is opened for that.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from megatron_r3.data.store.extras import newest_versions
from megatron_r3.data.store.files import shard_name, shard_number
from megatron_r3.data.store.header import PER_ROLLOUT, read_info
from megatron_r3.data.store.schema import StoreInfo
from megatron_r3.data.store.shard import Shard
from megatron_r3.data.store.shard_file import Known, LaterLooks

# what a shard has once
_SHARD = np.dtype(
    [
        *(("folder", "i4"), ("number", "i8"), ("size", "i8"), ("mtime_ns", "i8")),
        *(("identity", "S16"), ("info", "i4"), ("version", "i4"), ("has_parts", "?")),
        *(("recorded_rows", "i8"), ("rollouts", "i8")),
    ]
)
# What a rollout has once, and what stands there for rollouts of a shard that lacks it.
_COLUMNS: dict[str, tuple[type, float]] = {
    **dict.fromkeys((*PER_ROLLOUT, "prompt_digest", "num_kept", "num_versions"), (np.int64, 0)),
    "reward": (np.float32, 0),
    "advantage": (np.float32, np.nan),
}
# tensors of any length, how many of them a rollout has, and their type; each is a pair of numbers
_RAGGED = {"turns": ("num_turns", np.int32), "versions": ("num_versions", np.int64)}


@dataclass(frozen=True)
class Index:
    """All shards of a store.

    Attributes:
        directories: of the store, as they were named.
        resolved: the same without symbolic links, so that two names of one directory are equal.
        infos: the different infos that its shards have.
        table: a record of each shard; `folder` and `info` are places in the two above.
        columns: by name, the tensors of all shards that have a value for each rollout, one shard
            behind the other. `newest_version` and, where somebody has asked, `groups` are worked
            out from them.
    """

    directories: tuple[str, ...]
    resolved: tuple[str, ...]
    infos: tuple[StoreInfo, ...]
    table: np.ndarray
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, directories: Sequence[Path], shards: Sequence[Shard]) -> Index:
        """The index of shards that this process has looked at."""
        table, places = np.zeros(len(shards), _SHARD), dict[StoreInfo, int]()
        folders = {folder: place for place, folder in enumerate(directories)}
        known = [shard.known for shard in shards]
        table["folder"] = [folders[shard.path.parent] for shard in shards]
        table["number"] = [shard_number(shard.path) for shard in shards]
        table["info"] = [places.setdefault(one.info, len(places)) for one in known]
        table["rollouts"] = [shard.num_rollouts for shard in shards]
        for name in ("size", "mtime_ns", "identity", "version", "has_parts", "recorded_rows"):
            table[name] = [getattr(one, name) for one in known]
        memories = [one.memory for one in known]
        columns = {
            name: _joined([_column(memory, name) for memory in memories], dtype)
            for name, (dtype, _) in _COLUMNS.items()
        }
        for name, (_, dtype) in _RAGGED.items():
            none = np.zeros(0, dtype)
            columns[name] = _joined([memory.get(name, none) for memory in memories], dtype)
        columns["newest_version"] = newest_versions(columns)
        resolved = tuple(str(folder.resolve()) for folder in directories)
        return cls(tuple(map(str, directories)), resolved, (*places,), table, columns)

    def plus(self, other: Index) -> Index:
        """These shards, and those of another index of the same directories behind them."""
        infos = {info: place for place, info in enumerate(self.infos)}
        places = [infos.setdefault(info, len(infos)) for info in other.infos]
        table = np.concatenate([self.table, other.table])
        table["info"][len(self.table) :] = np.array(places, np.int32)[other.table["info"]]
        columns = {
            name: np.concatenate([mine, other.columns[name]])
            for name, mine in self.columns.items()
            if name != "groups"
        }
        return Index(self.directories, self.resolved, (*infos,), table, columns)

    def packed(self) -> bytes:
        """The index without Python objects in it, for a channel that others could write to.

        What `pickle` reads can run code; this cannot.
        """
        infos = [info.stored for info in self.infos]
        texts = json.dumps([self.directories, self.resolved, infos]).encode()
        buffer = io.BytesIO()
        columns: dict[str, Any] = {**self.columns, "table": self.table}
        np.savez(buffer, texts=np.frombuffer(texts, np.uint8), **columns)
        return buffer.getvalue()

    @classmethod
    def unpacked(cls, data: bytes) -> Index:
        """The index that was packed into these bytes.

        Raises:
            ValueError: it is none.
        """
        columns = dict(np.load(io.BytesIO(data), allow_pickle=False))
        texts, table = columns.pop("texts"), columns.pop("table")
        directories, resolved, infos = json.loads(texts.tobytes())
        known = tuple(read_info(info, "an index") for info in infos)
        return cls(tuple(directories), tuple(resolved), known, table, columns)

    def groups(self) -> np.ndarray:
        """One number for each rollout, the same for rollouts of one prompt: int64 `[M]`.

        The group numbers of a store count inside one directory and policy version. Two collections
        may both begin at 0, so directory, version and group together say which prompt it was.
        """
        if "groups" not in self.columns:
            folder_M = np.repeat(self.table["folder"], self.table["rollouts"])
            keys = folder_M, self.columns["policy_version"], self.columns["group"]
            self.columns["groups"] = numbered(*keys)
        return self.columns["groups"]

    def has_namesakes(self) -> bool:
        """Whether two rollouts of one directory have the same version, group and sample."""
        folder_M = np.repeat(self.table["folder"], self.table["rollouts"])
        names = [folder_M, *(self.columns[n] for n in ("policy_version", "group", "sample"))]
        return int(numbered(*names).max(initial=-1)) + 1 < len(folder_M)

    def names(self) -> list[str]:
        """The name of each shard's file."""
        return [shard_name(number) for number in self.table["number"].tolist()]

    def identities(self, count: int | None = None) -> list[str]:
        """The identities of the first `count` shards; None for all of them."""
        identities: list[str] = np.char.decode(self.table["identity"][:count]).tolist()
        return identities

    def first_rollout(self) -> np.ndarray:
        """`[shards + 1]`, the index of each shard's first rollout; last, how many there are."""
        return np.concatenate([[0], np.cumsum(self.table["rollouts"])])

    def first_row(self) -> np.ndarray:
        """`[shards + 1]`, the id of each shard's first row; last, how many rows there are."""
        row_M = np.concatenate([[0], np.cumsum(self.columns["num_tokens"] - 1)])
        return row_M[self.first_rollout()]


def numbered(*keys: np.ndarray) -> np.ndarray:
    """One number for each different tuple of keys, in the order of the tuples: int64 `[M]`.

    Example: the keys `3 1 3` and `0 5 0` are the tuples (3, 0) (1, 5) (3, 0), and `1 0 1`.
    """
    order = np.lexsort(keys[::-1])
    changes = np.zeros(len(order), bool)
    for key in keys:
        changes[1:] |= np.diff(key[order]) != 0
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(changes)
    return found


def _column(memory: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name in memory:
        return memory[name]
    return np.full(len(memory["num_tokens"]), _COLUMNS[name][1], _COLUMNS[name][0])


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """The parts one behind the other; nothing, of this type, where there are none."""
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


class KnownShards(Sequence[Shard]):
    """The shards of an index, each made when it is asked for, and opened when it is read.

    Args:
        index: of these shards.
        looks: see ShardFile.
        made: shards that this process has already, by their place; it is kept and filled.
    """

    def __init__(
        self, index: Index, looks: LaterLooks | None = None, made: dict[int, Shard] | None = None
    ) -> None:
        self.known, self.looks = index, looks
        self._made: dict[int, Shard] = {} if made is None else made
        self._folders = [Path(folder) for folder in index.directories]
        self.first_rollout, self.first_row = index.first_rollout(), index.first_row()
        # where the pairs of each shard begin in a ragged tensor
        self._first_pair = {
            name: 2 * np.concatenate([[0], np.cumsum(index.columns[count])])[self.first_rollout]
            for name, (count, _) in _RAGGED.items()
        }

    def plus(self, index: Index, opened: Sequence[Shard] = ()) -> KnownShards:
        """These shards and more.

        Args:
            index: of those that come behind these.
            opened: the first of the same, as many of them as this process has looked at.
        """
        if self.looks is not None:
            for shard in opened:
                shard.look_later(self.looks)
        # One dict for both: what a thread opens in the shorter one meanwhile is in the longer one.
        self._made.update(enumerate(opened, len(self)))
        return KnownShards(self.known.plus(index), self.looks, self._made)

    def look_later(self, looks: LaterLooks) -> None:
        """Note in `looks` which files are read from now on, in the place of looking at them."""
        self.looks = looks
        for shard in self._made.values():
            shard.look_later(looks)

    def __reduce__(self) -> Any:
        """Another process gets the index, and opens what it reads."""
        return KnownShards, (self.known, self.looks)

    def __len__(self) -> int:
        return len(self.known.table)

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Shard]: ...
    def __getitem__(self, number: int | slice) -> Shard | Sequence[Shard]:
        """One shard or several."""
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        place = range(len(self))[number]
        if place not in self._made:
            self._made.setdefault(place, self._make(place))
        return self._made[place]

    def __iter__(self) -> Iterator[Shard]:
        return (self[place] for place in range(len(self)))

    def _make(self, place: int) -> Shard:
        index = self.known
        (folder, number, size, mtime_ns, identity, info, version, has_parts, recorded_rows, _) = (
            index.table[place].item()
        )
        rollouts = slice(*self.first_rollout[place : place + 2].tolist())
        memory = {name: index.columns[name][rollouts] for name in _COLUMNS}
        for name, first in self._first_pair.items():
            memory[name] = index.columns[name][slice(*first[place : place + 2].tolist())]
        known = Known(
            *(size, mtime_ns, identity.decode(), version, has_parts, recorded_rows),
            *(index.infos[info], memory),
        )
        shard = Shard(self._folders[folder] / shard_name(number), known)
        if self.looks is not None:
            shard.look_later(self.looks)
        return shard
