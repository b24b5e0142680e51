"""One shard: opened, checked and read.

What each rollout has once (its reward, its lengths) is kept in memory. Tokens and routes stay in
the open file and are read where they are asked for.

Shape suffixes (docs/glossary.md): E, K, L, M, T.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.lazy import lazy
from megatron_r3.data.store.expert_load import StoredLoad
from megatron_r3.data.store.extras import Extras, optional_in_memory
from megatron_r3.data.store.files import HeldFile
from megatron_r3.data.store.header import PART_CRC32, PER_ROLLOUT, PER_TOKEN, Header, num_parts
from megatron_r3.data.store.layout import DTYPES, Entry
from megatron_r3.data.store.part_sums import AllParts, Sums
from megatron_r3.data.store.schema import StoreError, StoreInfo
from megatron_r3.data.store.shard_file import Known, LaterLooks, ShardFile
from megatron_r3.data.values import wrong_count, wrong_name, wrong_reward
from megatron_r3.replay.routes import id_dtype

# The sums of rollouts that are compared when a shard is looked at, if it has no sums of parts.
_SUMS = ("block_crc32", "kept_crc32")


class Shard:
    """A shard's tensors by name (docs/rollout-store.md), and what its store says.

    All reads are from the file that was opened, even if another file has its name by then. What is
    read is compared with its checksums; `verify_shard.py` reads all of it. A shard that another
    process has looked at is opened when something in the file is first asked for.

    Args:
        path: of the file.
        known: what another process found there; None to look at it here and now.
        late_s: see ShardFile.

    Attributes:
        known: what another process has to know of it.
        bytes_read: the bytes of routes that this process has read so far.

    Raises:
        StoreError: naming the file, and what is wrong with it.
    """

    def __init__(self, path: Path, known: Known | None = None, late_s: float = 0.0) -> None:
        self.path = path
        self.bytes_read = 0
        self._opened = ShardFile(path, known, late_s)
        self.known = self._look() if known is None else known
        if self.known.recorded_rows < 0:  # an earlier megatron-r3 did not count them
            recorded = self.tensors["recorded"]
            self.known = replace(self.known, recorded_rows=int((recorded == 1).sum()))

    @property
    def info(self) -> StoreInfo:
        """What its store says."""
        return self.known.info

    @property
    def identity(self) -> str:
        """16 hex digits that differ for shards of different content; its number is part of that."""
        return self.known.identity

    @property
    def has_blocks(self) -> bool:
        """Whether each rollout has checksums of its own, as from version 3 on."""
        return self.known.version > 2

    @property
    def _memory(self) -> Mapping[str, np.ndarray]:
        """The tensors that have a value for each rollout, by name."""
        return self.known.memory

    def _look(self) -> Known:
        """Read what each rollout has once, and check it."""
        header, file = self.header, self.file
        has_parts = header.version > 2 and PART_CRC32 in header.entries
        names, summed = ["turns", *PER_ROLLOUT], list[str]()
        if header.version > 2:
            names += ["prompt_digest", *optional_in_memory(header)]
            summed = [name for name in _SUMS if name in header.tensors and not has_parts]
        memory = {name: read_tensor(file, header.entries[name]) for name in names}
        tensors = memory | {name: read_tensor(file, header.entries[name]) for name in summed}
        for name, tensor in tensors.items():
            if zlib_ng.crc32(tensor.data) != header.crc32[name]:
                file.check_unchanged()
                raise file.damaged(f"checksum of {name!r}")
        if not has_parts:
            file.check_unchanged()
        memory.setdefault("prompt_digest", np.zeros(len(memory["num_tokens"]), np.int64))
        assert file.mtime_ns is not None
        self.known = Known(
            *(file.size, file.mtime_ns, header.identity, header.version, has_parts),
            *(-1 if header.recorded_rows is None else header.recorded_rows, header.info, memory),
        )
        self._check_rollouts()
        self.extras.check_counts()
        if has_parts:
            self._check_number_of_parts()
        file.forget_begin()
        return self.known

    def _check_number_of_parts(self) -> None:
        """Refuse sums of parts that are more or fewer than the rollouts need."""
        columns = len(self.header.info.moe_layers) + len(PER_TOKEN)
        wanted = int(num_parts(self._memory["num_tokens"]).sum()) * columns
        got = self.header.entries[PART_CRC32].shape[0]
        if got != wanted:
            raise StoreError(
                f"{self.path}: {PART_CRC32} has {got} sums; its rollouts and layers need {wanted}"
            )

    def look_later(self, looks: LaterLooks) -> None:
        """Note in `looks` that the file was read, from now on, in the place of looking at it."""
        self._opened.looks = looks

    def after_read(self) -> None:
        """See `ShardFile.after_read`."""
        self._opened.after_read()

    @property
    def file(self) -> HeldFile:
        """The shard's file, opened by now."""
        return self._opened.file

    @property
    def header(self) -> Header:
        """The shard's header; the file is opened by now."""
        return self._opened.header

    @lazy
    def token_start_M(self) -> np.ndarray:
        """`[M + 1]`, where each rollout's tokens begin, and where the last one's end."""
        return _starts(self._memory["num_tokens"])

    @lazy
    def row_start_M(self) -> np.ndarray:
        """`[M + 1]`, where each rollout's rows begin, and where the last one's end."""
        return _starts(self._memory["num_tokens"] - 1)

    @lazy
    def turn_start_M(self) -> np.ndarray:
        """`[M + 1]`, where each rollout's turns begin, and where the last one's end."""
        return _starts(self._memory["num_turns"])

    @lazy
    def extras(self) -> Extras:
        """What only some rollouts have."""
        return Extras(self._opened, self._memory, self.token_start_M)

    @lazy
    def load(self) -> StoredLoad:
        """How many rows take each expert, as the shard says."""
        return StoredLoad(self._opened, self.row_start_M)

    @lazy
    def sums(self) -> Sums:
        """The checksums of its rollouts."""
        layers, num_tokens_M = len(self.info.moe_layers), self._memory["num_tokens"]
        return Sums(self._opened, layers, num_tokens_M, self.has_blocks, self.known.has_parts)

    def all_parts(self) -> AllParts | None:
        """The sums of all its parts, to verify them; None where it has none."""
        if not self.known.has_parts:
            return None
        return AllParts(self._opened, self.sums, len(self.info.moe_layers))

    def __reduce__(self) -> Any:
        """Let another process open the file when it reads it, and find the same file there."""
        return Shard, (self.path, self.known)

    def _check_rollouts(self) -> None:
        """Refuse impossible counts, names and rewards."""
        entries = self.header.entries
        for count, least, total in (
            ("num_tokens", 2, entries["tokens"].shape[0]),
            ("num_turns", 0, entries["turns"].shape[0] // 2),
        ):
            if wrong := wrong_count(self._memory[count], least, total):
                raise StoreError(f"{self.path}: {count}: {wrong}")
        memory = self._memory
        names = ("policy_version", "sample", "prompt_digest")
        if min(memory[name].min() for name in names) >= 0 and np.isfinite(memory["reward"]).all():
            return  # nothing below can be wrong; it says which rollout is
        columns = ("reward", "policy_version", "group", "sample", "prompt_digest")
        values = zip(*(self._memory[name].tolist() for name in columns), strict=True)
        for rollout, (reward, version, group, sample, digest) in enumerate(values):
            where = f"{self.path}: rollout {rollout}"
            if wrong := wrong_reward(reward):
                raise StoreError(f"{where}: reward {reward}: {wrong}")
            if wrong := wrong_name(version, group, sample):
                raise StoreError(f"{where}: {wrong}")
            if digest < 0:
                raise StoreError(f"{where}: prompt_digest must not be negative")

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """All tensors but the routes; those of PER_TOKEN are read when they are asked for."""
        return _Tensors(self, self._memory)

    @property
    def num_rollouts(self) -> int:
        """How many rollouts, M."""
        return len(self._memory["num_tokens"])

    @property
    def num_rows(self) -> int:
        """How many rows of routes all rollouts have together, T."""
        return int(self.row_start_M[-1])

    @property
    def dtype(self) -> np.dtype:
        """The type of an expert id."""
        return id_dtype(self.info.num_experts)

    def locate_token(self, token: int) -> tuple[int, int]:
        """The rollout of a token of this shard, and the token's place in it."""
        return _locate(self.token_start_M, token)

    def locate_row(self, row: int) -> tuple[int, int]:
        """The rollout of a row of this shard, and the row's token in it."""
        return _locate(self.row_start_M, row)

    def turns(self, rollout: int) -> np.ndarray:
        """First token and end of each of a rollout's turns, int32 `[U, 2]`."""
        bounds = slice(2 * self.turn_start_M[rollout], 2 * self.turn_start_M[rollout + 1])
        return self._memory["turns"][bounds].reshape(-1, 2).copy()

    # Reading

    def expert_load(self) -> np.ndarray:
        """How many recorded rows of each rollout take each expert, int64 `[M, L, E]`.

        No route is read, but in a shard whose writer did not count them.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        load_MLE = self.load.read()
        if load_MLE is not None:
            return load_MLE
        recorded_T = self.tensors["recorded"].astype(bool)
        loads = [
            self.load.of_layer(layer, self.read_routes_whole(layer)[0], recorded_T)
            for layer in range(len(self.info.moe_layers))
        ]
        return np.stack(loads, axis=1)

    def _starts(self, name: str) -> np.ndarray:
        """Where each rollout begins in a tensor of PER_TOKEN: `recorded` has rows, not tokens."""
        return self.row_start_M if name == "recorded" else self.token_start_M

    def read_per_token(self, name: str) -> np.ndarray:
        """One of the tensors PER_TOKEN, each rollout's part compared with its checksum.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        tensor = read_tensor(self.file, self.header.entries[name])
        self.after_read()
        self.sums.compare_whole(name, 0, 0, tensor, self._starts(name).tolist())
        return tensor

    def read_tokens(self, rollout: int) -> dict[str, np.ndarray]:
        """tokens, response, logprobs `[N]` and recorded `[N - 1]` of a rollout, as stored.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        parts = {}
        for name in PER_TOKEN:
            begin, end = self._starts(name)[rollout : rollout + 2].tolist()
            entry = self.header.entries[name]
            part: np.ndarray = np.empty(end - begin, DTYPES[entry.dtype])
            self.file.read(part, entry.begin + begin * part.itemsize)
            parts[name] = part
        self.after_read()
        self.sums.compare_tokens(rollout, parts)
        return parts

    def read_recorded(self, rows_T: np.ndarray) -> np.ndarray:
        """Whether the engine returned routes for these rows, bool `[T]`; see `read_routes`."""
        return self._read_rows("recorded", rows_T, [0], 1)[0, :, 0].astype(bool)

    def read_routes(self, rows_T: np.ndarray, layers: Sequence[int]) -> np.ndarray:
        """The routes `[len(layers), T, K]` of some rows, compared with their checksums.

        These bytes are read, and at most the rest of the 64 rows at each end of a run of rows.

        Args:
            rows_T: ascending, without repeats.
            layers: indices into `info.moe_layers`.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        return self._read_rows("routes", rows_T, layers, self.info.topk)

    def read_routes_whole(self, layer: int) -> np.ndarray:
        """All routes of a layer, `[1, T, K]`, compared with the sums of whole rollouts.

        A sum of a whole rollout costs a tenth of the sums of its parts.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        ids_LTK = self._room("routes", [layer], self.num_rows, self.info.topk)
        self.file.read(ids_LTK, self.header.entries["routes"].begin + layer * ids_LTK.nbytes)
        self.bytes_read += ids_LTK.nbytes
        self.after_read()
        self.sums.compare_whole("routes", layer, 0, ids_LTK[0], self.row_start_M.tolist())
        return ids_LTK

    def _read_rows(
        self, name: str, rows_T: np.ndarray, layers: Sequence[int], items: int
    ) -> np.ndarray:
        """`[len(layers), T, items]` of a tensor that has rows; one read for each run of rows.

        Example: of the rows 4 5 6 9 10 the runs are 4 5 6 and 9 10. If rollout 1 has the rows 4 5
        and rollout 2 the rows 6 7 8, then the rows 7 and 8 are read too, since they are in one part
        with row 6, whose sum is compared.
        """
        entry, read = self.header.entries[name], self._room(name, layers, len(rows_T), items)
        if not len(rows_T) or not len(layers):  # a chunk without MoE layers needs no routes
            return read
        cuts = (np.flatnonzero(np.diff(rows_T) != 1) + 1).tolist()
        found = []
        for start, end in pairwise([0, *cuts, len(rows_T)]):
            first, last = int(rows_T[start]), int(rows_T[end - 1]) + 1
            begin, stop = self.sums.widened(first, last)
            exactly = (begin, stop) == (first, last)
            into = read[:, start:end] if exactly else self._room(name, layers, stop - begin, items)
            for index, layer in enumerate(layers):
                row = layer * self.num_rows + begin
                self.file.read(into[index], entry.begin + row * items * read.itemsize)
            if name == "routes":
                self.bytes_read += into.nbytes
            found.append((begin, into))
            if not exactly:
                read[:, start:end] = into[:, first - begin : last - begin]
        self.after_read()
        for begin, into in found:
            self.sums.compare_rows(name, layers, begin, into)
        return read

    def _room(self, name: str, layers: Sequence[int], rows: int, items: int) -> np.ndarray:
        return np.empty((len(layers), rows, items), DTYPES[self.header.entries[name].dtype])


def read_tensor(file: HeldFile, entry: Entry) -> np.ndarray:
    """A tensor as it lies in the file; the caller compares its checksum."""
    tensor: np.ndarray = np.empty(entry.shape, DTYPES[entry.dtype])
    file.read(tensor, entry.begin)
    return tensor


class _Tensors(Mapping[str, np.ndarray]):
    """A shard's tensors by name: in memory, or read when they are asked for."""

    def __init__(self, shard: Shard, in_memory: Mapping[str, np.ndarray]) -> None:
        self.shard, self.in_memory = shard, in_memory

    def __getitem__(self, name: str) -> np.ndarray:
        return self.shard.read_per_token(name) if name in PER_TOKEN else self.in_memory[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.in_memory, *PER_TOKEN])

    def __len__(self) -> int:
        return len(self.in_memory) + len(PER_TOKEN)


def _starts(counts_M: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts_M)])


def _locate(start_M: np.ndarray, place: int) -> tuple[int, int]:
    rollout = int(np.searchsorted(start_M, place, side="right")) - 1
    return rollout, place - int(start_M[rollout])
