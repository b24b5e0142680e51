"""The checksums of a shard's tensors and of parts of its rollouts, compared with what is read.

A rank reads parts of a rollout, with context parallelism never the whole. So each 64 tokens of a
rollout are a part, and a part has a CRC-32 in each layer of `routes` and in each tensor that has a
value for each token. These sums are tables in the file, a line for each layer or tensor; whoever
reads some parts of some layers reads their sums, and no others. Example: rollouts of 65 and 3
tokens have the parts

    part                0       1      2
    its tokens       0-63      64  65-67      of the shard
    its rows         0-63    none  64-65      a rollout's last token has no row

Each sum is stored XOR one number of the shard, the mask, which the header that was read gives
(`mask_of`). Example: another shard of the same shapes is written over this one while a rank holds
it open. The rows that the rank reads then fit the sums in the file, and both are of the other
shard. Their mask is another one, so no sum fits the header that the rank has, and it need not ask
the file system after each read whether the file was changed.

Shape suffixes (docs/glossary.md): L, M, N, T.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.store.files import HeldFile
from megatron_r3.data.store.header import (
    DTYPES,
    LINES,
    PART_TOKENS,
    PER_TOKEN,
    ROUTE_SUMS,
    TOKEN_SUMS,
    Header,
)
from megatron_r3.data.store.schema import StoreError

Bounds = list[tuple[int, int]]


def starts_of(counts_M: np.ndarray) -> np.ndarray:
    """Where things begin that follow each other, and where the last one ends: `[M + 1]`."""
    return np.concatenate([[0], np.cumsum(counts_M, dtype=np.int64)])


def locate(start_M: np.ndarray, place: int) -> tuple[int, int]:
    """Which of the things a place belongs to, and the place inside it."""
    number = int(np.searchsorted(start_M, place, side="right")) - 1
    return number, place - int(start_M[number])


def num_parts(num_tokens: np.ndarray) -> np.ndarray:
    """How many parts rollouts of these numbers of tokens have. Example: 65 tokens have 2."""
    return -(-num_tokens // PART_TOKENS)


def part_bounds(num_tokens: Iterable[int], begin: int = 0, *, of_rows: bool = False) -> Bounds:
    """First token and end of each part of rollouts that follow each other; see the table above.

    Args:
        num_tokens: of each rollout.
        begin: where the first rollout begins.
        of_rows: whether to count rows, of which a rollout has one less than tokens.
    """
    bounds: Bounds = []
    for length in num_tokens:
        end = begin + length - of_rows
        first = range(begin, begin + length, PART_TOKENS)
        bounds += [(min(start, end), min(start + PART_TOKENS, end)) for start in first]
        begin = end
    return bounds


def sums_of(values: np.ndarray, bounds: Sequence[tuple[int, int]]) -> list[int]:
    """The CRC-32 of `values[begin:end]` for each of the bounds.

    Args:
        values: contiguous, of any dtype; the bounds count along its first axis.
    """
    size = values.strides[0] if values.ndim > 1 else values.itemsize
    data = values.reshape(-1).view(np.uint8).data
    return [zlib_ng.crc32(data[begin * size : end * size]) for begin, end in bounds]


def ids_of_parts(sizes_N: np.ndarray, bounds: Bounds) -> Bounds:
    """Which kept ids belong to the tokens of each part, by the sizes of the tokens' kept sets."""
    offsets = starts_of(sizes_N).tolist()
    return [(offsets[begin], offsets[end]) for begin, end in bounds]


def read_tensor(file: HeldFile, header: Header, name: str) -> tuple[np.ndarray, bool]:
    """A whole tensor, and whether it has the checksum of the header."""
    entry = header.entries[name]
    tensor = file.read(np.empty(entry.shape, DTYPES[entry.dtype]), entry.begin)
    return tensor, zlib_ng.crc32(tensor.data) == header.crc32[name]


