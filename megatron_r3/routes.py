"""Routes: the expert ids that a rollout's tokens took, in a checked container.

Shape suffixes: L MoE layers, T tokens (rows), K top-k, E experts.

A route is a set: the order of the ids inside K carries no meaning, but it is kept, so that what was
recorded live is replayed to the last bit. An id is one byte up to 256 experts (384 B a token for 48
layers x top-8), else two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


class RoutesError(ValueError):
    """Routes that must not be trained on; the message names layer, token and what was expected."""


def id_dtype(num_experts: int) -> np.dtype:
    """The stored dtype of expert ids: uint8 up to 256 experts, else uint16.

    On a device the latter are int16, so there are at most 32,768.
    """
    if not 1 <= num_experts <= 32768:
        raise RoutesError(f"{num_experts} experts: ids need 1 to 32,768 experts")
    return np.dtype(np.uint8 if num_experts <= 256 else np.uint16)


def distinct_rows(ids: np.ndarray) -> np.ndarray:
    """Where the ids of the last axis are pairwise distinct: bool, of `ids.shape[:-1]`."""
    ordered = np.sort(ids, axis=-1)
    return (ordered[..., 1:] != ordered[..., :-1]).all(-1)


def check_ids(
    ids_LTK: np.ndarray,
    num_experts: int,
    recorded_T: np.ndarray | None = None,
    where: str = "routes",
    first_token: int = 0,
    first_layer: int = 0,
) -> None:
    """Refuse ids that are out of range or repeated inside a recorded row.

    Args:
        ids_LTK: integer ids, any integer dtype.
        num_experts: E, the experts of one MoE layer.
        recorded_T: bool; rows that are False were not captured and are not checked. None: all were.
        where: what the message calls the data (a file, a rollout, a request).
        first_token, first_layer: what row 0 and layer 0 are called.

    Raises:
        RoutesError: naming the first wrong layer (index among the MoE layers) and token.
    """
    first = (first_layer, first_token)
    _check_range(ids_LTK, num_experts, recorded_T, where, first)
    _check_distinct(ids_LTK, recorded_T, where, first)


def _check_range(
    ids_LTK: np.ndarray,
    num_experts: int,
    recorded_T: np.ndarray | None,
    where: str,
    first: tuple[int, int],
) -> None:
    if ids_LTK.ndim != 3:
        raise RoutesError(f"{where}: routes are [layers, tokens, topk]; got shape {ids_LTK.shape}")
    if not np.issubdtype(ids_LTK.dtype, np.integer):
        raise RoutesError(f"{where}: expert ids are integers; got {ids_LTK.dtype}")
    if ids_LTK.shape[-1] > num_experts:
        raise RoutesError(
            f"{where}: top-{ids_LTK.shape[-1]} of {num_experts} experts is impossible"
        )
    signed = np.issubdtype(ids_LTK.dtype, np.signedinteger)
    if ids_LTK.size and (ids_LTK.max() >= num_experts or (signed and ids_LTK.min() < 0)):
        outside_LT = np.asarray(((ids_LTK < 0) | (ids_LTK >= num_experts)).any(-1))
        what = f"an expert id outside 0..{num_experts - 1}"
        _refuse_rows(ids_LTK, outside_LT, recorded_T, what, where, first)


def _check_distinct(
    ids_LTK: np.ndarray, recorded_T: np.ndarray | None, where: str, first: tuple[int, int]
) -> None:
    if _all_distinct(ids_LTK, recorded_T):
        return
    twice_LT = ~distinct_rows(ids_LTK)
    _refuse_rows(ids_LTK, twice_LT, recorded_T, "an expert twice in one row", where, first)


def _refuse_rows(
    ids_LTK: np.ndarray,
    bad_LT: np.ndarray,
    recorded_T: np.ndarray | None,
    what: str,
    where: str,
    first: tuple[int, int],
) -> None:
    if recorded_T is not None:
        bad_LT &= recorded_T
    if bad_LT.any():
        layer, row = (int(i) for i in np.argwhere(bad_LT)[0])
        raise RoutesError(
            f"{where}: {what} at MoE layer {layer + first[0]}, token {row + first[1]}: "
            f"{ids_LTK[layer, row].tolist()} ({int(bad_LT.sum())} such rows)"
        )


_BLOCK = 1 << 15  # rows compared at a time: they stay in the cache


def _all_distinct(ids_LTK: np.ndarray, recorded_T: np.ndarray | None) -> bool:
    """Whether the ids of every recorded row are distinct, at memory speed; it names no culprit."""
    if recorded_T is not None and not recorded_T.all():
        ids_LTK = ids_LTK[:, recorded_T]
    if ids_LTK.swapaxes(0, 1).flags.c_contiguous:  # the order in which engines send them
        ids_LTK = ids_LTK.swapaxes(0, 1)
    rows = np.ascontiguousarray(ids_LTK).reshape(-1, ids_LTK.shape[-1])
    for start in range(0, len(rows), _BLOCK):
        planes = _places(rows[start : start + _BLOCK])
        for shift in range(1, len(planes)):
            if (planes[shift:] == planes[:-shift]).any():
                return False
    return True


def _places(rows: np.ndarray) -> np.ndarray:
    """`[rows, topk]`, contiguous, copied to `[topk, rows]`.

    A place in a row is the low byte (or two) of a number that begins there and is as long as the
    row: numpy casts such numbers faster than it gathers bytes.
    """
    num_rows, topk = rows.shape
    if rows.dtype.str not in ("|u1", "<u2") or topk * rows.itemsize not in (4, 8):
        return np.ascontiguousarray(rows.T)
    planes = np.empty((topk, num_rows), rows.dtype)
    planes[:, -1] = rows[-1]  # after it the numbers would leave the array
    for place in range(topk):
        wide = np.ndarray(num_rows - 1, f"<u{topk * rows.itemsize}", rows, place * rows.itemsize)
        np.copyto(planes[place, :-1], wide, casting="unsafe")
    return planes


def layer_major(rows_TLK: np.ndarray) -> np.ndarray:
    """`[tokens, layers, topk]`, as engines send it, copied to `[layers, tokens, topk]`.

    A row is moved as one number where it has the size of one: twice to four times as fast.
    """
    num_rows, num_layers, topk = rows_TLK.shape
    row_bytes = topk * rows_TLK.dtype.itemsize
    out_LTK = np.empty((num_layers, num_rows, topk), rows_TLK.dtype)
    if row_bytes in (1, 2, 4, 8) and rows_TLK.flags.c_contiguous:
        source = rows_TLK.view(f"u{row_bytes}")[..., 0]
        target = out_LTK.view(f"u{row_bytes}")[..., 0]
    else:
        source, target = rows_TLK, out_LTK
    for start in range(0, num_rows, 4096):  # a block of it stays in the cache
        target[:, start : start + 4096] = source[start : start + 4096].swapaxes(0, 1)
    return out_LTK


@dataclass(frozen=True)
class Routes:
    """Checked routes of T rows in L MoE layers.

    Attributes:
        ids_LTK: uint8 or uint16 (`id_dtype`), C-contiguous, layer-major.
        num_experts: E.
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
        """Check ids of any integer dtype and keep them in the smallest one.

        Arguments are those of `check_ids`.

        Raises:
            RoutesError: wrong rank, dtype, range, or an id twice in a recorded row.
        """
        ids_LTK = np.asarray(ids_LTK)
        if recorded_T is None:
            recorded_T = np.ones(ids_LTK.shape[1] if ids_LTK.ndim == 3 else 0, bool)
        recorded_T = np.asarray(recorded_T, bool)
        if ids_LTK.ndim == 3 and recorded_T.shape != ids_LTK.shape[1:2]:
            raise RoutesError(
                f"{where}: {recorded_T.shape[0]} recorded bits for {ids_LTK.shape[1]} rows"
            )
        first = (0, first_token)
        _check_range(ids_LTK, num_experts, recorded_T, where, first)
        kept_LTK = ids_LTK.astype(id_dtype(num_experts), copy=False)
        _check_distinct(kept_LTK, recorded_T, where, first)  # faster on the small dtype
        if not kept_LTK.flags.c_contiguous:
            kept_LTK = layer_major(kept_LTK.swapaxes(0, 1))
        if not recorded_T.all():
            kept_LTK = kept_LTK.copy()
            kept_LTK[:, ~recorded_T] = 0  # what was not captured may hold anything
        return cls(kept_LTK, num_experts, recorded_T)

    @property
    def num_layers(self) -> int:
        """L, the MoE layers."""
        return self.ids_LTK.shape[0]

    @property
    def num_rows(self) -> int:
        """T, the rows: one less than the rollout's tokens (the last one was never forwarded)."""
        return self.ids_LTK.shape[1]

    @property
    def topk(self) -> int:
        """K, the experts of one token in one layer."""
        return self.ids_LTK.shape[2]
