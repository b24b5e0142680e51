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

from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.lazy import lazy
from megatron_r3.rollout import Rollout
from megatron_r3.store.header import PART_CRC32, PART_TOKENS, PER_TOKEN, num_parts
from megatron_r3.store.schema import StoreError
from megatron_r3.store.shard_file import ShardFile


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


def part_sums(rollouts: Sequence[Rollout], block_crc32: np.ndarray) -> Iterator[list[np.ndarray]]:
    """The tensor `part_crc32` of a shard with these rollouts, in pieces of one rollout.

    Args:
        block_crc32: that tensor of the shard, complete when the first piece is asked for.
    """
    seed = zlib_ng.crc32(block_crc32)
    for rollout in rollouts:
        routes = rollout.routes
        sums = np.full((routes.num_layers + len(PER_TOKEN), num_parts(len(rollout.tokens_N))), seed)
        per_token = (
            rollout.tokens_N.astype(np.int32),
            rollout.response_N.astype(np.uint8),
            rollout.logprobs_N.astype(np.float32),
            routes.recorded_T.astype(np.uint8),
        )
        columns = [routes.ids_LTK, *(tensor[None, :, None] for tensor in per_token)]
        place = 0
        for rows in columns:
            found = sums_of(rows, seed)
            # A rollout of 65 tokens has 64 rows: its second part has one token, and no row at all.
            # The sum of no bytes is the seed, which stands there already.
            sums[place : place + len(rows), : found.shape[1]] = found
            place += len(rows)
        yield [sums.astype(np.uint32)]


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
        self._has_blocks, self.has_parts = has_blocks, has_parts
        self._row_start_M = np.concatenate([[0], np.cumsum(num_tokens_M - 1)])
        self._part_start_M = np.concatenate([[0], np.cumsum(num_parts(num_tokens_M))])
        # what was read last, since it is asked for again: layer after layer, run after run
        self._last: tuple[tuple[int, int, int], np.ndarray] | None = None

    def widened(self, first: int, last: int) -> tuple[int, int]:
        """The rows to read so that the rows from `first` to before `last` can be compared.

        Example: of a rollout with the rows 0 to 499, the rows 100 to 199 need the parts 1 to 3, so
        the rows 64 to 255.
        """
        if not self.has_parts:
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
            if self.has_parts:
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
            if self.has_parts:
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
        column = self._column(name, layer)
        sums = [zlib_ng.crc32(part[start:end].data) for start, end in pairwise(bounds)]
        entry = self._opened.header.entries["block_crc32"]
        stored = self._read(entry.begin, entry.shape[1], rollout, rollout + len(sums))[:, column]
        for place in np.flatnonzero(np.array(sums, np.uint32) != stored)[:1].tolist():
            raise self._damaged(name, layer, rollout + place)

    def compare_parts_of_all(self, name: str, layer: int, rows: np.ndarray) -> None:
        """Compare every part of a layer or tensor of the whole shard; for `rollouts verify`.

        Args:
            layer: of the routes; 0 for any other tensor.
            rows: all of the shard, `[rows, items]`.

        Raises:
            StoreError: naming the file, the rollout, the layer and the rows.
        """
        if not self.has_parts:
            return
        # a rollout has one token more than rows
        bounds, first, apart = self._all_parts[name in ("routes", "recorded")]
        seed, data = self._opened.header.crc32["block_crc32"], rows.reshape(-1).view(np.uint8).data
        row_bytes = rows.nbytes // len(rows)
        sums = [
            zlib_ng.crc32(data[begin * row_bytes : end * row_bytes], seed) for begin, end in bounds
        ]
        stored = self._whole[first + self._column(name, layer) * apart]
        for place in np.flatnonzero(np.array(sums, np.uint32) != stored)[:1].tolist():
            rollout = int(np.searchsorted(self._part_start_M, place, side="right")) - 1
            row = (place - int(self._part_start_M[rollout])) * PART_TOKENS
            length = bounds[place][1] - bounds[place][0]
            raise self._damaged(name, layer, rollout, _places(name, row, length))

    @lazy
    def _whole(self) -> np.ndarray:
        """All sums of parts, for `compare_parts_of_all`."""
        entry = self._opened.header.entries[PART_CRC32]
        return self._read(entry.begin, entry.shape[0], 0, 1)[0]

    @lazy
    def _all_parts(self) -> list[tuple[list[tuple[int, int]], np.ndarray, np.ndarray]]:
        """All parts of the shard, for tensors that have tokens, and for those that have rows.

        For each: first row and end of each part; the place of its sum in column 0; and how many
        parts its rollout has, which is how far apart the sums of two columns are.
        """
        found, columns = [], self._num_layers + len(PER_TOKEN)
        parts_M = np.diff(self._part_start_M)
        apart, first_M = np.repeat(parts_M, parts_M), self._part_start_M[:-1]
        part = np.arange(len(apart)) - np.repeat(first_M, parts_M)
        for less in (0, 1):
            length_M = np.diff(self._row_start_M) + 1 - less
            start_M = np.cumsum(length_M) - length_M
            begin = np.repeat(start_M, parts_M) + part * PART_TOKENS
            end = np.minimum(begin + PART_TOKENS, np.repeat(start_M + length_M, parts_M))
            bounds = [*zip(begin.tolist(), end.tolist(), strict=True)]
            found.append((bounds, np.repeat(first_M * columns, parts_M) + part, apart))
        return found

    def _compare_parts(
        self, name: str, layers: Sequence[int], rollout: int, row: int, part_LT: np.ndarray
    ) -> None:
        """Compare the parts of a rollout from its row `row` on, which is the first of a part."""
        columns = [self._column(name, layer) for layer in layers]
        sums = sums_of(part_LT, self._opened.header.crc32["block_crc32"])
        low, first = min(columns), row // PART_TOKENS
        stored = self._of_parts(rollout, low, max(columns) + 1)
        stored = stored[[column - low for column in columns], first : first + sums.shape[1]]
        for index, place in np.argwhere(sums != stored)[:1].tolist():
            begin = place * PART_TOKENS
            length = min(PART_TOKENS, part_LT.shape[1] - begin)
            raise self._damaged(name, layers[index], rollout, _places(name, row + begin, length))

    def _of_parts(self, rollout: int, low: int, high: int) -> np.ndarray:
        """The sums of a rollout's parts in some columns, `[high - low, parts]`.

        A rollout's sums lie together, layer after layer and then those of the tensors PER_TOKEN. So
        one read takes those of all layers of a pipeline stage.
        """
        key, held = (rollout, low, high), self._last  # another thread may put another one there
        if held is None or held[0] != key:
            first, last = self._part_start_M[rollout : rollout + 2].tolist()
            columns, parts = self._num_layers + len(PER_TOKEN), last - first
            begin = self._opened.header.entries[PART_CRC32].begin + 4 * first * columns
            self._last = held = key, self._read(begin, parts, low, high)
        return held[1]

    def _read(self, begin: int, width: int, first: int, last: int) -> np.ndarray:
        """Rows `first` to before `last` of a table of sums that begins at a byte of the file."""
        sums: np.ndarray = np.empty((last - first, width), np.uint32)
        self._opened.file.read(sums, begin + 4 * first * width)
        return sums

    def _column(self, name: str, layer: int) -> int:
        """The layers come first, then the tensors PER_TOKEN."""
        return layer if name == "routes" else self._num_layers + [*PER_TOKEN].index(name)

    def _rollout_of(self, row: int) -> int:
        return int(np.searchsorted(self._row_start_M, row, side="right")) - 1

    def _bounds(self, rollout: int) -> tuple[int, int]:
        return int(self._row_start_M[rollout]), int(self._row_start_M[rollout + 1])

    def _damaged(self, name: str, layer: int, rollout: int, where: str = "") -> StoreError:
        part = f"the routes of MoE layer {layer}" if name == "routes" else repr(name)
        return self._opened.file.damaged(f"rollout {rollout}: checksum of {part}", where)