class PartSums:
    """The sums of the parts of one shard. All errors are StoreErrors that name the file.

    Args:
        num_tokens_M: of each rollout.
    """

    def __init__(self, file: HeldFile, header: Header, num_tokens_M: np.ndarray) -> None:
        self.file, self.header, self.num_tokens_M = file, header, num_tokens_M
        self.row_start_M = starts_of(num_tokens_M - 1)
        self.part_start_M = starts_of(num_parts(num_tokens_M))

    def bounds(self, rollout: int, *, of_rows: bool = False) -> Bounds:
        """First token, or row, and end of each part of a rollout, counted inside of it."""
        return part_bounds([int(self.num_tokens_M[rollout])], of_rows=of_rows)

    def widened(self, first: int, last: int) -> tuple[int, int]:
        """The rows to read so that the rows from `first` to before `last` can be compared.

        Example: of a rollout with the rows 0 to 499, the rows 100 to 199 are in the parts 1 to 3,
        so the rows 64 to 255 are read.
        """
        begin = first - locate(self.row_start_M, first)[1] % PART_TOKENS
        rollout, row = locate(self.row_start_M, last - 1)
        stop = last + (-row - 1) % PART_TOKENS
        return begin, min(stop, int(self.row_start_M[rollout + 1]))

    def compare_rows(
        self, name: str, layers: Sequence[int], begin: int, read_LT: np.ndarray
    ) -> None:
        """Refuse rows that are not as they were stored.

        Args:
            name: routes or recorded.
            layers: those of `read_LT`; `[0]` for recorded.
            begin: the first row.
            read_LT: `[len(layers), T, items]`, rows that begin and end as `widened` says.
        """
        stop = begin + read_LT.shape[1]
        table, line = _place(name)
        first, last = (locate(self.row_start_M, row)[0] for row in (begin, stop - 1))
        for rollout in range(first, last + 1):
            start, end = self.row_start_M[rollout : rollout + 2].tolist()
            low, high = max(start, begin), min(end, stop)
            cuts = range(low - begin, high - begin, PART_TOKENS)
            bounds = [(cut, min(cut + PART_TOKENS, high - begin)) for cut in cuts]
            sums = [sums_of(rows, bounds) for rows in read_LT]
            lines = layers if name == "routes" else [line]
            self.compare(table, lines, rollout, (low - start) // PART_TOKENS, sums)

    def compare(self, table: str, lines: Sequence[int], rollout: int, part: int, sums: Any) -> None:
        """Refuse parts of a rollout that do not have the sums that the shard says.

        Args:
            sums: what was worked out, `[len(lines), parts]`, from the part `part` on.
        """
        found = np.array(sums, np.uint32)
        first, entry = int(self.part_start_M[rollout]) + part, self.header.entries[table]
        stored = np.empty_like(found)
        for line, into in zip(lines, stored, strict=True):
            self.file.read(into, entry.begin + 4 * (line * entry.shape[1] + first))
        wrong = found ^ np.uint32(self.header.mask) != stored
        for index, place in np.argwhere(wrong)[:1].tolist():
            raise self._damaged(table, lines[index], rollout, part + place)

    def compare_whole(
        self, name: str, tensor: np.ndarray, stored: np.ndarray, layer: int = 0
    ) -> None:
        """Compare all parts of a layer of `routes`, or of one of the tensors PER_TOKEN.

        Args:
            tensor: the whole of it; of the routes `[T, K]`.
            stored: the table with its sums.
        """
        table, line = _place(name, layer)
        bounds = part_bounds(self.num_tokens_M.tolist(), of_rows=name in ("routes", "recorded"))
        found = np.array(sums_of(tensor, bounds), np.uint32) ^ np.uint32(self.header.mask)
        for part in np.flatnonzero(found != stored[line])[:1].tolist():
            raise self._damaged(table, line, *locate(self.part_start_M, part))

    def _damaged(self, table: str, line: int, rollout: int, part: int) -> StoreError:
        name = "routes" if table == ROUTE_SUMS else LINES[table][line]
        of_rows = name in ("routes", "recorded")
        begin, end = self.bounds(rollout, of_rows=of_rows)[part]
        what = f"the routes of MoE layer {line}" if name == "routes" else repr(name)
        places = f" in {'rows' if of_rows else 'tokens'} {begin} to {end - 1}"
        return self.file.damaged(f"rollout {rollout}: checksum of {what}", places)


def _place(name: str, layer: int = 0) -> tuple[str, int]:
    """The table with the sums of a tensor, and its line there."""
    if name == "routes":
        return ROUTE_SUMS, layer
    return TOKEN_SUMS, [*PER_TOKEN].index(name)
