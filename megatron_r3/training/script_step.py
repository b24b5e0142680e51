"""A script's own forward step under --moe-router-replay without --rollouts.

Such a script brings its own data, loss and routes, and enters `replaying(...)` around the model in
its forward step. What nobody could see is a script that does not: every layer would be live, under
an option that says the opposite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_r3.placement import ATTRIBUTE
from megatron_r3.replay import num_entered
from megatron_r3.training.refuse import refuse

ForwardStep = Callable[..., Any]


def refuse_silence(forward_step: ForwardStep, args: Any) -> ForwardStep:
    """Wrap a forward step: each training pass of it must say which routes it takes.

    A pass says so by entering `replaying` or `recording`, or by `begin`. A micro-batch without
    routes enters `replaying(None)`. Evaluation is live and is not looked at.

    Args:
        forward_step: Megatron's, called with the data iterator and the model chunk.
        args: Megatron's. Routes of a script are not put in the places of a placed checkpoint.

    Returns:
        A function with the same signature, which Megatron looks at.
    """

    @functools.wraps(forward_step)
    def watched(data_iterator: Any, model: Any, *more: Any, **kwargs: Any) -> Any:
        if model.training and getattr(args, ATTRIBUTE, None) is not None:
            refuse(
                "--moe-router-replay: the loaded checkpoint has its experts in other places "
                "(--hf-placement), which the routes of this script's own forward step do not know: "
                "give --rollouts DIR, or import the weights without --hf-placement"
            )
        before = num_entered()
        result = forward_step(data_iterator, model, *more, **kwargs)
        if model.training and num_entered() == before:
            refuse(
                "--moe-router-replay is on without --rollouts, and this script's forward step "
                "replayed nothing, so that every layer was live: give --rollouts DIR, or enter "
                "megatron_r3.integrations.replaying(...) around the model (replaying(None) for a "
                "micro-batch without routes)"
            )
        return result

    return watched
