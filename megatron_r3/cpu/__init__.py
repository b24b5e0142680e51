"""Run an unmodified Megatron-LM on CPU tensors and gloo: for tests, and for laptops.

    torchrun --nproc-per-node 2 -m megatron_r3.cpu pretrain_gpt.py ARGS    (see CPU_ARGS)

CUDA calls mean the CPU, or raise NotEmulated; what Megatron has only in Transformer Engine or NCCL
is put in its place. `worker.TreeWorker` imports a tree once and forks the ranks of many cases,
`forkserver.run_ranks` forks those of one. Out of reach: streams and races, overlap, CUDA graphs,
memory, speed.
"""

from __future__ import annotations

import importlib

from megatron_r3.cpu import (
    attention,
    deep_ep,
    device,
    gloo,
    index_builder,
    missing,
    norm,
    spawned,
)
from megatron_r3.cpu.args import CPU_ARGS
from megatron_r3.cpu.errors import InstallError, NotEmulated

__all__ = ["CPU_ARGS", "InstallError", "NotEmulated", "install"]

_state = {"installed": False}


def install() -> None:
    """Make this process, its threads and its spawned children run Megatron on the CPU.

    Call it before anything imports Megatron, which must be importable; once is enough.

    Raises:
        InstallError: torch has a GPU here, or Megatron is not importable.
    """
    if _state["installed"]:
        return
    device.install()
    missing.provide_override()
    missing.disable_compiler()
    deep_ep.provide()
    _check_importable()
    gloo.patch()
    for part in (missing, norm, attention, index_builder):
        part.patch()
    spawned.cover_spawned()
    _state["installed"] = True


def _check_importable() -> None:
    """Say what to do where there is no Megatron; what Megatron itself lacks is its own error."""
    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise InstallError(
            "Megatron-LM is not importable: put its tree on PYTHONPATH "
            "(PYTHONPATH=<tree> ... -m megatron_r3.cpu SCRIPT), or run a script of that tree"
        ) from error
