"""Computes the checksums of a shard's tensors and of parts of rollouts, and compares them.

With context parallelism a rank reads only some tokens of a rollout. So each 64 tokens of a rollout
are a part. A part has a checksum, called its sum, for each layer of `routes` and for each tensor
with a value for each token. The file has tables of the sums. A table has a row for each part, so
that the sums of consecutive parts can be read at once. Example: rollouts of 65 and 3 tokens have
the parts

    part                0       1      2
    its tokens       0-63      64  65-67      of the shard
    its rows         0-63    none  64-65      a rollout's last token has no row

Each sum is stored XOR the shard's mask, a number that is computed from the checksums in the header
(`mask_of`). Example: a rank has read the header of shard A. Then somebody overwrites the file with
shard B, of the same shapes. The rows that the rank reads now fit the sums in the file, since both
are of B. But B's sums have the mask of B, and the rank knows the mask of A: so it refuses the rows.

Shape suffixes (docs/glossary.md): M, N, P, V.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.store.files import HeldFile
from megatron_r3.data.store.header import (
    COLUMNS,
    DTYPES,
    PART_TOKENS,
    PER_TOKEN,
    ROUTE_SUMS,
    TOKEN_SUMS,
    Header,
)
from megatron_r3.data.store.schema import StoreError

RECORDED = [*PER_TOKEN].index("recorded")  # its column of TOKEN_SUMS


def starts_of(counts_M: np.ndarray) -> np.ndarray:
    """Where each of M consecutive things begins, and the end of all. Example: 3 2 gives 0 3 5."""
    return np.concatenate([[0], np.cumsum(counts_M, dtype=np.int64)])


def locate(start_M: np.ndarray, place: int) -> tuple[int, int]:
    """Which of M consecutive things (`starts_of`) has a place, and the place inside this thing."""
    number = int(np.searchsorted(start_M, place, side="right")) - 1
    return number, place - int(start_M[number])


def runs(numbers: np.ndarray) -> Iterable[tuple[int, int]]:
    """First index and end of each run of consecutive numbers.

    Example: the numbers 4 5 6 9 have the runs (0, 3) and (3, 4).

    Args:
        numbers: int64, at least one.
    """
    ends = (numbers[1:] - numbers[:-1] != 1).nonzero()[0] + 1
    return pairwise([0, *ends.tolist(), len(numbers)])


def part_sums(lines: np.ndarray, num_tokens: int) -> np.ndarray:
    """The sum of each part of one rollout: uint32 `[L, parts]`.

    Args:
        lines: values of the tokens `[L, N, ...]`, or of the rows `[L, N - 1, ...]`; of any dtype,
            each line contiguous.
        num_tokens: N. If the lines have rows, the last part may be empty; it then has the sum 0.
    """
    sums = np.zeros((len(lines), -(-num_tokens // PART_TOKENS)), np.uint32)
    data = lines.reshape(len(lines), -1).view(np.uint8)
    whole = lines.shape[1] // PART_TOKENS
    cut = whole * PART_TOKENS * (data.shape[1] // max(lines.shape[1], 1))
    if whole:
        sums[:, :whole] = whole_sums(data[:, :cut], whole)
    if rest := data.shape[1] - cut:
        padded = np.zeros((len(lines), -(-rest // 4) * 4), np.uint8)
        padded[:, :rest] = data[:, cut:]
        sums[:, whole] = _sums(padded.view("<u4"))
    return sums


def whole_sums(lines: np.ndarray, num_parts: int) -> np.ndarray:
    """The sums of parts that all have the same number of bytes, uint32 `[L, num_parts]`."""
    return _sums(lines.reshape(len(lines), num_parts, -1).view("<u4"))


def _sums(words: np.ndarray) -> np.ndarray:
    """The sum of the words of the last axis, in one call for all parts; other threads can run.

    Each word is multiplied by a number that depends on the word's place. The products are added
    modulo 2**64, and the upper 32 bits of this number are the sum. This is "Multilinear" of Lemire
    and Kaser, Strongly universal string hashing is fast (arXiv 1202.4961). A wrong part has the
    right sum with a chance of about 2**-32. A CRC-32 call for each part took twice as long, and no
    other thread ran meanwhile.
    """
    # tables of multipliers have a power of two as size, so few are cached: 100 words use 128
    multipliers = _multipliers(1 << (words.shape[-1] - 1).bit_length())[: words.shape[-1]]
    return (np.einsum("...w,w->...", words, multipliers) >> np.uint64(32)).astype(np.uint32)


@cache
def _multipliers(count: int) -> np.ndarray:
    """The first `count` multipliers, uint64: the first outputs of splitmix64 with the seed 0."""
    number = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ number >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ number >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return number ^ number >> np.uint64(31)


def sums_of(lines: np.ndarray, num_tokens_M: np.ndarray, *, of_rows: bool = False) -> np.ndarray:
    """The sum of each part of consecutive rollouts, uint32 `[L, parts]`.

    Args:
        lines: values of all tokens `[L, sum N, ...]`, or of all rows `[L, T, ...]`.
        num_tokens_M: the number of tokens of each rollout.
        of_rows: whether `lines` has values of rows: N - 1 for a rollout of N tokens.
    """
    starts = starts_of(num_tokens_M - of_rows).tolist()
    each = zip(pairwise(starts), num_tokens_M.tolist(), strict=True)
    return np.concatenate([part_sums(lines[:, begin:end], n) for (begin, end), n in each], 1)


def kept_sums(kept: KeptSets) -> np.ndarray:
    """The sum of each part of a rollout's kept sizes, and of its kept ids: uint32 `[2, parts]`."""
    num_tokens = len(kept.sizes_N)
    cuts = kept.offsets[[*range(0, num_tokens, PART_TOKENS), num_tokens]].tolist()
    ids = [_sums(kept.ids_V[begin:end].view("<u4")) for begin, end in pairwise(cuts)]
    return np.stack([part_sums(kept.sizes_N[None], num_tokens)[0], np.array(ids, np.uint32)])


