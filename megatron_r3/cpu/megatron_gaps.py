"""Fill in what Megatron-LM takes from CUDA, Transformer Engine, a compiler or a later Python.

Each function that `patch` calls fills one gap, which its docstring names. A function does nothing
on a release line that does not have the gap. Attention is a larger gap with a file of its own.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import sysconfig
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typing_extensions

from megatron_r3.data.digest import short_digest

_INDEX_BUILDER = "helpers_cpp"


def provide_override() -> None:
    """Add typing.override, which Python has from 3.12 on, to an older Python.

    Megatron's training loop imports it from 0.17 on.
    """
    if sys.version_info < (3, 12):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]


def disable_compiler() -> None:
    """Replace torch.compile by a function that compiles nothing.

    On a CPU torch.compile needs a C++ compiler, and compiles again for every number of tokens
    that an expert gets: a tiny training takes twice as long. Megatron decorates functions with
    torch.compile, so the mere import of Megatron makes torch import its compiler, which takes
    seconds.
    """

    def compile(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda decorated: decorated

    torch.compile = compile


def patch() -> None:
    """Fill every gap in the Megatron that is importable."""
    # Megatron requires this variable with TP or CP, so that kernels start in program order. On the
    # CPU all work is in program order.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _define_names_in_moe_utils()
    _define_names_in_random()
    _define_inference_layers()
    _define_linear_in_mla()
    _skip_fused_kernels()
    _skip_jit_warm_up()
    _let_norms_be_sequence_parallel()
    patch_index_builder()


def _import(name: str) -> ModuleType | None:
    """A module of Megatron, or None if this tree or this machine cannot import it.

    A module that cannot be imported needs no patch, and a program that imports it gets its
    ImportError.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _define(module: ModuleType, **names: Any) -> None:
    """Define names that a module uses although its import of them failed."""
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)


def _define_names_in_moe_utils() -> None:
    """Define te_general_gemm: 0.16 compares this name with None even without TE."""
    moe_utils = _import("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:
        _define(moe_utils, te_general_gemm=None)


class _NoFp8:
    """FP8GlobalStateManager without Transformer Engine."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """FP8 is never enabled."""
        return False


def _no_context(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Fill the freed storage of `output` again, under all of its views.

    CheckpointWithoutOutput frees the storage after the forward pass. Views of the output, saved by
    later operations, still point to that storage, so it must be filled in place: a new tensor would
    leave the views empty.
    """
    storage, data = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(data.nbytes())
    storage.copy_(data)


def _define_names_in_random() -> None:
    """Define the FP8 names and replace the C++ function that CheckpointWithoutOutput needs."""
    random = _import("megatron.core.tensor_parallel.random")
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
    # the CPU's random stream stands in for CUDA's here, so Megatron's warning that the CPU's stream
    # has moved is expected
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _define_inference_layers() -> None:
    """Replace two names with which MTP calls isinstance() in Megatron's main branch.

    Their base classes are TE's. Without TE the names are placeholders and no classes, so that
    isinstance() fails. They become empty classes, of which nothing is an instance.
    """
    layers = _import("megatron.core.tensor_parallel.inference_layers")
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        # the default `type` is a class: nothing is replaced if the module or the name is missing
        if not isinstance(getattr(layers, name, type), type):
            setattr(layers, name, type(name, (), {}))


def _define_linear_in_mla() -> None:
    """Make TELinear a class, as it is with TE: up to 0.16 MLA calls isinstance() with it."""
    mla = _import("megatron.core.transformer.multi_latent_attention")
    if mla is not None and not isinstance(getattr(mla, "TELinear", type), type):
        mla.TELinear = type("TELinear", (), {})  # type: ignore[attr-defined]


def _skip_fused_kernels() -> None:
    """Make Megatron compile no CUDA kernels: up to 0.16 a training first compiles some by nvcc."""
    fused_kernels = _import("megatron.legacy.fused_kernels")
    if fused_kernels is not None:
        fused_kernels.load = lambda args: None  # type: ignore[attr-defined]


def _skip_jit_warm_up() -> None:
    """Skip the warm-up of fused functions: how many random numbers it draws depends on the layout.

    On the CPU there is only one random stream, so after the warm-up two layouts would go on with
    different random numbers.
    """
    initialize = _import("megatron.training.initialize")
    if initialize is not None:
        initialize._warmup_jit_function = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _let_norms_be_sequence_parallel() -> None:
    """Let WrappedTorchNorm take sequence parallelism, which upstream has only in TE's norms.

    A rank's norm sees only the rank's part of the sequence, so its weights have only a part of
    their gradient. Megatron adds up the gradients of weights that are marked `sequence_parallel`
    over the tensor parallel ranks: marking the weights is all that is needed.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def make_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = make(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = make_marked


def patch_index_builder() -> None:
    """Make Megatron compile its dataset index builder (helpers.cpp) outside of its tree.

    Upstream's `compile_helpers` runs `make` in Megatron's tree with the pybind11 of whatever
    `python3` is found first, and ends the process if `make` fails. The sources on PyPI have no
    Makefile. Here the library is built with torch's copy of pybind11, into a cache from which every
    rank imports it.
    """
    import megatron.core.datasets as datasets
    from megatron.core.datasets import utils

    source = Path(utils.__file__).with_name("helpers.cpp")
    if not source.exists() or importlib.util.find_spec(f"{datasets.__name__}.{_INDEX_BUILDER}"):
        utils.compile_helpers = lambda: None  # a wheel has the library already
        return
    library = _library_of(source)
    # a package may have several folders: `import megatron.core.datasets.helpers_cpp` looks here too
    datasets.__path__.append(str(library.parent))
    utils.compile_helpers = lambda: _compile(source, library)


def _library_of(source: Path) -> Path:
    """The cached library's path: one for each source text, Python version and platform.

    For example `~/.cache/megatron_r3/helpers_cpp-0123456789abcdef/helpers_cpp.cpython-311-...so`.
    """
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = short_digest(source.read_bytes() + suffix.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron_r3" / f"{_INDEX_BUILDER}-{key}" / f"{_INDEX_BUILDER}{suffix}"


def _compile(source: Path, library: Path) -> None:
    """Build the library, unless the cache has it.

    If the build fails, only a warning is printed: a training on data without an index can run.
    """
    if library.exists():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    # each process builds under a name of its own, then renames: no process loads half a library
    partial = library.with_name(f"{library.name}.{os.getpid()}")
    includes = (Path(torch.__file__).parent / "include", sysconfig.get_paths()["include"])
    command = [
        *os.environ.get("CXX", "c++").split(),
        *("-O2", "-shared", "-std=c++17", "-fPIC"),
        # macOS: Python's own symbols are found when the library is loaded
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
        *(f"-I{include}" for include in includes),
        *(str(source), "-o", str(partial)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        partial.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip()
        print(
            f"warning: Megatron's dataset index builder did not compile: {reason}", file=sys.stderr
        )
