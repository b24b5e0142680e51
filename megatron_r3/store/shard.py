"""One shard, opened and checked: its small tensors in memory, its routes mapped.

Shape suffixes: L MoE layers, R rows of all rollouts of a shard, K top-k, M rollouts.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_r3.routes import RoutesError, check_ids, id_dtype
from megatron_r3.store.schema import FORMAT, FORMAT_VERSION, StoreError, StoreInfo
from megatron_r3.store.writer import checksum

__all__ = ["Shard"]

_PER_ROLLOUT = ("group", "num_tokens", "policy_version", "reward")
_NAMES = (*_PER_ROLLOUT, "logprobs", "recorded", "response", "routes", "tokens")


class Shard:
    """A shard's tensors by name (schema: docs/rollout-store.md), and what its store says.

    Attributes:
        routes_LRK: mapped: a row is read from disk when it is asked for.
        token_start_M, row_start_M: where each rollout's tokens and rows begin, and the end.
    """

    def __init__(self, path: Path, verify: bool = True) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                names = set(file.keys())
                body = _body(path, metadata)
                if names != set(_NAMES):
                    raise StoreError(f"{path}: tensors {sorted(names)}; expected {sorted(_NAMES)}")
                self.tensors = {n: file.get_tensor(n) for n in _NAMES if n != "routes"}
        except (SafetensorError, OSError) as error:
            raise StoreError(
                f"{path}: not a whole shard ({error}); copy it again or remove it"
            ) from error
        self.info = _info(body["info"])
        self.routes_LRK = _map_routes(path)
        num_tokens_M = self.tensors["num_tokens"]
        self.token_start_M = np.concatenate([[0], np.cumsum(num_tokens_M)])
        self.row_start_M = np.concatenate([[0], np.cumsum(num_tokens_M - 1)])
        if verify:
            self._verify(body["crc32"])
        self._check_shapes()
        if verify:
            self._check_routes()

    @property
    def num_rollouts(self) -> int:
        """M."""
        return len(self.tensors["num_tokens"])

    def locate_token(self, token: int) -> tuple[int, int]:
        """The rollout of a token of this shard, and its place in it."""
        rollout = int(np.searchsorted(self.token_start_M, token, side="right")) - 1
        return rollout, token - int(self.token_start_M[rollout])

    def locate_row(self, row: int) -> tuple[int, int]:
        """The rollout of a row of this shard, and its token in it."""
        rollout = int(np.searchsorted(self.row_start_M, row, side="right")) - 1
        return rollout, row - int(self.row_start_M[rollout])

    def _verify(self, crc32: dict[str, int]) -> None:
        for name in _NAMES:
            tensor = self.routes_LRK if name == "routes" else self.tensors[name]
            if checksum(tensor) != crc32[name]:
                raise StoreError(
                    f"{self.path}: checksum of {name!r} differs: the shard is damaged; copy it "
                    "again or remove it"
                )

    def _check_shapes(self) -> None:
        tensors, (num_tokens, num_rows) = (
            self.tensors,
            (self.token_start_M[-1], self.row_start_M[-1]),
        )
        for name in _PER_ROLLOUT:
            if len(tensors[name]) != self.num_rollouts:
                raise StoreError(f"{self.path}: {len(tensors[name])} {name} of {self.num_rollouts}")
        for name in ("tokens", "response", "logprobs"):
            if len(tensors[name]) != num_tokens:
                raise StoreError(
                    f"{self.path}: {len(tensors[name])} {name} for {num_tokens} tokens of rollouts"
                )
        expected = (len(self.info.moe_layers), int(num_rows), self.info.topk)
        if self.routes_LRK.shape != expected or len(tensors["recorded"]) != num_rows:
            raise StoreError(
                f"{self.path}: routes {self.routes_LRK.shape} for rollouts that need {expected}: "
                "one row for every token of a rollout but its last"
            )
        if self.routes_LRK.dtype != id_dtype(self.info.num_experts):
            raise StoreError(
                f"{self.path}: {self.routes_LRK.dtype} ids for {self.info.num_experts}"
            )

    def _check_routes(self) -> None:
        recorded_R = self.tensors["recorded"].astype(bool)
        try:
            check_ids(self.routes_LRK, self.info.num_experts, recorded_R)
        except RoutesError:
            self._blame(recorded_R)
            raise

    def _blame(self, recorded_R: np.ndarray) -> None:
        """Say the error again, with the rollout and the token inside it."""
        for rollout in range(self.num_rollouts):
            rows = slice(self.row_start_M[rollout], self.row_start_M[rollout + 1])
            where = f"{self.path}: rollout {rollout}"
            check_ids(self.routes_LRK[:, rows], self.info.num_experts, recorded_R[rows], where)


def _body(path: Path, metadata: dict[str, str]) -> dict[str, Any]:
    text = metadata.get("megatron_r3", "")
    if not text:
        raise StoreError(f"{path}: a safetensors file, but not a rollout shard")
    if str(zlib.crc32(text.encode())) != metadata.get("crc32"):
        raise StoreError(f"{path}: the header is damaged; copy the shard again or remove it")
    body: dict[str, Any] = json.loads(text)
    if (body["format"], body["version"]) != (FORMAT, FORMAT_VERSION):
        raise StoreError(
            f"{path}: {body['format']!r} version {body['version']}; this megatron-r3 reads "
            f"{FORMAT!r} version {FORMAT_VERSION}"
        )
    return body


def _info(fields: dict[str, Any]) -> StoreInfo:
    as_tuples: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
    }
    return StoreInfo(**as_tuples)


def _map_routes(path: Path) -> np.ndarray:
    """Map the routes tensor: header length, JSON header, data (the safetensors format)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))["routes"]
    dtype = {"U8": np.uint8, "U16": np.uint16}[entry["dtype"]]
    offset = 8 + length + entry["data_offsets"][0]
    if 0 in entry["shape"]:
        return np.zeros(entry["shape"], dtype)
    return np.memmap(path, dtype, "r", offset, tuple(entry["shape"]))
