"""Make a process, its threads and its spawned children run Megatron on the CPU."""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import sys
import threading
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

from megatron_r3.cpu import attention, deep_ep, device, gloo, inference, megatron_gaps
from megatron_r3.cpu.errors import InstallError

CPU_ARGS: tuple[str, ...] = (
    "--distributed-backend=gloo",
    "--use-cpu-initialization",
    "--transformer-impl=local",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
)
"""The arguments that a Megatron pretrain script needs on a machine without a GPU: gloo instead of
NCCL, weights initialised on the CPU, and nothing of Transformer Engine or apex.

Nothing adds them to a command line: the script may not be Megatron's own and may not know them.
"""

CPU_CONFIG: dict[str, bool] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
"""The fields of TransformerConfig that do what CPU_ARGS does, for a program that makes its own
config. The backend and Megatron's local layers are no fields of a config.
"""

_state = {"installed": False}


def install() -> None:
    """Make this process, its threads and its spawned children run Megatron on the CPU.

    Call it before anything imports Megatron, which must be importable. A second call does nothing.

    Raises:
        InstallError: torch has a GPU here, or Megatron is not importable.
    """
    if _state["installed"]:
        return
    # CUDA devices, typing.override and deep_ep come first: Megatron looks for them while it is
    # imported. The rest replaces names of Megatron's own modules, and so imports them.
    device.install()
    megatron_gaps.provide_override()
    megatron_gaps.disable_compiler()
    deep_ep.provide()
    _check_importable()
    gloo.patch()
    megatron_gaps.patch()
    attention.patch()
    inference.patch()
    _cover_spawned_processes()
    SyncManager.start = _start_in_a_thread  # type: ignore[method-assign,assignment]
    _state["installed"] = True


def _check_importable() -> None:
    """Refuse if there is no Megatron. If Megatron lacks a package, its own error is raised."""
    try:
        importlib.import_module("megatron.core")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise InstallError(
            "Megatron-LM is not importable: put its tree on PYTHONPATH "
            "(PYTHONPATH=<tree> ... -m megatron_r3.cpu SCRIPT), or run a script of that tree"
        ) from error


def _cover_spawned_processes() -> None:
    """Have children that multiprocessing spawns call `install` before they import anything.

    A spawned child starts from nothing: it unpickles its preparation data, imports the main script
    again, which imports Megatron, and only then unpickles its task. An `_Install` in the
    preparation data is unpickled with it, so before Megatron is imported:

        {"name": ..., "sys_path": ..., "init_main_from_path": ..., "megatron_r3.cpu": _Install()}
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_with_install(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        if "init_main_from_path" in data:
            data["megatron_r3.cpu"] = _Install()
        return data

    multiprocessing.spawn.get_preparation_data = prepare_with_install


def _start_in_a_thread(manager: Any) -> None:
    """Start a `multiprocessing.Manager()` in this process; each checkpoint makes one for a queue.

    The server of a manager is a process otherwise. It would import the script again, for six
    seconds of CPU.
    """
    server = manager.get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    manager._address = server.address  # what a manager has that did not start its server
    manager.connect()
    manager.shutdown = lambda: None  # the thread ends with the process


class _Install:
    """A value whose unpickling installs: pickle calls what `__reduce__` names."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[list[str]]]:
        return _install_in_child, (list(sys.path),)


def _install_in_child(path: list[str]) -> None:
    sys.path[:] = path  # without it the child could not import Megatron yet
    install()