def read_tensor(file: HeldFile, header: Header, name: str) -> tuple[np.ndarray, bool]:
    """A whole tensor, and whether it has the checksum of the header.

    Raises:
        StoreError: the file was cut, or cannot be read any more.
    """
    entry = header.entries[name]
    tensor = file.read(np.empty(entry.shape, DTYPES[entry.dtype]), entry.begin)
    return tensor, zlib_ng.crc32(tensor.data) == header.crc32[name]


class PartSums:
    """Compares what is read of one shard with the sums in the shard's file.

    Args:
        file: the shard's file.
        header: the shard's header.
        num_tokens_M: the number of tokens of each rollout.
    """

    def __init__(self, file: HeldFile, header: Header, num_tokens_M: np.ndarray) -> None:
        self.file, self.header, self.num_tokens_M = file, header, num_tokens_M
        self.part_start_M = starts_of(-(-num_tokens_M // PART_TOKENS))  # rounded up

    def compare(
        self, table: str, columns: Sequence[int], parts_P: np.ndarray, found: np.ndarray
    ) -> None:
        """Refuse parts if their sums differ from the sums in the file.

        Args:
            table: the name of the table of sums.
            columns: the columns of the table, one for each layer or tensor that was read.
            parts_P: the parts, ascending.
            found: the sums of what was read, uint32 `[len(columns), P]`.

        Raises:
            StoreError: naming the file, the rollout, the tensor or layer, and the tokens or rows.
        """
        entry = self.header.entries[table]
        stored = np.empty((len(parts_P), entry.shape[1]), np.uint32)
        for start, end in runs(parts_P):
            self.file.read(stored[start:end], entry.begin + int(parts_P[start]) * stored[0].nbytes)
        wrong = found ^ np.uint32(self.header.mask) != stored.take(columns, 1).T
        if wrong.any():
            index, place = np.argwhere(wrong)[0].tolist()
            where = locate(self.part_start_M, int(parts_P[place]))
            raise self._damaged(table, columns[index], *where)

    def compare_whole(
        self, name: str, lines: np.ndarray, stored: np.ndarray, layer: int = 0
    ) -> None:
        """Compare all parts of one PER_TOKEN tensor, or of some layers of `routes`.

        Args:
            lines: the whole tensor, `[1, N]`; or the layers, `[L, T, topk]`, from `layer` on.
            stored: the whole table of sums, ROUTE_SUMS for `routes` and else TOKEN_SUMS.

        Raises:
            StoreError: as `compare`.
        """
        table, first = (
            (ROUTE_SUMS, layer) if name == "routes" else (TOKEN_SUMS, [*PER_TOKEN].index(name))
        )
        found = sums_of(lines, self.num_tokens_M, of_rows=name in ("routes", "recorded"))
        wrong = found ^ np.uint32(self.header.mask) != stored[:, first : first + len(lines)].T
        for line, part in np.argwhere(wrong)[:1].tolist():
            raise self._damaged(table, first + line, *locate(self.part_start_M, part))

    def _damaged(self, table: str, column: int, rollout: int, part: int) -> StoreError:
        name = "routes" if table == ROUTE_SUMS else COLUMNS[table][column]
        of_rows = name in ("routes", "recorded")
        begin, last = PART_TOKENS * part, int(self.num_tokens_M[rollout]) - of_rows
        end = min(begin + PART_TOKENS, last)
        what = f"the routes of MoE layer {column}" if name == "routes" else repr(name)
        places = f" in {'rows' if of_rows else 'tokens'} {begin} to {end - 1}"
        return self.file.damaged(f"rollout {rollout}: checksum of {what}", places)
