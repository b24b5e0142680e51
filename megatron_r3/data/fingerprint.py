"""Which policy sampled: a digest of each layer's router weights, and one of all weights.

The router digests tell whether a rollout comes from the policy that is trained. Every tensor- and
expert-parallel rank has whole router weights, so each rank can compare the layers that it has, in
any layout. Weights are compared as bfloat16, the form in which samplers hold them; weights that are
trained in float32 round to the same bits. Two policies have the same digests if the router is
frozen, or if it changed by less than bfloat16 resolves.

The policy stamp covers every byte of every weight, so it tells such policies apart too.

A transformers directory is read without torch, whose import takes seconds and hundreds of
megabytes.

Shape suffixes (docs/glossary.md): E, H.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from megatron_r3.data.digest import short_digest
from megatron_r3.data.untrusted import read_json

if TYPE_CHECKING:
    from torch import Tensor


_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_ADAPTER = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_THREADS = 4
_PIECE = 1 << 22  # bytes of a tensor that a thread holds at a time
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


def router_digest(weight_EH: Tensor) -> str:
    """16 hex digits for one router's weights `[experts, hidden]`, of any float dtype and device."""
    import torch  # the caller, who has a tensor, has imported torch already

    as_bytes = weight_EH.detach().to(torch.bfloat16).cpu().contiguous().view(torch.uint8)
    return short_digest(as_bytes.numpy().tobytes())


def router_fingerprint(directory: Path, moe_layers: tuple[int, ...]) -> tuple[str, ...]:
    """The digest of each MoE layer's router weights in a transformers directory.

    Raises:
        ValueError: a file that is not whole, or no weights called `mlp.gate.weight` in a layer, as
            Qwen3-MoE and DeepSeek call them.
    """
    tensors = {tensor.name: tensor for tensor in _tensors(directory)}
    digests = []
    for layer in moe_layers:
        name = f"model.layers.{layer}.mlp.gate.weight"
        if name not in tensors:
            raise ValueError(f"{directory}: no tensor {name} in its *.safetensors")
        digests.append(short_digest(_as_bfloat16(tensors[name])))
    return tuple(digests)


def policy_stamp(directory: Path) -> str:
    """16 hex digits for all weights of a transformers directory, however its files are split.

    The stamp covers the name, dtype, shape and bytes of every tensor in the *.safetensors, and the
    settings of an adapter (`adapter_config.json`) if there is one. Some gigabytes a second are
    read, with a few megabytes in memory at a time.

    Raises:
        ValueError: a file that is not whole, or a tensor that two files have.
    """
    tensors = sorted(_tensors(directory), key=lambda tensor: (tensor.kind, tensor.name))
    for one, other in pairwise(tensors):
        if (one.kind, one.name) == (other.kind, other.name):
            raise ValueError(
                f"{one.path} and {other.path.name} both have the tensor {one.name}, and an engine "
                "may load either; remove one of the files"
            )
    stop = threading.Event()
    whole = hashlib.sha256()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        try:
            digests = pool.map(lambda tensor: tensor.digest(stop), tensors)
            for tensor, digest in zip(tensors, digests, strict=True):
                entry = [tensor.kind, tensor.name, tensor.dtype, tensor.shape, digest]
                whole.update(json.dumps(entry).encode() + b"\n")
        except BaseException:  # Ctrl-C too: the threads would read on for minutes without this
            stop.set()
            raise
    config = directory / _ADAPTER_CONFIG
    if config.exists():
        settings = read_json(config.read_bytes(), str(config))
        whole.update(json.dumps(settings, sort_keys=True).encode())
    return whole.hexdigest()[:16]


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor's bytes lie.

    Attributes:
        kind: "adapter" or "". Some adapters call their tensors as the model does.
        begin, end: where the bytes lie in the file.
    """

    path: Path
    kind: str
    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int

    def pieces(self) -> Iterator[bytes]:
        """The tensor's bytes, a few megabytes at a time."""
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            left = self.end - self.begin
            while left:
                piece = file.read(min(left, _PIECE))
                if not piece:
                    raise ValueError(f"{self.path}: the file was truncated while it was read")
                left -= len(piece)
                yield piece

    def digest(self, stop: threading.Event) -> str:
        """SHA-256 of the tensor's bytes; worthless once `stop` is set, when reading ends early."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            if stop.is_set():
                break
            digest.update(piece)  # releases the GIL, so threads hash at the same time
        return digest.hexdigest()


def _tensors(directory: Path) -> list[_Tensor]:
    """Every tensor of a directory's *.safetensors."""
    tensors = []
    for path in sorted(directory.glob("*.safetensors")):
        kind = "adapter" if path.name == _ADAPTER else ""
        entries, begin = _entries(path)
        for name, entry in entries.items():
            first, end = entry["data_offsets"]
            place = (begin + first, begin + end)
            tensors.append(_Tensor(path, kind, name, entry["dtype"], entry["shape"], *place))
    return tensors


def _entries(path: Path) -> tuple[dict[str, Any], int]:
    """The header's entry of each tensor, and where in the file the tensors' bytes begin.

    Raises:
        ValueError: not a whole safetensors file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass  # opening refuses truncated files, overlapping tensors and gaps between them
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = read_json(file.read(length), str(path), _LONGEST_HEADER)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
    header.pop("__metadata__", None)
    return header, 8 + length


def _as_bfloat16(tensor: _Tensor) -> bytes:
    """The bytes of a tensor as bfloat16, rounded as torch does: to the nearest, ties to even."""
    data = b"".join(tensor.pieces())
    if tensor.dtype == "BF16":
        return data
    if tensor.dtype not in _FLOATS:
        raise ValueError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype}; router weights are BF16, F16, F32 or "
            "F64"
        )
    with np.errstate(over="ignore"):
        floats = np.frombuffer(data, _FLOATS[tensor.dtype]).astype(np.float32)
    # The upper half of a float32 is a bfloat16, rounded down. Adding 0x7FFF, and 1 more if that
    # upper half is odd, rounds to the nearest, ties to even. Two ties as examples:
    #   0x3F80_8000 + 0x7FFF     = 0x3F80_FFFF, so the even 0x3F80 stays
    #   0x3F81_8000 + 0x7FFF + 1 = 0x3F82_0000, so the odd 0x3F81 becomes the even 0x3F82
    # With a NaN, this addition could carry into the sign bit: so NaNs become 0x7FC0, as in torch.
    bits = floats.view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(floats), np.uint32(0x7FC0), rounded).astype("<u2").tobytes()
