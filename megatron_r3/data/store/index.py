"""All shards of a store in a few arrays, so that one process can send them to all others.

In a job of 1,024 ranks, one rank lists the store's directory and reads the headers of its shards.
The others get this index, and make `Shard` objects from it without opening a file.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

import numpy as np

from megatron_r3.data.lazy import lazy
from megatron_r3.data.store.files import shard_name, shard_number
from megatron_r3.data.store.header import DTYPES, PAIRS, PER_ROLLOUT, read_info
from megatron_r3.data.store.part_sums import starts_of
from megatron_r3.data.store.schema import StoreInfo
from megatron_r3.data.store.shard import Shard, newest_versions

# the record of a shard in `Index.table`
_SHARD = np.dtype(
    [
        *(("folder", "i4"), ("number", "i8"), ("identity", "S16"), ("info", "i4")),
        *(("recorded_rows", "i8"), ("rollouts", "i8")),
    ]
)
_DTYPES = {name: DTYPES[dtype] for name, dtype in PER_ROLLOUT.items()} | {
    **{"turns": DTYPES["I32"], "versions": DTYPES["I64"]}
}


@dataclass(frozen=True, eq=False)
class Index(Sequence[Shard]):
    """All shards of a store: a `Shard` is made when it is asked for, and opened when it is read.

    Attributes:
        directories: the store's directories, as they were named.
        resolved: the paths of these directories without symbolic links.
        infos: the infos of the shards, each once.
        table: a record for each shard. `folder` is an index into `directories`, and `info` an index
            into `infos`.
        columns: by name, each tensor that has a value or pairs for each rollout, joined over all
            shards. Two more columns are computed: `newest_version`, and `groups` once the method
            `groups` was called.
        made: the `Shard` objects of this process, by the shard's place in the table.
    """

    directories: tuple[str, ...]
    resolved: tuple[str, ...]
    infos: tuple[StoreInfo, ...]
    table: np.ndarray
    columns: dict[str, np.ndarray]
    made: dict[int, Shard] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, directories: Sequence[Path], shards: Sequence[Shard]) -> Index:
        """The index of shards that this process has opened."""
        table, places = np.zeros(len(shards), _SHARD), dict[StoreInfo, int]()
        folders = {folder: place for place, folder in enumerate(directories)}
        table["folder"] = [folders[shard.path.parent] for shard in shards]
        table["number"] = [shard_number(shard.path) for shard in shards]
        table["info"] = [places.setdefault(shard.info, len(places)) for shard in shards]
        table["rollouts"] = [shard.num_rollouts for shard in shards]
        table["identity"] = [shard.identity for shard in shards]
        table["recorded_rows"] = [shard.recorded_rows for shard in shards]
        columns = {
            name: np.concatenate([np.zeros(0, dtype), *(shard.tensors[name] for shard in shards)])
            for name, dtype in _DTYPES.items()
        }
        columns["newest_version"] = newest_versions(columns)
        resolved = tuple(str(folder.resolve()) for folder in directories)
        names, made = tuple(map(str, directories)), dict(enumerate(shards))
        return cls(names, resolved, (*places,), table, columns, made)

    def __reduce__(self) -> Any:
        """Pickle all fields but `made`: another process makes its own `Shard` objects."""
        return Index, (self.directories, self.resolved, self.infos, self.table, self.columns)

    def plus(self, other: Index) -> Index:
        """These shards, then the shards of another index of the same directories.

        Both indices share one `made`. So if a thread meanwhile opens a shard through the shorter
        index, the longer index has this shard too.
        """
        infos = {info: place for place, info in enumerate(self.infos)}
        places = [infos.setdefault(info, len(infos)) for info in other.infos]
        table = np.concatenate([self.table, other.table])
        table["info"][len(self.table) :] = np.array(places, np.int32)[other.table["info"]]
        columns = {
            name: np.concatenate([mine, other.columns[name]])
            for name, mine in self.columns.items()
            if name != "groups"
        }
        self.made.update({len(self) + place: shard for place, shard in other.made.items()})
        return Index(self.directories, self.resolved, (*infos,), table, columns, self.made)

    def packed(self) -> bytes:
        """The index as bytes, for a channel that other users could write to.

        To read a pickle can run code; to read these bytes cannot.
        """
        infos = [asdict(info) for info in self.infos]
        texts = json.dumps([self.directories, self.resolved, infos]).encode()
        buffer = io.BytesIO()
        columns: dict[str, Any] = {**self.columns, "table": self.table}
        np.savez(buffer, texts=np.frombuffer(texts, np.uint8), **columns)
        return buffer.getvalue()

    @classmethod
    def unpacked(cls, data: bytes) -> Index:
        """The index that was packed into these bytes.

        Raises:
            ValueError: the JSON in the bytes is broken, or an info in it is impossible.
        """
        columns = dict(np.load(io.BytesIO(data), allow_pickle=False))
        texts, table = columns.pop("texts"), columns.pop("table")
        directories, resolved, infos = json.loads(texts.tobytes())
        known = tuple(read_info(info, "an index") for info in infos)
        return cls(tuple(directories), tuple(resolved), known, table, columns)

    # The shards

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Shard]: ...
    def __getitem__(self, number: int | slice) -> Shard | Sequence[Shard]:
        """The shard at this place of the table, or the shards of a slice."""
        if isinstance(number, slice):
            return [self[place] for place in range(*number.indices(len(self)))]
        place = range(len(self))[number]
        if place not in self.made:
            self.made.setdefault(place, self._make(place))
        return self.made[place]

    def __iter__(self) -> Iterator[Shard]:
        return (self[place] for place in range(len(self)))

    def _make(self, place: int) -> Shard:
        record = self.table[place]
        rollouts = slice(*self.first_rollout[place : place + 2].tolist())
        tensors = {name: self.columns[name][rollouts] for name in PER_ROLLOUT}
        for name, first in self._first_pair.items():
            tensors[name] = self.columns[name][slice(*first[place : place + 2].tolist())]
        folder, name = self.directories[record["folder"]], shard_name(int(record["number"]))
        return Shard(
            Path(folder) / name,
            record["identity"].decode(),
            self.infos[record["info"]],
            int(record["recorded_rows"]),
            tensors,
        )

    @lazy
    def first_rollout(self) -> np.ndarray:
        """`[shards + 1]`: the index of each shard's first rollout, then the number of rollouts."""
        return starts_of(self.table["rollouts"])

    @lazy
    def first_row(self) -> np.ndarray:
        """`[shards + 1]`: the id of each shard's first row, then the number of rows."""
        return starts_of(self.columns["num_tokens"] - 1)[self.first_rollout]

    @lazy
    def _first_pair(self) -> dict[str, np.ndarray]:
        """`[shards + 1]` each: where the pairs of each shard begin in `turns` and in `versions`."""
        starts = {name: starts_of(self.columns[count]) for name, count in PAIRS.items()}
        return {name: 2 * start_M[self.first_rollout] for name, start_M in starts.items()}

    def groups(self) -> np.ndarray:
        """A number for each rollout, int64 `[M]`; rollouts of one group have the same number.

        Two rollouts are of one group if they have the same directory, policy version and `group`:
        the `group` numbers of each directory and policy version may begin at 0.
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

    def identities(self) -> list[str]:
        """The identity of each shard."""
        identities: list[str] = np.char.decode(self.table["identity"]).tolist()
        return identities


def numbered(*keys: np.ndarray) -> np.ndarray:
    """Number the tuples of keys: int64 `[M]`; equal tuples get the same number, from 0 on.

    A larger tuple gets a larger number. Example: the keys `3 1 3` and `0 5 0` are the tuples (3, 0)
    (1, 5) (3, 0), and get `1 0 1`.
    """
    order = np.lexsort(keys[::-1])
    changes = np.zeros(len(order), bool)
    for key in keys:
        changes[1:] |= np.diff(key[order]) != 0
    found = np.empty(len(order), np.int64)
    found[order] = np.cumsum(changes)
    return found
