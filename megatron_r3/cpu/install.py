"""Make a process, its threads and its spawned children run Megatron on the CPU."""

from __future__ import annotations

import importlib
import multiprocessing.spawn
import sys
import threading
from collections.abc import Callable
from multiprocessing.managers import SyncManager
from typing import Any

from megatron_r3.cpu import attention, device, gloo, inference, megatron_gaps
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

The user must give these arguments: megatron_r3.cpu adds none, since a script may not know them.
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
config. gloo and Megatron's local layers must be chosen elsewhere: the config has no field for them.
"""

_state = {"installed": False}


def install() -> None:
    """Make this process, its threads and its spawned children run Megatron on the CPU.

    Call it before anything imports Megatron, which must be importable. A second call does nothing.

    Raises:
        InstallError: Megatron is not importable; or as `device.install`.
    """
    if _state["installed"]:
        return
    # What Megatron looks for while it is imported comes first: CUDA devices, typing.override,
    # torch.compile. The rest imports Megatron's modules and replaces names in them.
    device.install()
    megatron_gaps.provide_override()
    megatron_gaps.disable_compiler()
    _check_importable()
    gloo.patch()
    megatron_gaps.patch()
    attention.patch()
    inference.patch()
    _cover_spawned_processes()
    SyncManager.start = _start_in_a_thread  # type: ignore[method-assign,assignment]
    _state["installed"] = True


def _check_importable() -> None:
    """Refuse if there is no Megatron. The error about another missing package is passed on."""
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
    """Make each child that multiprocessing spawns call `install` before the child imports Megatron.

    A spawned child first unpickles its preparation data; then it imports the main script again,
    which imports Megatron; last it unpickles its task. So `_Install` goes into the preparation
    data:

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
    """Run the server of a `multiprocessing.Manager()` as a thread of this process.

    Megatron starts a manager at each checkpoint, for a queue. By default Python runs the manager's
    server as a process, which would import the script again, and that takes seconds.
    """
    server = manager.get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    manager._address = server.address  # as for a manager that connects to a running server
    manager.connect()
    manager.shutdown = lambda: None  # the thread ends with the process


class _Install:
    """A value that calls `install` when it is unpickled, because `__reduce__` returns that call."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[list[str]]]:
        return _install_in_child, (list(sys.path),)


def _install_in_child(path: list[str]) -> None:
    sys.path[:] = path  # without it the child could not import Megatron yet
    install()
