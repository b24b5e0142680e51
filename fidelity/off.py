"""Option off: training with the script's own data, every import of megatron_r3 failing.

Megatron is imported only inside the functions that ranks run.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["hide_megatron_r3", "weights"]

# what the test itself needs to run Megatron here
_SEEN = ("megatron_r3.cpu", "megatron_r3.launch")


class _Hidden(importlib.abc.MetaPathFinder):
    """megatron_r3 is not importable, but for what runs an unpatched tree too."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("megatron_r3") and not name.startswith(_SEEN):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide_megatron_r3() -> None:
    """Make every import of megatron_r3 fail from now on."""
    for name in [n for n in sys.modules if n.startswith("megatron_r3.")]:
        if not name.startswith(_SEEN):
            del sys.modules[name]
    sys.meta_path.insert(0, _Hidden())


def weights(models: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter of this rank, by chunk and name."""
    return {
        f"{chunk}.{name}": parameter.detach().clone()
        for chunk, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }
