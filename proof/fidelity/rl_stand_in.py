"""What Megatron's RL loop imports and never uses on the CPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any


def stand_in() -> None:
    """Stand in for wandb, and for openai's client on aiohttp; does nothing without openai."""
    if importlib.util.find_spec("openai") is None:
        return
    import openai

    if importlib.util.find_spec("wandb") is None and "wandb" not in sys.modules:
        run = types.ModuleType("wandb.wandb_run")
        run.Run = object  # type: ignore[attr-defined]
        wandb = types.ModuleType("wandb")
        wandb.wandb_run = run  # type: ignore[attr-defined]
        sys.modules |= {"wandb": wandb, "wandb.wandb_run": run}
    openai.DefaultAioHttpClient = openai.DefaultAsyncHttpxClient


def admit_loop() -> Any:
    """Have a `megatron.training` that was imported before know the RL loop; returns `rl_utils`.

    It looks once, when it is imported, whether the loop can be imported.
    """
    stand_in()
    from megatron.rl import rl_profiling, rl_utils
    from megatron.training import training

    known: dict[str, Any] = vars(training)
    known |= {"rl_utils": rl_utils, "has_rl_utils": True}
    names = "RL_LOGGABLE_TIMER_NAMES initialize_rl_profiler log_iteration_profile"
    for name in [*names.split(), "shutdown_rl_profiler"]:
        known[name] = getattr(rl_profiling, name)
    return rl_utils
