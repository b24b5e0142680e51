"""One shard, opened and checked: what each rollout has once in memory, the rest in an open file.

Shape suffixes: L MoE layers, R rows of all rollouts of a shard, U some of its rows or its turns,
K top-k, M rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.routes import id_dtype
from megatron_r3.store.checks import check_opened, check_shapes, verify_shard
from megatron_r3.store.files import HeldFile
from megatron_r3.store.header import BLOCKS, DTYPES, PER_ROLLOUT, read_header
from megatron_r3.store.schema import StoreError
from megatron_r3.store.writer import checksum
from megatron_r3.values import wrong_token

_COLUMNS = {name: index for index, name in enumerate(BLOCKS)}  # of `block_crc32`, after the layers


class Shard:
    """A shard's tensors by name (schema: docs/rollout-store.md), and what its store says.

    Opening reads what each rollout has once, and checks every shape; tokens and routes are read
    where they are asked for, from the file that was opened, whatever has its name by then. What is
    read of a rollout whole is compared with its checksum. `verify` reads all of it.

    Attributes:
        info: what its store says.
        identity: 16 hex digits of all its content; its number is content too.
        has_blocks: whether each rollout has checksums of its own: from version 3 on.
        token_start_M, row_start_M, turn_start_M: where each rollout's begin, and the end.
        bytes_read: of routes, so far, in this process.

    Raises:
        StoreError: naming the file, and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.file = HeldFile(path)
        self.header = read_header(self.file)
        self.info, self.identity = self.header.info, self.header.identity
        self.has_blocks = "block_crc32" in self.header.tensors
        check_shapes(self)
        kept = ("turns", *PER_ROLLOUT)
        if self.has_blocks:
            kept = (*kept, "prompt_digest", "block_crc32")
        self._kept = {name: self.read_whole(name) for name in kept}
        self.file.check_unchanged()
        for name, tensor in self._kept.items():
            if checksum(tensor) != self.header.crc32[name]:
                raise self.damaged(f"checksum of {name!r}")
        self._kept.setdefault("prompt_digest", np.zeros(self.num_rollouts, np.int64))
        check_opened(self)
        self.token_start_M, self.row_start_M, self.turn_start_M = (
            np.concatenate([[0], np.cumsum(count_M)])
            for count_M in (
                self._kept["num_tokens"],
                self._kept["num_tokens"] - 1,
                self._kept["num_turns"],
            )
        )

    def __reduce__(self) -> Any:
        """Another process opens the file for itself, and must find the same one."""
        return _reopened, (self.path, self.identity, self.file.state)

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """All but the routes; `tokens` and what else has a number for each token is read."""
        return _Tensors(self, self._kept)

    @property
    def num_rollouts(self) -> int:
        """M."""
        return len(self._kept["num_tokens"])

    @property
    def num_rows(self) -> int:
        """R."""
        return self.header.entries["routes"].shape[1]

    @property
    def dtype(self) -> np.dtype:
        """Of an expert id."""
        return id_dtype(self.info.num_experts)

    def read_whole(self, name: str) -> np.ndarray:
        """A tensor as it lies in the file; the caller compares its checksum."""
        entry = self.header.entries[name]
        tensor: np.ndarray = np.empty(entry.shape, DTYPES[entry.dtype])
        self.file.read(tensor, entry.begin)
        return tensor

    def read_tokens(self, rollout: int) -> dict[str, np.ndarray]:
        """tokens, response, logprobs `[N]` and recorded `[N - 1]` of a rollout, as stored.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        fields = {}
        for name in BLOCKS:
            start_M = self.row_start_M if name == "recorded" else self.token_start_M
            entry = self.header.entries[name]
            field = np.empty(start_M[rollout + 1] - start_M[rollout], DTYPES[entry.dtype])
            self.file.read(field, entry.begin + int(start_M[rollout]) * field.itemsize)
            fields[name] = field
        self.file.check_unchanged()
        for name, field in fields.items():
            self._compare(name, 0, rollout, field, [0, len(field)])
        return fields

    def read_recorded(self, rows_U: np.ndarray) -> np.ndarray:
        """Whether the engine returned routes for these rows, bool `[U]`; else as `read_routes`."""
        return self._read_rows("recorded", rows_U, [0], 1)[0, :, 0].astype(bool)

    def read_routes(self, rows_U: np.ndarray, layers: Sequence[int]) -> np.ndarray:
        """The routes `[len(layers), U, K]` of some rows: these bytes are read, and no others.

        Args:
            rows_U: ascending, without repeats.
            layers: trace layers.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        ids_LUK = self._read_rows("routes", rows_U, layers, self.info.topk)
        self.bytes_read += ids_LUK.nbytes
        return ids_LUK

    def _read_rows(
        self, name: str, rows_U: np.ndarray, layers: Sequence[int], items: int
    ) -> np.ndarray:
        """`[len(layers), U, items]` of a tensor that has rows; one read for each run of rows.

        Example: of the rows 4 5 6 9 10 the runs are 4 5 6 and 9 10. If rollout 1 has the rows 4 5
        and rollout 2 the rows 6 7 8, the first run covers rollout 1 whole, and compares it.
        """
        entry = self.header.entries[name]
        read: np.ndarray = np.empty((len(layers), len(rows_U), items), DTYPES[entry.dtype])
        if not len(rows_U):
            return read
        row_bytes = items * read.itemsize
        cuts = (np.flatnonzero(np.diff(rows_U) != 1) + 1).tolist()
        runs = [*zip([0, *cuts], [*cuts, len(rows_U)], strict=True)]
        for index, layer in enumerate(layers):
            for start, end in runs:
                row = layer * self.num_rows + int(rows_U[start])
                self.file.read(read[index, start:end], entry.begin + row * row_bytes)
        self.file.check_unchanged()
        for start, end in runs:
            first, bounds = self._whole(int(rows_U[start]), int(rows_U[end - 1]) + 1)
            for layer, rows in zip(layers, read[:, start:end], strict=True) if bounds[1:] else ():
                self._compare(name, layer, first, rows, bounds)
        return read

    def _whole(self, begin: int, end: int) -> tuple[int, list[int]]:
        """The first rollout all of whose rows lie in `begin` to `end`, and where such rollouts
        begin, counted from `begin` on, and the last one ends.
        """
        first = int(np.searchsorted(self.row_start_M, begin, side="left"))
        last = int(np.searchsorted(self.row_start_M, end, side="right"))
        return first, (self.row_start_M[first:last] - begin).tolist()

    def _compare(
        self, name: str, layer: int, rollout: int, part: np.ndarray, bounds: Sequence[int]
    ) -> None:
        """Refuse rollouts that are not what was stored; version 2 has no sums of them.

        Args:
            layer: of `routes`, else 0.
            rollout: the first one of those that lie in `part` between the `bounds`.
        """
        if not self.has_blocks:
            return
        column = layer if name == "routes" else len(self.info.moe_layers) + _COLUMNS[name]
        sums = [zlib_ng.crc32(part[start:end].data) for start, end in pairwise(bounds)]
        stored = self._kept["block_crc32"][rollout : rollout + len(sums), column].tolist()
        if sums != stored:
            wrong = rollout + next(i for i, crc32 in enumerate(sums) if crc32 != stored[i])
            what = f"the routes of MoE layer {layer}" if name == "routes" else repr(name)
            raise self.damaged(f"rollout {wrong}: checksum of {what}")

    def damaged(self, what: str) -> StoreError:
        """The error for bytes that are not those that were stored."""
        return StoreError(
            f"{self.path}: {what} differs: the shard is damaged, or was changed while it is in "
            "use: copy it again or remove it"
        )

    def turns(self, rollout: int) -> np.ndarray:
        """First token and end of each of a rollout's turns, int32 `[U, 2]`."""
        bounds = slice(2 * self.turn_start_M[rollout], 2 * self.turn_start_M[rollout + 1])
        return self._kept["turns"][bounds].reshape(-1, 2).copy()

    def verify(self) -> None:
        """Read everything: checksums, values, the range of every id, that no row repeats one.

        Raises:
            ValueError: naming the file, and for a wrong value or id the rollout, layer and token.
        """
        verify_shard(self)

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse token ids outside a vocabulary.

        Raises:
            StoreError: naming the file, the rollout and the token.
        """
        if wrong := wrong_token(self.tensors["tokens"], vocab_size):
            rollout, token = self.locate_token(wrong[0])
            raise StoreError(f"{self.path}: rollout {rollout}: token {token} {wrong[1]}")

    def locate_token(self, token: int) -> tuple[int, int]:
        """The rollout of a token of this shard, and its place in it."""
        rollout = int(np.searchsorted(self.token_start_M, token, side="right")) - 1
        return rollout, token - int(self.token_start_M[rollout])

    def locate_row(self, row: int) -> tuple[int, int]:
        """The rollout of a row of this shard, and its token in it."""
        rollout = int(np.searchsorted(self.row_start_M, row, side="right")) - 1
        return rollout, row - int(self.row_start_M[rollout])

    def read_compared(self, name: str) -> np.ndarray:
        """All of a tensor that has a number for each token, each rollout's part compared."""
        tensor = self.read_whole(name)
        self.file.check_unchanged()
        start_M = self.row_start_M if name == "recorded" else self.token_start_M
        self._compare(name, 0, 0, tensor, start_M.tolist())
        return tensor


class _Tensors(Mapping[str, np.ndarray]):
    """A shard's tensors by name: in memory, or read when they are asked for."""

    def __init__(self, shard: Shard, kept: Mapping[str, np.ndarray]) -> None:
        self.shard, self.kept = shard, kept

    def __getitem__(self, name: str) -> np.ndarray:
        if name in BLOCKS:
            return self.shard.read_compared(name)
        return self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.kept, *BLOCKS])

    def __len__(self) -> int:
        return len(self.kept) + len(BLOCKS)


def _reopened(path: Path, identity: str, state: tuple[int, int, int]) -> Shard:
    """The shard that another process had opened."""
    shard = Shard(path)
    if shard.identity != identity or shard.file.state[:2] != state[:2]:
        raise StoreError(
            f"{path}: was changed or replaced while it is in use: put it back, and start again"
        )
    return shard
