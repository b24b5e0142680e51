"""One shard, opened and checked: a number for each rollout in memory, the rest on disk.

Shape suffixes: L MoE layers, R rows of all rollouts of a shard, U some of its rows or its turns,
K top-k, M rollouts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from zlib_ng import zlib_ng

from megatron_r3.routes import RoutesError, check_ids, id_dtype
from megatron_r3.store.header import DTYPES, map_tensor, read_body, read_entries, read_info
from megatron_r3.store.schema import StoreError, sampled_tokens
from megatron_r3.store.writer import checksum

__all__ = ["Shard"]

_PER_ROLLOUT = {
    "group": np.int64,
    "num_tokens": np.int64,
    "num_turns": np.int64,
    "policy_version": np.int64,
    "reward": np.float32,
    "sample": np.int64,
}
_PER_TOKEN = {"tokens": np.int32, "response": np.uint8, "logprobs": np.float32}
_DTYPES = {**_PER_ROLLOUT, **_PER_TOKEN, "recorded": np.uint8, "turns": np.int32}


class Shard:
    """A shard's tensors by name (schema: docs/rollout-store.md), and what its store says.

    Opening reads one number for each rollout, and checks every shape; tokens and the like are
    mapped, and routes are read where they are asked for. `verify` reads all of it.

    Attributes:
        tensors: all but the routes.
        token_start_M, row_start_M, turn_start_M: where each rollout's begin, and the end.
        bytes_read: of routes, so far, in this process.

    Raises:
        StoreError: naming the file, and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._file: int | None = None
        try:
            with safe_open(path, framework="numpy") as file:  # it refuses what is cut or overlaps
                body, names = read_body(path, file.metadata() or {}), {*file.keys()}
            if names != {*_DTYPES, "routes"}:
                raise StoreError(
                    f"{path}: tensors {sorted(names)}; expected {sorted([*_DTYPES, 'routes'])}"
                )
            self.info = read_info(body["info"])
            entries, begin = read_entries(path)
            self.tensors = {name: map_tensor(path, entries[name], begin) for name in _DTYPES}
            self._crc32 = {name: int(body["crc32"][name]) for name in (*_DTYPES, "routes")}
        except (SafetensorError, OSError) as error:
            raise StoreError(
                f"{path}: not a whole shard ({error}); copy it again or remove it"
            ) from error
        except (KeyError, TypeError) as error:
            raise StoreError(f"{path}: not a shard of this version ({error!r})") from error
        self._check_dtypes()
        for name in _PER_ROLLOUT:
            self.tensors[name] = np.array(self.tensors[name])
            self._check_sum(name, self.tensors[name])
        self._check_counts()
        self.token_start_M, self.row_start_M, self.turn_start_M = (
            np.concatenate([[0], np.cumsum(count_M)])
            for count_M in (
                self.tensors["num_tokens"],
                self.tensors["num_tokens"] - 1,
                self.tensors["num_turns"],
            )
        )
        self._routes_begin = begin + int(entries["routes"]["data_offsets"][0])
        self._check_shapes(tuple(entries["routes"]["shape"]), entries["routes"]["dtype"])

    def __reduce__(self) -> Any:
        """Another process opens the file for itself."""
        return Shard, (self.path,)

    def __del__(self) -> None:
        """Close the file."""
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]

    @property
    def num_rollouts(self) -> int:
        """M."""
        return len(self.tensors["num_tokens"])

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.row_start_M[-1])

    def read_routes(self, rows_U: np.ndarray, layers: Sequence[int]) -> np.ndarray:
        """The routes `[len(layers), U, K]` of some rows: these bytes are read, and no others.

        Args:
            rows_U: ascending, without repeats.
            layers: trace layers.

        Raises:
            StoreError: the file was cut since it was opened.
        """
        ids_LUK = np.empty((len(layers), len(rows_U), self.info.topk), self.dtype)
        if not len(rows_U):
            return ids_LUK
        bounds = np.flatnonzero(np.diff(rows_U) != 1) + 1
        starts = [0, *bounds.tolist()]
        ends = [*bounds.tolist(), len(rows_U)]
        row_bytes = self.info.topk * self.dtype.itemsize
        for index, layer in enumerate(layers):
            for start, end in zip(starts, ends, strict=True):
                row = layer * self.num_rows + int(rows_U[start])
                self._read(ids_LUK[index, start:end], row * row_bytes)
        return ids_LUK

    def turns(self, rollout: int) -> np.ndarray:
        """First token and end of each of a rollout's turns, int32 `[U, 2]`."""
        bounds = slice(2 * self.turn_start_M[rollout], 2 * self.turn_start_M[rollout + 1])
        return np.array(self.tensors["turns"][bounds]).reshape(-1, 2)

    def verify(self) -> None:
        """Read everything: checksums, values, the range of every id, that no row repeats one.

        Raises:
            ValueError: naming the file, and for a wrong id the rollout, layer and token.
        """
        for name in (name for name in _DTYPES if name not in _PER_ROLLOUT):
            self._check_sum(name, self.tensors[name])
        self._check_values()
        recorded_R = self.tensors["recorded"].astype(bool)
        crc32, every_row = 0, np.arange(self.num_rows)
        wrong: list[int] = []
        for layer in range(len(self.info.moe_layers)):
            ids_LRK = self.read_routes(every_row, [layer])
            crc32 = zlib_ng.crc32(ids_LRK.data, crc32)
            try:
                check_ids(ids_LRK, self.info.num_experts, recorded_R)
            except RoutesError:
                wrong.append(layer)
        if crc32 != self._crc32["routes"]:
            self._damaged("routes")
        for layer in wrong:
            self._blame(layer, recorded_R)

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse token ids outside a vocabulary.

        Raises:
            StoreError: naming the file, the rollout and the token.
        """
        tokens = self.tensors["tokens"]
        foreign = np.flatnonzero((tokens < 0) | (tokens >= vocab_size))
        if len(foreign):
            rollout, token = self.locate_token(int(foreign[0]))
            raise StoreError(
                f"{self.path}: rollout {rollout}: token {token} is id {tokens[foreign[0]]}; the "
                f"vocabulary has {vocab_size}"
            )

    @property
    def dtype(self) -> np.dtype:
        """Of an expert id."""
        return id_dtype(self.info.num_experts)

    def locate_token(self, token: int) -> tuple[int, int]:
        """The rollout of a token of this shard, and its place in it."""
        rollout = int(np.searchsorted(self.token_start_M, token, side="right")) - 1
        return rollout, token - int(self.token_start_M[rollout])

    def locate_row(self, row: int) -> tuple[int, int]:
        """The rollout of a row of this shard, and its token in it."""
        rollout = int(np.searchsorted(self.row_start_M, row, side="right")) - 1
        return rollout, row - int(self.row_start_M[rollout])

    def _read(self, into: np.ndarray, offset: int) -> None:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
        rest = memoryview(into.view(np.uint8).reshape(-1))  # type: ignore[arg-type]
        offset += self._routes_begin
        while len(rest):
            count = os.preadv(self._file, [rest], offset)
            if not count:
                raise StoreError(f"{self.path}: it was cut while it is in use; copy it again")
            rest, offset = rest[count:], offset + count
            self.bytes_read += count

    def _check_sum(self, name: str, tensor: np.ndarray) -> None:
        if checksum(tensor) != self._crc32[name]:
            self._damaged(name)

    def _damaged(self, name: str) -> None:
        raise StoreError(
            f"{self.path}: checksum of {name!r} differs: the shard is damaged; copy it again "
            "or remove it"
        )

    def _check_dtypes(self) -> None:
        for name, dtype in _DTYPES.items():
            tensor = self.tensors[name]
            if tensor.dtype != dtype or tensor.ndim != 1:
                raise StoreError(
                    f"{self.path}: {name} is {tensor.dtype} of {tensor.ndim} dimensions; expected "
                    f"{np.dtype(dtype)} of 1"
                )

    def _check_counts(self) -> None:
        if not self.num_rollouts or (self.tensors["num_tokens"] < 2).any():
            raise StoreError(f"{self.path}: a shard has rollouts, and each has at least 2 tokens")
        if (self.tensors["num_turns"] < 0).any():
            raise StoreError(f"{self.path}: num_turns must not be negative")
        self._refuse_infinite("reward")

    def _check_values(self) -> None:
        self._refuse_infinite("logprobs")
        for name in ("response", "recorded"):
            if (self.tensors[name] > 1).any():
                raise StoreError(f"{self.path}: {name} must be 0 or 1")
        starts_U = np.repeat(self.token_start_M[:-1], self.tensors["num_turns"])
        ends_U = np.repeat(self.token_start_M[1:], self.tensors["num_turns"])
        turns_U2 = self.tensors["turns"].reshape(-1, 2) + starts_U[:, None]
        inside = (turns_U2[:, 0] >= starts_U).all() and (turns_U2[:, 1] <= ends_U).all()
        sampled = sampled_tokens(turns_U2, int(self.token_start_M[-1])) if inside else None
        if sampled is None or not np.array_equal(sampled, self.tensors["response"]):
            raise StoreError(f"{self.path}: its turns are not the tokens that its response names")

    def _refuse_infinite(self, name: str) -> None:
        if not np.isfinite(self.tensors[name]).all():
            raise StoreError(f"{self.path}: {name} must be finite")

    def _check_shapes(self, routes: tuple[int, ...], routes_dtype: str) -> None:
        num_tokens = int(self.token_start_M[-1])
        lengths = {
            **dict.fromkeys(_PER_ROLLOUT, self.num_rollouts),
            **dict.fromkeys(_PER_TOKEN, num_tokens),
            "turns": 2 * int(self.turn_start_M[-1]),
        }
        for name, length in lengths.items():
            if len(self.tensors[name]) != length:
                raise StoreError(
                    f"{self.path}: {len(self.tensors[name])} {name}; its rollouts need {length}"
                )
        expected = (len(self.info.moe_layers), self.num_rows, self.info.topk)
        if routes != expected or len(self.tensors["recorded"]) != self.num_rows:
            raise StoreError(
                f"{self.path}: routes {routes} for rollouts that need {expected}: "
                "one row for every token of a rollout but its last"
            )
        if DTYPES.get(routes_dtype) != self.dtype:
            raise StoreError(
                f"{self.path}: {routes_dtype} ids for {self.info.num_experts} experts; expected "
                f"{self.dtype}"
            )

    def _blame(self, layer: int, recorded_R: np.ndarray) -> None:
        """Say the error again, with the rollout and the token inside it."""
        for rollout in range(self.num_rollouts):
            rows_U = np.arange(self.row_start_M[rollout], self.row_start_M[rollout + 1])
            check_ids(
                self.read_routes(rows_U, [layer]),
                self.info.num_experts,
                recorded_R[rows_U],
                f"{self.path}: rollout {rollout}",
                first_layer=layer,
            )
