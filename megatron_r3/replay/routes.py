"""Routes: the expert ids that a rollout's tokens took, and the shape of a model's MoE layers.

A route is a set: the order of the ids inside K carries no meaning, but it is kept, so that what was
recorded live is replayed to the last bit. An id is one byte up to 256 experts (384 bytes a token
for 48 layers x top-8), else two.

Shape suffixes (docs/glossary.md): T, L, K.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megatron_r3.replay.words import must_be, wrong_whole

MOST_EXPERTS = 32_768  # of one MoE layer: expert ids are int16 on a device
_BLOCK_ROWS = 1 << 15  # rows that are compared at a time, so that they stay in the cache


class RoutesError(ValueError):
    """Routes that must not be trained on; the message names layer and token of a wrong id."""


@dataclass(frozen=True)
class MoEShape:
    """The MoE layers of a model: all that is needed to read routes.

    Attributes:
        num_experts: E, the experts of one MoE layer.
        topk: K, how many of them one token takes.
        moe_layers: the 0-based hidden layers that have a router, ascending. Routes count MoE layers
            instead: with `moe_layers` (1, 2, 4), layer 2 of `Routes.ids_LTK` is hidden layer 4.
    """

    num_experts: int
    topk: int
    moe_layers: tuple[int, ...]

    def wrong_shape(self) -> str | None:
        """Why no model has this shape, in a few words; None if a model can have it."""
        wrong = wrong_whole("num_experts", self.num_experts, 1, MOST_EXPERTS)
        wrong = wrong or wrong_whole("topk", self.topk, 1, self.num_experts)
        if wrong is not None:
            return wrong
        layers = self.moe_layers
        whole = isinstance(layers, tuple) and all(type(layer) is int for layer in layers)
        if (
            whole
            and layers
            and layers[0] >= 0
            and layers[-1] < 2**31
            and all(layer < following for layer, following in pairwise(layers))
        ):
            return None
        expected = "the numbers of hidden layers, from 0 on, ascending"
        return must_be("moe_layers", expected, layers)


class Origin(NamedTuple):
    """The MoE layer and the token that index [0, 0] of an array of routes stands for.

    Errors add both numbers to the indices. Example: the array holds layer 5 alone, from token 40
    on; then index [0, 2] is called "MoE layer 5, token 42" with `Origin(layer=5, token=40)`.
    """

    layer: int = 0
    token: int = 0


_FIRST = Origin()


def id_dtype(num_experts: int) -> np.dtype:
    """The stored dtype of expert ids: uint8 up to 256 experts, else uint16.

    Raises:
        RoutesError: not 1 to 32,768 experts.
    """
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise RoutesError(f"{num_experts} experts: a MoE layer must have 1 to {MOST_EXPERTS:,}")
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def check_ids(
    ids_LTK: np.ndarray,
    num_experts: int,
    recorded_T: np.ndarray | None = None,
    where: str = "routes",
    origin: Origin = _FIRST,
) -> None:
    """Refuse ids that are out of range or repeated inside a recorded row.

    Args:
        ids_LTK: ids of any integer dtype.
        num_experts: the experts of one MoE layer.
        recorded_T: bool. A row that is False was not recorded and is not checked. None means that
            every row was recorded.
        where: what the message calls the data (a file, a rollout, a request).
        origin: the layer and the token that the message names for index [0, 0].

    Raises:
        RoutesError: wrong axes or dtype, a top-k above `num_experts`, or wrong ids; for ids the
            message names the first wrong layer (counted among the MoE layers) and token.
    """
    _check_range(ids_LTK, num_experts, recorded_T, where, origin)
    _check_distinct(ids_LTK, recorded_T, where, origin)


def _check_range(
    ids_LTK: np.ndarray,
    num_experts: int,
    recorded_T: np.ndarray | None,
    where: str,
    origin: Origin,
) -> None:
    if ids_LTK.ndim != 3:
        raise RoutesError(f"{where}: routes are [layers, tokens, topk]; got shape {ids_LTK.shape}")
    if not np.issubdtype(ids_LTK.dtype, np.integer):
        raise RoutesError(f"{where}: expert ids must be integers; got {ids_LTK.dtype}")
    topk = ids_LTK.shape[-1]
    if topk > num_experts:
        raise RoutesError(f"{where}: top-{topk} of {num_experts} experts is impossible")
    signed = ids_LTK.dtype.kind == "i"
    # to find the largest and the smallest id is many times faster than to make a mask of all ids
    if ids_LTK.size and (ids_LTK.max() >= num_experts or (signed and ids_LTK.min() < 0)):
        wrong_LT = np.asarray(((ids_LTK < 0) | (ids_LTK >= num_experts)).any(-1))
        fault = f"an expert id outside 0..{num_experts - 1}"
        _refuse_rows(ids_LTK, wrong_LT, recorded_T, fault, where, origin)


def _check_distinct(
    ids_LTK: np.ndarray, recorded_T: np.ndarray | None, where: str, origin: Origin
) -> None:
    wrong_LT = repeated_rows(ids_LTK)
    _refuse_rows(ids_LTK, wrong_LT, recorded_T, "an expert twice in one row", where, origin)


def _refuse_rows(
    ids_LTK: np.ndarray,
    wrong_LT: np.ndarray,
    recorded_T: np.ndarray | None,
    fault: str,
    where: str,
    origin: Origin,
) -> None:
    if not wrong_LT.any():
        return
    if recorded_T is not None:
        wrong_LT = wrong_LT & recorded_T
    if wrong_LT.any():
        layer, token = np.argwhere(wrong_LT)[0].tolist()
        raise RoutesError(
            f"{where}: {fault} at MoE layer {origin.layer + layer}, token {origin.token + token}: "
            f"{ids_LTK[layer, token].tolist()} (rows with this fault: {int(wrong_LT.sum())})"
        )


def repeated_rows(ids: np.ndarray) -> np.ndarray:
    """Where the ids of the last axis are not pairwise distinct: bool, of `ids.shape[:-1]`.

    The comparison runs at about the speed of memory; a sort of each row would take ten times as
    long.
    """
    if ids.ndim == 3 and ids.swapaxes(0, 1).flags.c_contiguous and not ids.flags.c_contiguous:
        # Engines send [T, L, K] and callers pass its transposed view. Rows are independent, so they
        # are compared in the order in which memory has them.
        return repeated_rows(ids.swapaxes(0, 1)).swapaxes(0, 1)
    rows = np.ascontiguousarray(ids).reshape(-1, ids.shape[-1])
    repeated = np.zeros(len(rows), bool)
    for start in range(0, len(rows), _BLOCK_ROWS):
        columns = _columns(rows[start : start + _BLOCK_ROWS])
        # Two columns of a row are `shift` apart, for some shift from 1 to K - 1. Example, K = 3:
        # shift 1 compares the columns (1, 0) and (2, 1), shift 2 compares (2, 0).
        for shift in range(1, len(columns)):
            equal = columns[shift:] == columns[:-shift]
            if equal.any():  # rare, so the rows are looked for only in this case
                repeated[start : start + _BLOCK_ROWS] |= equal.any(0)
    return repeated.reshape(ids.shape[:-1])


def _columns(rows: np.ndarray) -> np.ndarray:
    """A contiguous copy `[K, rows]` of contiguous `[rows, K]`: `rows.T`, but faster.

    numpy gathers single bytes slowly, and casts whole numbers to their lowest byte fast. So each
    column is read as overlapping little-endian numbers that are as long as a row. Example, two rows
    of K = 4 ids of one byte:

        rows    3 7 1 9 | 4 0 5 2          in memory  03 07 01 09 04 00 05 02
        column 1 begins at byte 1; the number there has the bytes 07 01 09 04, and its lowest is 07

    The next number of column 1 would begin at byte 5 and end behind the array. Therefore the last
    row is copied by itself, and each column is read as one number less than there are rows.
    """
    num_rows, topk = rows.shape
    row_bytes = topk * rows.itemsize
    if rows.dtype.str not in ("|u1", "<u2") or row_bytes not in (4, 8):
        return np.ascontiguousarray(rows.T)  # the trick needs ids of 1 or 2 bytes in rows of 4 or 8
    columns = np.empty((topk, num_rows), rows.dtype)
    columns[:, -1] = rows[-1]
    for column in range(topk):
        numbers = np.ndarray(num_rows - 1, f"<u{row_bytes}", rows, offset=column * rows.itemsize)
        np.copyto(columns[column, :-1], numbers, casting="unsafe")  # keeps the lowest byte or two
    return columns


def layer_major(rows_TLK: np.ndarray) -> np.ndarray:
    """`[tokens, layers, topk]`, as engines send it, copied to `[layers, tokens, topk]`."""
    num_rows, num_layers, topk = rows_TLK.shape
    row_bytes = topk * rows_TLK.dtype.itemsize
    out_LTK = np.empty((num_layers, num_rows, topk), rows_TLK.dtype)
    source, target = rows_TLK, out_LTK
    if row_bytes in (1, 2, 4, 8) and rows_TLK.flags.c_contiguous:
        # A row that is as long as a number is moved as that number: two to four times as fast.
        # Example: the 8 one-byte ids of a top-8 row are one uint64.
        source, target = (a.view(f"u{row_bytes}")[..., 0] for a in (rows_TLK, out_LTK))
    for start in range(0, num_rows, 4096):  # 4096 rows stay in the cache
        target[:, start : start + 4096] = source[start : start + 4096].swapaxes(0, 1)
    return out_LTK


@dataclass(frozen=True)
class Routes:
    """Checked routes of T rows in L MoE layers.

    Attributes:
        ids_LTK: uint8 or uint16 (`id_dtype`), C-contiguous, layer-major.
        num_experts: the experts of one MoE layer.
        recorded_T: bool; False where the engine returned no route for the row.
    """

    ids_LTK: np.ndarray
    num_experts: int
    recorded_T: np.ndarray

    @classmethod
    def from_array(
        cls,
        ids_LTK: np.ndarray,
        num_experts: int,
        recorded_T: np.ndarray | None = None,
        where: str = "routes",
        first_token: int = 0,
    ) -> Routes:
        """Check ids of any integer dtype and keep a copy of them in the smallest dtype.

        The ids are copied, because the caller may change the array after the check.

        Args:
            first_token: what errors call row 0. The other arguments are those of `check_ids`.

        Raises:
            RoutesError: wrong axes, dtype or range, an id twice in a recorded row, or a
                `recorded_T` of another length.
        """
        ids_LTK = np.asarray(ids_LTK)
        if recorded_T is None:
            recorded_T = np.ones(ids_LTK.shape[1] if ids_LTK.ndim == 3 else 0, bool)
        recorded_T = np.array(recorded_T, bool)
        if ids_LTK.ndim == 3 and recorded_T.shape != ids_LTK.shape[1:2]:
            raise RoutesError(
                f"{where}: {recorded_T.shape[0]} recorded bits for {ids_LTK.shape[1]} rows; "
                "expected one bit for each row"
            )
        origin = Origin(token=first_token)
        _check_range(ids_LTK, num_experts, recorded_T, where, origin)
        kept_LTK = ids_LTK.astype(id_dtype(num_experts), copy=False)
        _check_distinct(kept_LTK, recorded_T, where, origin)  # faster on the small dtype
        if not kept_LTK.flags.c_contiguous:
            kept_LTK = layer_major(kept_LTK.swapaxes(0, 1))
        elif np.may_share_memory(kept_LTK, ids_LTK):
            kept_LTK = kept_LTK.copy()
        if not recorded_T.all():
            kept_LTK[:, ~recorded_T] = 0  # an engine may leave anything in rows without a route
        return cls(kept_LTK, num_experts, recorded_T)

    @property
    def num_layers(self) -> int:
        """How many MoE layers, L."""
        return self.ids_LTK.shape[0]

    @property
    def num_rows(self) -> int:
        """How many rows, T. A whole rollout has a row for each token but the last."""
        return self.ids_LTK.shape[1]

    @property
    def topk(self) -> int:
        """How many experts one token takes in one layer, K."""
        return self.ids_LTK.shape[2]
