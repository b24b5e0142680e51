"""Fills the hook of patch 2: binds recomputes and schedule nodes to a micro-batch."""

from __future__ import annotations

from megatron_r3.replay.active import bind_to_microbatch


def install() -> None:
    """Have Megatron bind each recompute and schedule node to the micro-batch that is active when
    the recompute or node is made.

    Example: `checkpoint(layer)` in the forward pass of microbatch 1 keeps `layer` for the backward
    pass, in which microbatch 3 may be active. The bound `layer` still takes the routes of
    microbatch 1.

    `install` may be called any number of times. The binder stays for the whole process. While no
    microbatch is active, the binder changes nothing.
    """
    from megatron.core.deferred import set_deferred_binder

    set_deferred_binder(bind_to_microbatch)
