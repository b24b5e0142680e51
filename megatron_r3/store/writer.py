"""Write shards: atomic, checksummed, never over another one.

Shape suffixes: L MoE layers, R rows of all rollouts of a shard, K top-k, M rollouts.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from megatron_r3.store.schema import FORMAT, FORMAT_VERSION, Rollout, StoreError, StoreInfo

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
    tensors = _tensors(rollouts)
    directory.mkdir(parents=True, exist_ok=True)
    return _publish(directory, save(tensors, metadata_of(info, tensors)))


def _check(rollout: Rollout, info: StoreInfo, where: str) -> None:
    rollout.check(where)
    routes = rollout.routes
    got = (routes.num_layers, routes.topk, routes.num_experts)
    expected = (len(info.moe_layers), info.topk, info.num_experts)
    if got != expected:
        raise StoreError(
            f"{where}: routes of (layers, topk, experts) {got} in a store of {expected}"
        )


def _tensors(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    return {
        "routes": np.concatenate([r.routes.ids_LTK for r in rollouts], axis=1),
        "recorded": np.concatenate([r.routes.recorded_T for r in rollouts]).astype(np.uint8),
        "tokens": np.concatenate([r.tokens_N for r in rollouts]).astype(np.int32),
        "response": np.concatenate([r.response_N for r in rollouts]).astype(np.uint8),
        "logprobs": np.concatenate([r.logprobs_N for r in rollouts]).astype(np.float32),
        "num_tokens": np.array([len(r.tokens_N) for r in rollouts], np.int64),
        "reward": np.array([r.reward for r in rollouts], np.float32),
        "group": np.array([r.group for r in rollouts], np.int64),
        "sample": np.array([r.sample for r in rollouts], np.int64),
        "policy_version": np.array([r.policy_version for r in rollouts], np.int64),
    }


def checksum(tensor: np.ndarray) -> int:
    """CRC-32 of a tensor's bytes in C order."""
    return zlib.crc32(np.ascontiguousarray(tensor).data)


def metadata_of(info: StoreInfo, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """A shard's header: the store's info and a checksum of each tensor, itself checksummed."""
    body = json.dumps(
        {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "info": asdict(info),
            "crc32": {name: checksum(t) for name, t in tensors.items()},
        },
        sort_keys=True,
    )
    return {"megatron_r3": body, "crc32": str(zlib.crc32(body.encode()))}


def _publish(directory: Path, data: bytes) -> Path:
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=".shard-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
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
