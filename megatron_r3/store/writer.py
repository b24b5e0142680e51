"""Write shards: atomic, checksummed, never over another one.

Shape suffixes: L MoE layers, R rows of all rollouts of a shard, K top-k, M rollouts.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.store.schema import FORMAT, FORMAT_VERSION, Rollout, StoreError, StoreInfo
from megatron_r3.store.stream import Streamed, write_safetensors

__all__ = ["SHARD_GLOB", "checksum", "metadata_of", "write_shard"]

SHARD_GLOB = "shard-[0-9]*.safetensors"


def write_shard(directory: Path, info: StoreInfo, rollouts: Sequence[Rollout]) -> Path:
    """Append one shard to the store; readers see it whole or not at all.

    Returns:
        The new file, `shard-NNNNN.safetensors`.

    Raises:
        StoreError: a rollout whose shapes do not belong together or do not fit `info`.
    """
    info.check()
    if not rollouts:
        raise StoreError(f"{directory}: a shard holds at least one rollout")
    for index, rollout in enumerate(rollouts):
        _check(rollout, info, f"{directory}: rollout {index}")
    directory.mkdir(parents=True, exist_ok=True)
    return _publish(directory, _tensors(rollouts), partial(_metadata, info))


def _check(rollout: Rollout, info: StoreInfo, where: str) -> None:
    rollout.check(where)
    routes = rollout.routes
    got = (routes.num_layers, routes.topk, routes.num_experts)
    expected = (len(info.moe_layers), info.topk, info.num_experts)
    if got != expected:
        raise StoreError(
            f"{where}: routes of (layers, topk, experts) {got} in a store of {expected}"
        )


def _tensors(rollouts: Sequence[Rollout]) -> dict[str, Streamed]:
    small: dict[str, np.ndarray] = {
        "recorded": np.concatenate([r.routes.recorded_T for r in rollouts]).astype(np.uint8),
        "tokens": np.concatenate([r.tokens_N for r in rollouts]).astype(np.int32),
        "response": np.concatenate([r.response_N for r in rollouts]).astype(np.uint8),
        "logprobs": np.concatenate([r.logprobs_N for r in rollouts]).astype(np.float32),
        "turns": np.concatenate([r.spans_U2 for r in rollouts]).reshape(-1),
        "num_tokens": np.array([len(r.tokens_N) for r in rollouts], np.int64),
        "num_turns": np.array([len(r.spans_U2) for r in rollouts], np.int64),
        "reward": np.array([r.reward for r in rollouts], np.float32),
        "group": np.array([r.group for r in rollouts], np.int64),
        "sample": np.array([r.sample for r in rollouts], np.int64),
        "policy_version": np.array([r.policy_version for r in rollouts], np.int64),
    }
    first = rollouts[0].routes
    shape = (first.num_layers, sum(r.routes.num_rows for r in rollouts), first.topk)
    routes = Streamed(first.ids_LTK.dtype, shape, _layers(rollouts))
    return {"routes": routes, **{n: Streamed(t.dtype, t.shape, [[t]]) for n, t in small.items()}}


def _layers(rollouts: Sequence[Rollout]) -> Iterator[list[np.ndarray]]:
    """The routes of all rollouts, a layer at a time, from where they lie."""
    for layer in range(rollouts[0].routes.num_layers):
        yield [rollout.routes.ids_LTK[layer] for rollout in rollouts]


def checksum(tensor: np.ndarray) -> int:
    """CRC-32 of a tensor's bytes in C order."""
    return int(zlib_ng.crc32(np.ascontiguousarray(tensor).data))


def metadata_of(info: StoreInfo, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """A shard's header: the store's info and a checksum of each tensor, itself checksummed."""
    return _metadata(info, {name: checksum(tensor) for name, tensor in tensors.items()})


def _metadata(info: StoreInfo, crc32: Mapping[str, int]) -> dict[str, str]:
    body = json.dumps(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "info": asdict(info),
            "crc32": dict(crc32),
        },
        sort_keys=True,
    )
    return {"megatron_r3": body, "crc32": str(zlib.crc32(body.encode()))}


def _publish(
    directory: Path,
    tensors: Mapping[str, Streamed],
    metadata_of: Callable[[Mapping[str, int]], dict[str, str]],
) -> Path:
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".shard-", suffix=".tmp")
    try:
        with open(descriptor, "wb", buffering=0) as file:
            write_safetensors(file, tensors, metadata_of)
            os.fsync(descriptor)
        os.chmod(name, 0o644)
        return _link_next(directory, name)
    finally:
        os.unlink(name)


def _link_next(directory: Path, name: str) -> Path:
    """Give the file the next free shard number: link refuses to overwrite, unlike rename."""
    number = len(list(directory.glob(SHARD_GLOB)))
    while True:
        path = directory / f"shard-{number:05d}.safetensors"
        try:
            os.link(name, path)
        except FileExistsError:
            number += 1
            continue
        folder = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return path
