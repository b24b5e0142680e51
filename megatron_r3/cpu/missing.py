"""Names and steps that Megatron takes from CUDA, Transformer Engine, a compiler or a later Python.

Each function is one such gap, and leaves alone what this release line of Megatron does not have.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import typing
from types import ModuleType
from typing import Any

import torch
import torch._dynamo.config
import typing_extensions


def provide_override() -> None:
    """typing.override is of Python 3.12; Megatron's training loop imports it from 0.17 on."""
    if sys.version_info < (3, 12):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]


def disable_compiler() -> None:
    """No torch.compile: it needs a C++ compiler here, and compiles again for every number of tokens
    that an expert gets; a tiny training takes twice as long with it.
    """
    torch._dynamo.config.disable = True


def patch() -> None:
    """Fill every gap in the Megatron that is importable."""
    # TP and CP ask for kernels to start in program order, as CPU work does
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _names_of_moe_utils()
    _names_of_recompute()
    _inference_layers()
    _fused_kernels()
    _jit_warm_up()


def _module(name: str) -> ModuleType | None:
    """A part of Megatron, or None where this tree or this machine cannot import it.

    Without it nobody can use what would be patched; who needs it gets the ImportError itself.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _define(module: ModuleType, **names: Any) -> None:
    """Define what the module uses and has not imported."""
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)


def _names_of_moe_utils() -> None:
    """0.16 asks `te_general_gemm is None` where the import of TE failed."""
    moe_utils = _module("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:
        _define(moe_utils, te_general_gemm=None)


class _NoFp8:
    """FP8GlobalStateManager without TE."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """There is no FP8."""
        return False


def _no_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fill the freed storage of `output` again, under all of its views, without a compiler."""
    storage, data = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(data.nbytes())
    storage.copy_(data)


def _names_of_recompute() -> None:
    """CheckpointWithoutOutput names TE's FP8, and compiles C++ to share a storage."""
    random = _module("megatron.core.tensor_parallel.random")
    if random is None:
        return
    _define(
        random,
        FP8GlobalStateManager=_NoFp8,
        activation_recompute_forward=_no_context,
        fp8_autocast=_no_context,
    )
    if hasattr(random, "_get_share_storage"):
        random._get_share_storage = lambda: _share_storage  # type: ignore[attr-defined]
    # the one random stream is the CPU's: that it moved is what was asked for
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _inference_layers() -> None:
    """MTP on main asks whether a layer is of classes that are none without TE's to derive from."""
    layers = _module("megatron.core.tensor_parallel.inference_layers")
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        if not isinstance(getattr(layers, name, type), type):
            setattr(layers, name, type(name, (), {}))


def _fused_kernels() -> None:
    """Up to 0.16 the start runs nvcc."""
    fused_kernels = _module("megatron.legacy.fused_kernels")
    if fused_kernels is not None:
        fused_kernels.load = lambda args: None  # type: ignore[attr-defined]


def _jit_warm_up() -> None:
    """The warm-up of the fused functions draws from the one random stream, by layout: skip it."""
    initialize = _module("megatron.training.initialize")
    if initialize is not None:
        initialize._warmup_jit_function = lambda *args, **kwargs: None  # type: ignore[attr-defined]
