"""One shard: opened, checked and read.

What a rollout has once (its reward, its lengths) is kept in memory. Tokens, routes and kept sets
stay in the open file, and are compared with their checksums when they are read.

In a job, one process reads the headers of a store's shards, and sends all other processes what it
found (`index.py`). Another process opens a shard only when it reads rows of the shard. It then
compares the identity of the header in the file with the identity that it was sent.

Shape suffixes (docs/glossary.md): C, K, L, M, N, P, T, V.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.lazy import lazy
from megatron_r3.data.store.files import HeldFile
from megatron_r3.data.store.header import (
    DTYPES,
    IN_MEMORY,
    KEPT_SUMS,
    PAIRS,
    PART_TOKENS,
    PER_TOKEN,
    ROUTE_SUMS,
    TOKEN_SUMS,
    Header,
    read_header,
)
from megatron_r3.data.store.part_sums import (
    RECORDED,
    PartSums,
    kept_sums,
    locate,
    part_sums,
    read_tensor,
    runs,
    starts_of,
    whole_sums,
)
from megatron_r3.data.store.schema import StoreError, StoreInfo
from megatron_r3.data.values import wrong_count
from megatron_r3.replay.routes import id_dtype

# How many seconds later than the first rank this machine may see a file. An NFS client caches a
# directory for at most 60 s (acdirmax, by default).
LATE_S = 60.0


class Shard:
    """A shard with a header that was read and checked, by this process (`Shard.look`) or another.

    All reads are from the file that was opened, even if another file has the name by then.

    Args:
        path: the file's path; the file is opened when something in it is first needed.
        identity: see `Header`; shards of different content have different identities.
        info: what all rollouts of the store share.
        recorded_rows: how many rows of the shard have routes.
        tensors: by name, the tensors that have a value or pairs for each rollout
            (docs/rollout-store.md).

    Attributes:
        bytes_read: the bytes of routes that this process has read so far.
    """

    def __init__(
        self,
        path: Path,
        identity: str,
        info: StoreInfo,
        recorded_rows: int,
        tensors: Mapping[str, np.ndarray],
    ) -> None:
        self.path, self.identity, self.info = path, identity, info
        self.recorded_rows, self.tensors, self.bytes_read = recorded_rows, tensors, 0
        self._opened: tuple[HeldFile, Header] | None = None

    @classmethod
    def look(cls, path: Path, late_s: float = 0.0) -> Shard:
        """Open a shard; read and check its header, and what each rollout has once.

        Args:
            late_s: how many seconds to wait for a file that is not there.

        Raises:
            StoreError: naming the file, and what is wrong with it.
        """
        file = HeldFile(path, late_s)
        header = read_header(file)
        tensors = {}
        for name in IN_MEMORY:
            tensors[name], fits = read_tensor(file, header, name)
            if not fits:
                raise file.damaged(f"checksum of {name!r}")
        shard = cls(path, header.identity, header.info, header.recorded_rows, tensors)
        shard._opened = file, header
        shard._check_counts()
        shard._check_values()
        return shard

    def __reduce__(self) -> Any:
        """Pickle the arguments of `Shard` alone: another process opens the file itself."""
        return Shard, (self.path, self.identity, self.info, self.recorded_rows, self.tensors)

    def _check_counts(self) -> None:
        """Refuse counts that do not divide the tensors among the rollouts."""
        entries, tensors = self.header.entries, self.tensors
        kept = "kept_ids" in entries
        for count, least, total in (
            ("num_tokens", 2, entries["tokens"].shape[0]),
            *((count, 0, entries[name].shape[0] // 2) for name, count in PAIRS.items()),
            ("num_kept", 0, entries["kept_ids"].shape[0] if kept else 0),
        ):
            if wrong := wrong_count(tensors[count], least, total):
                raise StoreError(f"{self.path}: {count}: {wrong}")
        if kept and not tensors["num_kept"].any():
            raise StoreError(f"{self.path}: has tensors of kept sets, but no rollout has kept ids")
        got, parts = entries[TOKEN_SUMS].shape[0], int(self.sums.part_start_M[-1])
        if got != parts:
            raise StoreError(f"{self.path}: has sums of {got} parts; its rollouts have {parts}")

    def _check_values(self) -> None:
        """Refuse impossible names, rewards and advantages."""
        tensors = self.tensors
        names = ("policy_version", "sample", "prompt_digest")
        for name, wrong_M, rule in (
            *((name, tensors[name] < 0, "must be a whole number from 0 on") for name in names),
            ("reward", ~np.isfinite(tensors["reward"]), "a reward is finite"),
            ("advantage", np.isinf(tensors["advantage"]), "must be finite, or NaN for none"),
        ):
            for rollout in np.flatnonzero(wrong_M)[:1].tolist():
                value = tensors[name][rollout]
                raise StoreError(f"{self.path}: rollout {rollout}: {name} {value}: {rule}")

    @property
    def file(self) -> HeldFile:
        """The file, which stays open from now on.

        Raises:
            StoreError: the file cannot be opened, or is not the file that `Shard.look` has read.
        """
        return self._open()[0]

    @property
    def header(self) -> Header:
        """The header, read and checked.

        Raises:
            StoreError: as `file`.
        """
        return self._open()[1]

    def _open(self) -> tuple[HeldFile, Header]:
        # There is no lock. If two threads are here at once, both open the file, and one of the two
        # files is closed again. With a lock, a process that is forked while another thread holds
        # the lock would hang.
        if self._opened is None:
            file = HeldFile(self.path, LATE_S)
            try:
                header = read_header(file)
            except StoreError as error:
                raise self._another() from error
            if header.identity != self.identity:
                raise self._another()
            self._opened = file, header
        return self._opened

    def _another(self) -> StoreError:
        return StoreError(
            f"{self.path}: was changed or replaced since the first rank looked at it, or is another"
            " file on this node: put the old file back, and start again"
        )

    # What each rollout has once

    @property
    def num_rollouts(self) -> int:
        """How many rollouts, M."""
        return len(self.tensors["num_tokens"])

    @property
    def num_rows(self) -> int:
        """How many rows of routes all rollouts have together, T."""
        return int(self.row_start_M[-1])

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the stored expert ids."""
        return id_dtype(self.info.num_experts)

    @lazy
    def sums(self) -> PartSums:
        """Compares what is read with the sums of parts; the first use opens the file."""
        return PartSums(self.file, self.header, self.tensors["num_tokens"])

    @lazy
    def token_start_M(self) -> np.ndarray:
        """`[M + 1]`: where each rollout's tokens begin, then the number of all tokens."""
        return starts_of(self.tensors["num_tokens"])

    @lazy
    def row_start_M(self) -> np.ndarray:
        """`[M + 1]`: where each rollout's rows begin, then the number of all rows."""
        return starts_of(self.tensors["num_tokens"] - 1)

    @lazy
    def kept_start_M(self) -> np.ndarray:
        """`[M + 1]`: where each rollout's kept ids begin, then the number of all kept ids."""
        return starts_of(self.tensors["num_kept"])

    @lazy
    def pair_start_M(self) -> Mapping[str, np.ndarray]:
        """For `turns` and `versions`, `[M + 1]`: how many pairs lie before each rollout's pairs."""
        return {name: starts_of(self.tensors[count]) for name, count in PAIRS.items()}

    def locate_row(self, row: int) -> tuple[int, int]:
        """The rollout of a row of this shard, and the row's token in it."""
        return locate(self.row_start_M, row)

    def turns(self, rollout: int) -> np.ndarray:
        """First token and end of each turn of a rollout, int32 `[U, 2]`."""
        return self._pairs("turns", rollout)

    def versions_C2(self, rollout: int) -> np.ndarray | None:
        """First token and version of each version span, int64; None if one policy sampled all."""
        spans_C2 = self._pairs("versions", rollout)
        return spans_C2 if len(spans_C2) else None

    def _pairs(self, name: str, rollout: int) -> np.ndarray:
        begin, end = (2 * self.pair_start_M[name][rollout : rollout + 2]).tolist()
        return self.tensors[name][begin:end].reshape(-1, 2).copy()

    @lazy
    def newest_version_M(self) -> np.ndarray:
        """See `newest_versions`."""
        return newest_versions(self.tensors)

    def advantages_M(self) -> np.ndarray:
        """The advantage of each rollout, float32 `[M]`.

        Raises:
            StoreError: a rollout has none; the message names the file and the rollout.
        """
        advantage_M = self.tensors["advantage"]
        for rollout in np.flatnonzero(np.isnan(advantage_M))[:1]:
            raise StoreError(
                f"{self.path}: rollout {rollout} has no advantage: give every rollout of "
                "the store one, or leave out --rollouts-advantages stored"
            )
        return advantage_M

    def advantage(self, rollout: int) -> float | None:
        """The advantage of a rollout; None if it has none."""
        value = float(self.tensors["advantage"][rollout])
        return None if np.isnan(value) else value

    # Reading. Each of these methods but `read_layers` raises a StoreError if what it reads is
    # damaged, or was changed since the file was opened.

    def read_tensor(self, name: str) -> np.ndarray:
        """A whole tensor, compared with its checksum.

        If a tensor with a value for each token is damaged, the error names the rollout.
        """
        tensor, fits = read_tensor(self.file, self.header, name)
        if not fits:
            if name in PER_TOKEN:
                self.sums.compare_whole(name, tensor[None], self.read_tensor(TOKEN_SUMS))
            raise self.file.damaged(f"checksum of {name!r}")
        return tensor

    def read_tokens(self, rollout: int) -> dict[str, np.ndarray]:
        """A rollout's `tokens`, `response` and `logprobs`, `[N]` each; `recorded`, `[N - 1]`."""
        found, sums = {}, []
        for name in PER_TOKEN:
            rows = name == "recorded"
            start_M = self.row_start_M if rows else self.token_start_M
            found[name] = self._read_slice(name, *start_M[rollout : rollout + 2].tolist())
            num_tokens = int(self.tensors["num_tokens"][rollout])
            sums.append(part_sums(found[name][None], num_tokens)[0])
        self.sums.compare(TOKEN_SUMS, range(len(PER_TOKEN)), self._parts(rollout), np.stack(sums))
        return found

    def kept(self, rollout: int) -> KeptSets | None:
        """The kept sets of a rollout's tokens; None if it has none."""
        if not self.kept_start_M[-1]:
            return None
        sizes_N = self._read_slice("kept_sizes", *self.token_start_M[rollout:][:2].tolist())
        ids_V = self._read_slice("kept_ids", *self.kept_start_M[rollout:][:2].tolist())
        kept = KeptSets(sizes_N, ids_V)
        self.sums.compare(KEPT_SUMS, [0, 1], self._parts(rollout), kept_sums(kept))
        if not len(ids_V) and sizes_N.any():
            raise StoreError(
                f"{self.path}: rollout {rollout}: its kept_sizes are not all 0, but it has no "
                "kept_ids"
            )
        return kept if len(ids_V) else None

    def parts_of(self, rows_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts that hold these rows, and the place of each row in these parts.

        Each part has 64 places. Example: the rows 70 3 130 70 of the first rollout are in the parts
        0 1 2, at the places 70 3 130 70. The rows 70 130 70 are in the parts 1 2, at the places
        6 66 6.

        Args:
            rows_T: rows of this shard, int64, in any order.

        Returns:
            The parts, ascending, int64 `[P]`, and the places, int64 `[T]`.
        """
        rollout_T = self.row_start_M.searchsorted(rows_T, side="right") - 1
        row_T = rows_T - self.row_start_M[rollout_T]
        nth_T = row_T // PART_TOKENS  # which part of its rollout
        part_T = self.sums.part_start_M[rollout_T] + nth_T
        parts_P = np.flatnonzero(np.bincount(part_T))
        return parts_P, row_T + (parts_P.searchsorted(part_T) - nth_T) * PART_TOKENS

    def read_parts(
        self,
        parts_P: np.ndarray,
        layers: Sequence[int],
        ids_LTK: np.ndarray,
        recorded_T: np.ndarray,
    ) -> None:
        """Read the routes of some parts, and compare them with their sums.

        Args:
            parts_P: the parts, as `parts_of` returns them.
            layers: indices into `info.moe_layers`.
            ids_LTK: gets the routes `[len(layers), 64 P, K]`; a place without a row gets zeros.
            recorded_T: gets the same rows of `recorded`, uint8 `[64 P]`.
        """
        file, sums, starts = self.file, self.sums, self.row_start_M
        routes, recorded = (self.header.entries[name].begin for name in ("routes", "recorded"))
        row_bytes = self.info.topk * self.dtype.itemsize
        layer_bytes = self.num_rows * row_bytes
        rollout_P = sums.part_start_M.searchsorted(parts_P, side="right") - 1
        begin_P = starts[rollout_P] + (parts_P - sums.part_start_M[rollout_P]) * PART_TOKENS
        # each run has parts of one rollout, which follow each other in the file
        for start, end in runs(parts_P + rollout_P):
            begin, stop = int(begin_P[start]), int(starts[rollout_P[start] + 1])
            first, last = start * PART_TOKENS, end * PART_TOKENS
            until = min(last, first + stop - begin)
            ids_LTK[:, until:last], recorded_T[until:last] = 0, 0
            for ids_TK, layer in zip(ids_LTK[:, first:until], layers, strict=True):
                file.read(ids_TK, routes + layer * layer_bytes + begin * row_bytes)
            file.read(recorded_T[first:until], recorded + begin)
            self.bytes_read += len(layers) * (until - first) * row_bytes
        sums.compare(TOKEN_SUMS, [RECORDED], parts_P, whole_sums(recorded_T[None], len(parts_P)))
        if len(layers):
            sums.compare(ROUTE_SUMS, layers, parts_P, whole_sums(ids_LTK, len(parts_P)))

    def read_rollout(self, rollout: int) -> np.ndarray:
        """All routes of a rollout, `[L, N - 1, K]`."""
        layers, parts_P = range(len(self.info.moe_layers)), self._parts(rollout)
        recorded_T = np.empty(PART_TOKENS * len(parts_P), np.uint8)
        ids_LTK = np.empty((len(layers), len(recorded_T), self.info.topk), self.dtype)
        self.read_parts(parts_P, layers, ids_LTK, recorded_T)
        return np.ascontiguousarray(ids_LTK[:, : self.tensors["num_tokens"][rollout] - 1])

    def read_layers(self, layers: range) -> np.ndarray:
        """All routes of some layers, `[L, T, K]`; the caller compares them with their sums."""
        ids_LTK = np.empty((len(layers), self.num_rows, self.info.topk), self.dtype)
        begin = self.header.entries["routes"].begin + layers.start * ids_LTK[0].nbytes
        self.file.read(ids_LTK, begin)
        self.bytes_read += ids_LTK.nbytes
        return ids_LTK

    def _parts(self, rollout: int) -> np.ndarray:
        return np.arange(*self.sums.part_start_M[rollout : rollout + 2])

    def _read_slice(self, name: str, begin: int, end: int) -> np.ndarray:
        entry = self.header.entries[name]
        part: np.ndarray = np.empty(end - begin, DTYPES[entry.dtype])
        return self.file.read(part, entry.begin + begin * part.itemsize)


def newest_versions(tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """The newest policy version that sampled tokens of each rollout, int64 `[M]`.

    This is the version of the last version span; without spans it is `policy_version`.
    """
    newest_M, counts_M = tensors["policy_version"].copy(), tensors["num_versions"]
    has_M = counts_M > 0
    # every second number of `versions` is a version; a rollout's last one is just before its end
    newest_M[has_M] = tensors["versions"][1::2][np.cumsum(counts_M)[has_M] - 1]
    return newest_M
