"""Other half of the patch "deferred": what will run later keeps the microbatch it was made for."""

from __future__ import annotations

from megatron_r3.replay.active import bind_to_microbatch


def install() -> None:
    """Bind every recompute and schedule node that is made from now on to its microbatch.

    Example: `checkpoint(layer)` in the forward pass of microbatch 1 keeps `layer` for the backward
    pass, in which microbatch 3 may be active; bound, it still takes the routes of microbatch 1.

    `install` may be called any number of times. The binder stays for the whole process. Without an
    active microbatch the binder changes nothing: what is made then runs live.
    """
    from megatron.core.deferred import set_deferred_binder

    set_deferred_binder(bind_to_microbatch)
