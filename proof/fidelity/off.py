"""Train a few steps on the data of `script.py`, while imports of megatron_r3's replay fail.

Megatron is imported only inside the functions that ranks run.
"""

from __future__ import annotations

import importlib.abc
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

from proof.fidelity.models import MODELS

# the modules that stay importable: they also run an unpatched tree on the CPU
_SEEN = ("cpu", "replay.ending", "train.launch", "train.pretrain_gpt")


def _is_hidden(name: str) -> bool:
    room = name.removeprefix("megatron_r3.")
    is_ours = room != name
    return is_ours and not room.startswith(_SEEN) and room not in ("replay", "train")


class _Hidden(importlib.abc.MetaPathFinder):
    """Hides the modules of megatron_r3 from imports, except those of `_SEEN`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "megatron_r3" or _is_hidden(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hide_megatron_r3() -> None:
    """Make every import of a module of megatron_r3 fail from now on, except those of `_SEEN`."""
    for name in filter(_is_hidden, list(sys.modules)):
        del sys.modules[name]
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:  # `from megatron_r3.train import step` reads the attribute
            vars(sys.modules[parent]).pop(child, None)
    sys.meta_path.insert(0, _Hidden())


Weights = dict[str, torch.Tensor]


def weights(models: Sequence[torch.nn.Module]) -> Weights:
    """Every parameter of this rank, by chunk and name."""
    return {
        f"{chunk}.{name}": parameter.detach().clone()
        for chunk, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


STEPS = 3
# options that switch on all losses and counts that the router patches touch
_ARGUMENTS = """--micro-batch-size 2 --global-batch-size 8 --lr 1e-3
--moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss
--moe-aux-loss-coeff 1e-2 1e-2 1e-2 --moe-z-loss-coeff 1e-3
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--recompute-granularity selective --recompute-modules moe
"""


def train_off(rank: int, arguments: str) -> tuple[Weights, Weights]:
    """Train a tiny model without any option of ours; return this rank's weights before and after.

    Args:
        arguments: Megatron's options of the layout.
    """
    argv = [*MODELS["base"].argv(), *shlex.split(_ARGUMENTS), *shlex.split(arguments)]
    argv += ["--train-iters", str(STEPS), "--eval-iters", "0", "--seed", "7"]
    from megatron_r3.train import launch

    hide_megatron_r3()
    from proof.fidelity.script import datasets, forward_step

    sys.argv = ["off.py", *argv]
    models: list[torch.nn.Module] = []
    before: Weights = {}

    def begin(made: list[torch.nn.Module]) -> None:
        models.extend(made)
        before.update(weights(made))

    launch.train(datasets, forward_step, begin)
    return before, weights(models)
