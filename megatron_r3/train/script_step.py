"""A script's own forward step under --moe-router-replay without --rollouts.

Such a script brings its own data, loss and routes, and must enter `replaying(...)` around the model
in its forward step. Otherwise every layer routes live although the option is on, and nothing in
the log shows this. So `refuse_silence` ends the training if the script does not enter `replaying`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_r3.replay.active import num_entered
from megatron_r3.train.refuse import refuse

ForwardStep = Callable[..., Any]


def refuse_silence(forward_step: ForwardStep) -> ForwardStep:
    """Wrap a forward step so that a training pass which does not say its routes ends the training.

    A pass says its routes by entering `replaying` or `recording`, or by `begin`
    (`replay/active.py`); for a micro-batch without routes it enters `replaying(None)`. Passes of
    evaluation are not checked.

    Args:
        forward_step: Megatron's, called with the data iterator and the model chunk.

    Returns:
        A function with the same signature, which Megatron inspects.
    """

    @functools.wraps(forward_step)
    def watched(data_iterator: Any, model: Any, *more: Any, **kwargs: Any) -> Any:
        before = num_entered()
        result = forward_step(data_iterator, model, *more, **kwargs)
        if model.training and num_entered() == before:
            refuse(
                "--moe-router-replay is on without --rollouts, and this script's forward step "
                "replayed nothing, so that every layer routed live: give --rollouts DIR, or enter "
                "megatron_r3.replaying(...) around the model (replaying(None) for a "
                "micro-batch without routes)"
            )
        return result

    return watched
