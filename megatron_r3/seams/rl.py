"""Called by patch 301: takes the turns and forward steps of Megatron's RL loop.

`pretrain()` calls `use_loop` (through seams/pretrain.py). `prepare_data_for_update()` calls
`begin_collection`; the returned object wraps the forward steps of the function's two passes.
`log_rl_throughput_metrics()` calls `log_step`. The replay itself is in megatron_r3/rl/, which is
imported only if an RL loop runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_r3.train.refuse import refuse

if TYPE_CHECKING:
    from megatron_r3.rl.rl_loop import LoopReplay

_replay: LoopReplay | None = None  # of the RL loop that runs in this process


def use_loop(args: Any, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """The forward step that pretrain() uses under --perform-rl-step instead of the script's."""
    global _replay
    from megatron.rl.rl_utils import get_rl_runtime_state

    from megatron_r3.rl.rl_loop import LoopReplay
    from megatron_r3.rl.rl_options import LoopOptions

    def packing() -> Any:
        return get_rl_runtime_state().packing_context

    try:
        options = LoopOptions.from_args(args)
    except ValueError as error:
        refuse(str(error))
    # patch 205 reads this: unset, the engine sends routes as lists of numbers, four times as long
    os.environ.setdefault("MEGATRON_INFERENCE_NDARRAY_BASE64", "1")
    _replay = LoopReplay(options, lambda: int(args.curr_iteration), packing)
    return _replay.update(forward_step)


def refuse_in_loop(args: Any) -> None:
    """Refuse what the loop cannot replay; else have the loop's engine record.

    Raises:
        ValueError: all reasons in one message.
    """
    from megatron_r3.rl.rl_options import refuse_in_loop as refuse_options

    refuse_options(args)


def begin_collection(rows: Sequence[Any], rollouts: Sequence[Any]) -> LoopReplay:
    """Read the turns of a collection; returns the object that wraps the loop's forward steps.

    Args:
        rows: what the loop trains on, of all ranks, in the order in which the loop packs the rows
            and shares them out: pairs of a rollout and the index of a turn. On main a rollout is
            one row if its turns are one sequence.
        rollouts: the rollouts of all groups.
    """
    assert _replay is not None, "pretrain() has not called use_loop"
    return _replay.begin_collection(rows, rollouts)


def log_step(iteration: int, writer: Any, wandb_writer: Any) -> str:
    """Write what the passes of the last step measured, and return it for the log line.

    All ranks call this together.
    """
    return "" if _replay is None else _replay.log(iteration, writer, wandb_writer)
