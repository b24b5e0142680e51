"""Stand-ins for what Megatron's RL loop imports and never uses on the CPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any


def stand_in() -> None:
    """If openai is installed, replace its aiohttp client, and stand in for wandb if it is missing.

    Without openai the RL loop cannot be imported, and nothing is replaced.
    """
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
    """Give the RL loop to a `megatron.training` that is imported already; return `rl_utils`.

    `megatron.training` tries to import the loop once, when it is imported itself. The stand-ins
    were missing then.
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
