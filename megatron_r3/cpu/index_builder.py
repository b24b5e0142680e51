"""Megatron's dataset index builder (helpers.cpp), compiled outside of Megatron's tree.

Upstream runs `make` in its own tree with the pybind11 of whatever `python3` is, and ends the
process where that fails; PyPI's sources have no Makefile. torch brings pybind11.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

_NAME = "helpers_cpp"


def patch() -> None:
    """Have `compile_helpers` build into a cache, where every rank then imports it from."""
    import megatron.core.datasets as datasets
    from megatron.core.datasets import utils

    source = Path(utils.__file__).with_name("helpers.cpp")
    if not source.exists() or importlib.util.find_spec(f"{datasets.__name__}.{_NAME}"):
        utils.compile_helpers = lambda: None  # a wheel brings it built
        return
    library = _library(source)
    datasets.__path__.append(str(library.parent))
    utils.compile_helpers = lambda: _compile(source, library)


def _library(source: Path) -> Path:
    """Where the library of this source, Python and machine lies."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    key = hashlib.sha256(source.read_bytes() + suffix.encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "megatron_r3" / f"{_NAME}-{key}" / f"{_NAME}{suffix}"


def _compile(source: Path, library: Path) -> None:
    """Build the library, unless it is there. Data that needs no index runs without a compiler."""
    if library.exists():
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    partial = library.with_name(f"{library.name}.{os.getpid()}")
    includes = (Path(torch.__file__).parent / "include", sysconfig.get_paths()["include"])
    command = [
        *os.environ.get("CXX", "c++").split(),
        *("-O2", "-shared", "-std=c++17", "-fPIC"),
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
        *(f"-I{include}" for include in includes),
        *(str(source), "-o", str(partial)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        partial.replace(library)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        print(f"warning: Megatron's dataset index builder did not compile: {why}", file=sys.stderr)
