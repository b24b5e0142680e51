"""Digests that tell which policy sampled: of each layer's router weights, and of all weights.

The router digests tell whether a rollout comes from the policy that is trained. Every tensor- and
expert-parallel rank has whole router weights, so each rank can compare the layers that it has, in
any layout. Weights are compared as bfloat16, the form in which samplers hold them; weights that are
trained in float32 round to the same bits. Two policies have the same router digests if the router
is frozen, or if it changed by less than bfloat16 resolves.

The policy stamp covers every byte of every weight, so it tells such policies apart too.

Shape suffixes (docs/glossary.md): E, H.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_r3.data.digest import short_digest
from megatron_r3.data.untrusted import read_json

if TYPE_CHECKING:
    from torch import Tensor

_ROUTER_TYPES = ("BF16", "F16", "F32", "F64")
_ADAPTER = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_THREADS = 4


def router_digest(weight_EH: Tensor) -> str:
    """16 hex digits for one router's weights `[experts, hidden]`, of any float dtype and device."""
    import torch  # the caller, who has a tensor, has imported torch already

    as_bytes = weight_EH.detach().to(torch.bfloat16).cpu().contiguous().view(torch.uint8)
    return short_digest(as_bytes.numpy().tobytes())


def router_fingerprint(directory: Path, moe_layers: tuple[int, ...]) -> tuple[str, ...]:
    """The digest of each MoE layer's router weights in a transformers directory.

    Raises:
        ValueError: a file is not whole; a layer has no `mlp.gate.weight`, the name in Qwen3-MoE and
            DeepSeek; or its dtype is none of BF16, F16, F32 and F64.
    """
    tensors = {tensor.name: tensor for tensor in _tensors(directory)}
    digests = []
    for layer in moe_layers:
        name = f"model.layers.{layer}.mlp.gate.weight"
        if name not in tensors:
            raise ValueError(f"{directory}: no tensor {name} in its *.safetensors")
        path = tensors[name].path
        with _opened(path) as file:
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _ROUTER_TYPES:
                known = ", ".join(_ROUTER_TYPES)
                raise ValueError(f"{path}: {name} is {dtype}; router weights are one of {known}")
            digests.append(router_digest(file.get_tensor(name)))
    return tuple(digests)


def policy_stamp(directory: Path) -> str:
    """16 hex digits for all weights of a transformers directory, however its files are split.

    The stamp covers the name, dtype, shape and bytes of every tensor in the *.safetensors, and the
    settings of an adapter (`adapter_config.json`) if there is one. At most four tensors are in
    memory at a time.

    Raises:
        ValueError: a file is not whole, two files have the same tensor, or `adapter_config.json`
            cannot be read as JSON.
    """
    tensors = sorted(_tensors(directory))
    for one, other in pairwise(tensors):
        if (one.kind, one.name) == (other.kind, other.name):
            raise ValueError(
                f"{one.path} and {other.path.name} both have the tensor {one.name}, and an engine "
                "may load either; remove one of the files"
            )
    whole = hashlib.sha256()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for entry in pool.map(_entry, tensors):
            whole.update(json.dumps(entry).encode() + b"\n")
    config = directory / _ADAPTER_CONFIG
    if config.exists():
        settings = read_json(config.read_bytes(), str(config))
        whole.update(json.dumps(settings, sort_keys=True).encode())
    return whole.hexdigest()[:16]


class _Tensor(NamedTuple):
    """A tensor in one of a directory's files.

    Attributes:
        kind: "adapter" in an adapter's file, else "". Some adapters name tensors as the model does.
    """

    kind: str
    name: str
    path: Path


def _tensors(directory: Path) -> list[_Tensor]:
    """Every tensor of a directory's *.safetensors."""
    tensors = []
    for path in sorted(directory.glob("*.safetensors")):
        kind = "adapter" if path.name == _ADAPTER else ""
        with _opened(path) as file:
            tensors += [_Tensor(kind, name, path) for name in file.keys()]  # noqa: SIM118
    return tensors


def _entry(tensor: _Tensor) -> list[Any]:
    """The kind, name, dtype and shape of a tensor, and the digest of its bytes."""
    import torch

    with _opened(tensor.path) as file:
        header = file.get_slice(tensor.name)
        data = file.get_tensor(tensor.name).reshape(-1).view(torch.uint8).numpy()
    # hashing releases the GIL, so threads hash at the same time
    digest = hashlib.sha256(data).hexdigest()
    return [tensor.kind, tensor.name, header.get_dtype(), header.get_shape(), digest]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; opening it refuses cut files, overlapping tensors and gaps."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
