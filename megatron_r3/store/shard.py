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

_PER_ROLLOUT = {
    "group": np.int64,
    "num_tokens": np.int64,
    "policy_version": np.int64,
    "reward": np.float32,
    "sample": np.int64,
}
_PER_TOKEN = {"tokens": np.int32, "response": np.uint8, "logprobs": np.float32}
_SMALL = {**_PER_ROLLOUT, **_PER_TOKEN, "recorded": np.uint8}


class Shard:
    """A shard's tensors by name (schema: docs/rollout-store.md), and what its store says.

    Opening checks everything but the routes themselves, which are mapped and by far the largest:
    `verify` reads them.

    Attributes:
        routes_LRK: mapped: a row is read from disk when it is asked for.
        token_start_M, row_start_M: where each rollout's tokens and rows begin, and the end.

    Raises:
        StoreError: naming the file, and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy") as file:
                body = _body(path, file.metadata() or {})
                if set(file.keys()) != {*_SMALL, "routes"}:
                    raise StoreError(
                        f"{path}: tensors {sorted(file.keys())}; expected "
                        f"{sorted([*_SMALL, 'routes'])}"
                    )
                self.tensors = {name: file.get_tensor(name) for name in _SMALL}
            self.info = _info(body["info"])
            self.routes_LRK = _map_routes(path)
            self._crc32 = {name: int(body["crc32"][name]) for name in (*_SMALL, "routes")}
        except (SafetensorError, OSError) as error:
            raise StoreError(
                f"{path}: not a whole shard ({error}); copy it again or remove it"
            ) from error
        except (KeyError, TypeError) as error:
            raise StoreError(f"{path}: not a shard of this version ({error!r})") from error
        for name, tensor in self.tensors.items():
            self._check_sum(name, tensor)
        self._check_values()
        num_tokens_M = self.tensors["num_tokens"]
        self.token_start_M = np.concatenate([[0], np.cumsum(num_tokens_M)])
        self.row_start_M = np.concatenate([[0], np.cumsum(num_tokens_M - 1)])
        self._check_shapes()

    def verify(self) -> None:
        """Read all routes: their checksum, the range of every id, and that no row repeats one.

        Raises:
            ValueError: naming the file, and for a wrong id the rollout, layer and token.
        """
        self._check_sum("routes", self.routes_LRK)
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

    def _check_sum(self, name: str, tensor: np.ndarray) -> None:
        if checksum(tensor) != self._crc32[name]:
            raise StoreError(
                f"{self.path}: checksum of {name!r} differs: the shard is damaged; copy it again "
                "or remove it"
            )

    def _check_values(self) -> None:
        for name, dtype in _SMALL.items():
            tensor = self.tensors[name]
            if tensor.dtype != dtype or tensor.ndim != 1:
                raise StoreError(
                    f"{self.path}: {name} is {tensor.dtype} of {tensor.ndim} dimensions; expected "
                    f"{np.dtype(dtype)} of 1"
                )
        if not self.num_rollouts or (self.tensors["num_tokens"] < 2).any():
            raise StoreError(f"{self.path}: a shard has rollouts, and each has at least 2 tokens")
        for name in ("logprobs", "reward"):
            if not np.isfinite(self.tensors[name]).all():
                raise StoreError(f"{self.path}: {name} must be finite")
        for name in ("response", "recorded"):
            if (self.tensors[name] > 1).any():
                raise StoreError(f"{self.path}: {name} must be 0 or 1")

    def _check_shapes(self) -> None:
        num_tokens, num_rows = int(self.token_start_M[-1]), int(self.row_start_M[-1])
        lengths = {
            **dict.fromkeys(_PER_ROLLOUT, self.num_rollouts),
            **dict.fromkeys(_PER_TOKEN, num_tokens),
        }
        for name, length in lengths.items():
            if len(self.tensors[name]) != length:
                raise StoreError(
                    f"{self.path}: {len(self.tensors[name])} {name}; its rollouts need {length}"
                )
        expected = (len(self.info.moe_layers), num_rows, self.info.topk)
        if self.routes_LRK.shape != expected or len(self.tensors["recorded"]) != num_rows:
            raise StoreError(
                f"{self.path}: routes {self.routes_LRK.shape} for rollouts that need {expected}: "
                "one row for every token of a rollout but its last"
            )
        if self.routes_LRK.dtype != id_dtype(self.info.num_experts):
            raise StoreError(
                f"{self.path}: {self.routes_LRK.dtype} ids for {self.info.num_experts} experts"
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
    info = StoreInfo(**as_tuples)
    info.check()
    return info


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
