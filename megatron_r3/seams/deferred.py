"""Fills the hook of patch 2: recomputes and schedule nodes keep the micro-batch of their making."""

from __future__ import annotations

from megatron_r3.replay.active import bind_to_microbatch


def install() -> None:
    """Have Megatron bind each recompute and schedule node to the micro-batch that is active when
    the recompute or node is made.

    Example: `checkpoint(layer)` in the forward pass of microbatch 1 keeps `layer` for the backward
    pass, in which microbatch 3 may be active. The bound `layer` still takes the routes of
    microbatch 1.

    `install` may be called any number of times. The binder stays for the whole process. It changes
    nothing while no microbatch is active.
    """
    from megatron.core.deferred import set_deferred_binder

    set_deferred_binder(bind_to_microbatch)
