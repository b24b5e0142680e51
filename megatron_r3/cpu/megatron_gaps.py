"""Fill in what Megatron-LM takes from CUDA, Transformer Engine, a compiler or a later Python.

Each private function fills one gap, named in its docstring, and leaves alone what this release line
of Megatron does not have. Attention and DeepEP are larger gaps with files of their own.
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
    """Have torch.compile give back the function that it gets.

    On a CPU torch.compile needs a C++ compiler, and compiles again for every number of tokens
    that an expert gets: a tiny training takes twice as long with it. Megatron decorates functions
    with it while it is imported. For that alone torch would import its compiler, in seconds.
    """

    def compile(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda decorated: decorated

    torch.compile = compile


def patch() -> None:
    """Fill every gap in the Megatron that is importable."""
    # Megatron asks for it with TP and CP, so that kernels start in program order, as CPU work does
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

    If the module cannot be imported, nobody can use what would be patched in it; whoever needs the
    module gets its ImportError.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _define(module: ModuleType, **names: Any) -> None:
    """Define names that the module uses although its import of them failed."""
    for name, value in names.items():
        if not hasattr(module, name):
            setattr(module, name, value)


def _define_names_in_moe_utils() -> None:
    """Define te_general_gemm: 0.16 compares it with None even where its import from TE failed."""
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
    """CheckpointWithoutOutput names functions of TE's FP8, and compiles C++ to share a storage."""
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
    """On main, MTP calls isinstance() with classes that are no classes where TE is missing.

    The two names are placeholders then, because their base classes are TE's. They become real
    classes that nothing is an instance of.
    """
    layers = _import("megatron.core.tensor_parallel.inference_layers")
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        # the default is a class: without the module, or without the name, there is nothing to do
        if not isinstance(getattr(layers, name, type), type):
            setattr(layers, name, type(name, (), {}))


def _define_linear_in_mla() -> None:
    """Up to 0.16, MLA calls isinstance() with TELinear, which is no class where TE is missing."""
    mla = _import("megatron.core.transformer.multi_latent_attention")
    if mla is not None and not isinstance(getattr(mla, "TELinear", type), type):
        mla.TELinear = type("TELinear", (), {})  # type: ignore[attr-defined]


def _skip_fused_kernels() -> None:
    """Up to 0.16 a training starts with compiling CUDA kernels by nvcc."""
    fused_kernels = _import("megatron.legacy.fused_kernels")
    if fused_kernels is not None:
        fused_kernels.load = lambda args: None  # type: ignore[attr-defined]


def _skip_jit_warm_up() -> None:
    """The warm-up of the fused functions draws random numbers; how many depends on the layout.

    Here they would come from the one random stream that there is, and runs of two layouts would
    go on with different numbers.
    """
    initialize = _import("megatron.training.initialize")
    if initialize is not None:
        initialize._warmup_jit_function = lambda *args, **kwargs: None  # type: ignore[attr-defined]


def _let_norms_be_sequence_parallel() -> None:
    """WrappedTorchNorm refuses sequence parallelism, which Megatron has only in TE's norms.

    Under sequence parallelism the norm of a rank sees only its part of the sequence, so that its
    weights have only a part of their gradient. Megatron adds up the gradients of weights that are
    marked `sequence_parallel` over the tensor parallel ranks: marking them is all that is needed.
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
    """Have Megatron's dataset index builder (helpers.cpp) compiled outside of Megatron's tree.

    Upstream's `compile_helpers` runs `make` in its own tree with the pybind11 of whatever `python3`
    is found first, and ends the process if that fails; the sources on PyPI have no Makefile. Here
    the library goes into a cache, with torch's copy of pybind11, and every rank imports it from
    there.
    """
    import megatron.core.datasets as datasets
    from megatron.core.datasets import utils

    source = Path(utils.__file__).with_name("helpers.cpp")
    if not source.exists() or importlib.util.find_spec(f"{datasets.__name__}.{_INDEX_BUILDER}"):
        utils.compile_helpers = lambda: None  # a wheel has it built
        return
    library = _library_of(source)
    # a package may have several folders: Megatron's `import ...datasets.helpers_cpp` finds it here
    datasets.__path__.append(str(library.parent))
    utils.compile_helpers = lambda: _compile(source, library)


def _library_of(source: Path) -> Path:
    """Where the library is kept that belongs to this source, Python and machine.

    For example `~/.cache/megatron_r3/helpers_cpp-0123456789abcdef/helpers_cpp.cpython-311-...so`.
    """
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = short_digest(source.read_bytes() + suffix.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron_r3" / f"{_INDEX_BUILDER}-{key}" / f"{_INDEX_BUILDER}{suffix}"


def _compile(source: Path, library: Path) -> None:
    """Build the library, unless it is there.

    A failure is only a warning: a training whose data needs no index runs without a compiler.
    """
    if library.exists():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    # each process builds a file of its own and renames it: no process sees half a library
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
