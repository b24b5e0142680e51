"""The checksums of a shard's rollouts, and of 64 tokens of them: compared as they are read.

A rank reads parts of a rollout, with context parallelism never the whole. So `part_crc32` has a sum
for each 64 tokens of a rollout, in each layer of `routes` and in each of the tensors PER_TOKEN. The
sums stay in the file, since they are as many as the tokens make them; whoever reads some tokens
reads the sums of these tokens.

Each such sum begins with a number that belongs to the shard (`seed`), and not with 0. A shard that
is written over while a rank holds it open, by another shard of the same shapes, has sums that begin
with another number. So the sums show this too, and the rank need not ask the file after each read
whether it was changed.

Shards without `part_crc32`, of an earlier megatron-r3, have a sum of each whole rollout only.

Shape suffixes (docs/glossary.md): K, L, M, N, T.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, repeat

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.rollout import Rollout
from megatron_r3.data.store.header import PART_CRC32, PART_TOKENS, PER_TOKEN, num_parts
from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.store.shard_file import ShardFile


def sums_of(rows: np.ndarray, seed: int) -> np.ndarray:
    """The CRC-32 of each 64 rows, the last of which may be fewer: uint32 `[columns, parts]`.

    Args:
        rows: `[columns, rows, items]`, the rows of each column contiguous.
        seed: what each sum begins with.
    """
    columns, num_rows = rows.shape[:2]
    full = num_rows // PART_TOKENS
    sums = np.empty((columns, -(-num_rows // PART_TOKENS)), np.uint32)
    if full:
        whole = rows[:, : full * PART_TOKENS].reshape(columns * full, -1)
        found = map(zlib_ng.crc32, whole, repeat(seed))
        sums[:, :full] = np.fromiter(found, np.uint32, len(whole)).reshape(columns, full)
    if num_rows % PART_TOKENS:
        rest = rows[:, full * PART_TOKENS :]
        sums[:, full] = [zlib_ng.crc32(column, seed) for column in np.ascontiguousarray(rest)]
    return sums


def part_sums(
    rollouts: Sequence[Rollout], per_token: Mapping[str, np.ndarray], block_crc32: np.ndarray
) -> Iterator[list[np.ndarray]]:
    """The tensor `part_crc32` of a shard with these rollouts, in pieces of one rollout.

    Args:
        per_token: the tensors PER_TOKEN of the shard.
        block_crc32: that tensor of the shard, complete when the first piece is asked for.
    """
    seed, row, token = zlib_ng.crc32(block_crc32), 0, 0
    for rollout in rollouts:
        routes, length = rollout.routes, len(rollout.tokens_N)
        columns = [routes.ids_LTK]
        for name in PER_TOKEN:
            first, last = (row, row + length - 1) if name == "recorded" else (token, token + length)
            columns.append(per_token[name][None, first:last, None])
        shape = (routes.num_layers + len(PER_TOKEN), num_parts(length))
        sums, place = np.full(shape, seed, np.uint32), 0
        for rows in columns:
            found = sums_of(rows, seed)
            # A rollout of 65 tokens has 64 rows: its second part has one token, and no row at all.
            # The sum of no bytes is the seed, which stands there already.
            sums[place : place + len(rows), : found.shape[1]] = found
            place += len(rows)
        yield [sums]
        row, token = row + length - 1, token + length


def _places(name: str, begin: int, length: int) -> str:
    """Which rows or tokens of a rollout, for an error."""
    what = "rows" if name in ("routes", "recorded") else "tokens"
    return f" in {what} {begin} to {begin + length - 1}"


class Sums:
    """The checksums of one shard's rollouts.

    Args:
        opened: the shard's file.
        num_layers: L.
        num_tokens_M: of each rollout, N.
        has_blocks: whether whole rollouts have sums, as from version 3 on.
        has_parts: whether parts of rollouts have sums too.

    Attributes:
        row_start_M, part_start_M: `[M + 1]`, where each rollout's rows and parts begin, and where
            the last one's end.
    """

    def __init__(
        self,
        opened: ShardFile,
        num_layers: int,
        num_tokens_M: np.ndarray,
        has_blocks: bool,
        has_parts: bool,
    ) -> None:
        self._opened, self._num_layers = opened, num_layers
        self._has_blocks, self._has_parts = has_blocks, has_parts
        self.row_start_M = np.concatenate([[0], np.cumsum(num_tokens_M - 1)])
        self.part_start_M = np.concatenate([[0], np.cumsum(num_parts(num_tokens_M))])
        self._last: tuple[tuple[int, int, int, int], np.ndarray] | None = None

    def widened(self, first: int, last: int) -> tuple[int, int]:
        """The rows to read so that the rows from `first` to before `last` can be compared.

        Example: of a rollout with the rows 0 to 499, the rows 100 to 199 need the parts 1 to 3, so
        the rows 64 to 255.
        """
        if not self._has_parts:
            return first, last
        start, _ = self._bounds(self._rollout_of(first))
        begin = first - (first - start) % PART_TOKENS
        start, stop = self._bounds(self._rollout_of(last - 1))
        return begin, min(stop, last + (start - last) % PART_TOKENS)

    def compare_rows(
        self, name: str, layers: Sequence[int], begin: int, read_LT: np.ndarray
    ) -> None:
        """Refuse rows that are not as they were stored.

        Without sums of parts, only rollouts all of whose rows are here can be compared.

        Args:
            name: routes or recorded.
            layers: those of `read_LT`; `[0]` for recorded.
            begin: the first row.
            read_LT: `[len(layers), T, items]`, rows that begin and end as `widened` says.

        Raises:
            StoreError: naming the file, the rollout, the layer and the rows.
        """
        end = begin + read_LT.shape[1]
        for rollout in range(self._rollout_of(begin), self._rollout_of(end - 1) + 1):
            start, stop = self._bounds(rollout)
            first, last = max(start, begin), min(stop, end)
            part_LT = read_LT[:, first - begin : last - begin]
            if self._has_parts:
                self._compare_parts(name, layers, rollout, first - start, part_LT)
            elif (first, last) == (start, stop):
                for layer, rows in zip(layers, part_LT, strict=True):
                    self.compare_whole(name, layer, rollout, rows, [0, last - first])

    def compare_tokens(self, rollout: int, tokens: dict[str, np.ndarray]) -> None:
        """Refuse a rollout whose tensors PER_TOKEN are not as they were stored.

        Args:
            tokens: each of them, whole.

        Raises:
            StoreError: naming the file, the rollout, the tensor and the tokens.
        """
        for name, part in tokens.items():
            if self._has_parts:
                self._compare_parts(name, [0], rollout, 0, part[None, :, None])
            else:
                self.compare_whole(name, 0, rollout, part, [0, len(part)])

    def compare_whole(
        self, name: str, layer: int, rollout: int, part: np.ndarray, bounds: Sequence[int]
    ) -> None:
        """Compare whole rollouts with `block_crc32`. Version 2 has no such sums.

        Args:
            name: routes, or one of PER_TOKEN.
            layer: of `routes`; 0 for any other tensor.
            rollout: the first of the rollouts that lie in `part` between the `bounds`.

        Raises:
            StoreError: naming the file, the rollout and the layer.
        """
        if not self._has_blocks:
            return
        column = self.column(name, layer)
        sums = [zlib_ng.crc32(part[start:end].data) for start, end in pairwise(bounds)]
        entry = self._opened.header.entries["block_crc32"]
        stored = self.read(entry.begin, entry.shape[1], rollout, rollout + len(sums))[:, column]
        for place in np.flatnonzero(np.array(sums, np.uint32) != stored)[:1].tolist():
            raise self.damaged(name, layer, rollout + place)

    def _compare_parts(
        self, name: str, layers: Sequence[int], rollout: int, row: int, part_LT: np.ndarray
    ) -> None:
        """Compare the parts of a rollout from its row `row` on, which is the first of a part."""
        columns = [self.column(name, layer) for layer in layers]
        sums = sums_of(part_LT, self._opened.header.crc32["block_crc32"])
        low, first = min(columns), row // PART_TOKENS
        stored = self._of_parts(rollout, low, max(columns) + 1)
        stored = stored[[column - low for column in columns], first : first + sums.shape[1]]
        for index, place in np.argwhere(sums != stored)[:1].tolist():
            begin = place * PART_TOKENS
            length = min(PART_TOKENS, part_LT.shape[1] - begin)
            raise self.damaged(name, layers[index], rollout, _places(name, row + begin, length))

    def _of_parts(self, rollout: int, low: int, high: int) -> np.ndarray:
        """The sums of a rollout's parts in some columns, `[high - low, parts]`.

        A rollout's sums lie together, layer after layer and then those of the tensors PER_TOKEN. So
        one read takes those of all layers of a pipeline stage.
        """
        first, last = self.part_start_M[rollout : rollout + 2].tolist()
        columns = self._num_layers + len(PER_TOKEN)
        begin = self._opened.header.entries[PART_CRC32].begin + 4 * first * columns
        return self.read(begin, last - first, low, high)

    def read(self, begin: int, width: int, first: int, last: int) -> np.ndarray:
        """Rows `first` to before `last` of a table of sums that begins at a byte of the file."""
        # What was read last is asked for again: for layer after layer, and for run after run.
        key, held = (begin, width, first, last), self._last  # a thread may put another one there
        if held is None or held[0] != key:
            sums: np.ndarray = np.empty((last - first, width), np.uint32)
            self._opened.file.read(sums, begin + 4 * first * width)
            self._last = held = key, sums
        return held[1]

    def forget(self) -> None:
        """Hold none of the sums any more."""
        self._last = None

    def column(self, name: str, layer: int) -> int:
        """The layers come first, then the tensors PER_TOKEN."""
        return layer if name == "routes" else self._num_layers + [*PER_TOKEN].index(name)

    def _rollout_of(self, row: int) -> int:
        return int(np.searchsorted(self.row_start_M, row, side="right")) - 1

    def _bounds(self, rollout: int) -> tuple[int, int]:
        return int(self.row_start_M[rollout]), int(self.row_start_M[rollout + 1])

    def damaged(self, name: str, layer: int, rollout: int, where: str = "") -> StoreError:
        """The error of a rollout whose layer or tensor is not as it was stored."""
        part = f"the routes of MoE layer {layer}" if name == "routes" else repr(name)
        return self._opened.file.damaged(f"rollout {rollout}: checksum of {part}", where)


class AllParts:
    """The sums of all parts of a shard, as long as the shard is verified.

    Args:
        opened: the shard's file, which has sums of parts.
        sums: of the shard.
        num_layers: L.
    """

    def __init__(self, opened: ShardFile, sums: Sums, num_layers: int) -> None:
        self._sums, header = sums, opened.header
        self._seed, entry = header.crc32["block_crc32"], header.entries[PART_CRC32]
        self._stored = sums.read(entry.begin, entry.shape[0], 0, 1)[0]
        sums.forget()
        columns, parts_M = num_layers + len(PER_TOKEN), np.diff(sums.part_start_M)
        first_M = sums.part_start_M[:-1]
        # Of each part: how many parts its rollout has, and which of them it is. The sums of two
        # columns of a rollout lie as far apart as the rollout has parts.
        self._apart = np.repeat(parts_M, parts_M)
        self._part = np.arange(len(self._apart)) - np.repeat(first_M, parts_M)
        # the place of its sum in column 0
        self._place = np.repeat(first_M * columns, parts_M) + self._part
        length_M = np.diff(sums.row_start_M)
        self._rows = self._bounds(length_M, parts_M)
        self._tokens = self._bounds(length_M + 1, parts_M)  # a rollout has a token more than rows

    def _bounds(self, length_M: np.ndarray, parts_M: np.ndarray) -> list[tuple[int, int]]:
        """First row and end of each part, where each rollout has so many rows."""
        end_M = np.cumsum(length_M)
        begin = np.repeat(end_M - length_M, parts_M) + self._part * PART_TOKENS
        end = np.minimum(begin + PART_TOKENS, np.repeat(end_M, parts_M))
        return [*zip(begin.tolist(), end.tolist(), strict=True)]

    def compare(self, name: str, layer: int, rows: np.ndarray) -> None:
        """Compare every part of a layer or tensor.

        Args:
            layer: of the routes; 0 for any other tensor.
            rows: all of the shard, `[rows, items]`.

        Raises:
            StoreError: naming the file, the rollout, the layer and the rows.
        """
        bounds = self._rows if name in ("routes", "recorded") else self._tokens
        data, size = rows.reshape(-1).view(np.uint8).data, rows.nbytes // len(rows)
        sums = [zlib_ng.crc32(data[a * size : b * size], self._seed) for a, b in bounds]
        stored = self._stored[self._place + self._sums.column(name, layer) * self._apart]
        for number in np.flatnonzero(np.array(sums, np.uint32) != stored)[:1].tolist():
            rollout = int(np.searchsorted(self._sums.part_start_M, number, side="right")) - 1
            row, length = int(self._part[number]) * PART_TOKENS, np.diff(bounds[number]).item()
            raise self._sums.damaged(name, layer, rollout, _places(name, row, length))
