"""The CPU layer in processes that multiprocessing spawns: they start from nothing."""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable
from typing import Any


def _install_in_child(path: list[str]) -> None:
    from megatron_r3.cpu import install

    sys.path[:] = path
    install()


class _Install:
    """Unpickled by the child before it imports the main script: that installs the layer."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[list[str]]]:
        return _install_in_child, (list(sys.path),)


def cover_spawned() -> None:
    """Send the layer along with what a spawned child is given first.

    A child imports the main script again, and with it Megatron. Where the main module is this
    package's own, a child has nothing of Megatron's to run (every checkpoint spawns a queue).
    """
    prepare = multiprocessing.spawn.get_preparation_data

    def prepare_with_layer(name: str) -> dict[str, Any]:
        data: dict[str, Any] = prepare(name)
        if data.get("init_main_from_name", "").startswith("megatron_r3.cpu."):
            del data["init_main_from_name"]
        elif "init_main_from_path" in data:
            data["megatron_r3.cpu"] = _Install()
        return data

    multiprocessing.spawn.get_preparation_data = prepare_with_layer
