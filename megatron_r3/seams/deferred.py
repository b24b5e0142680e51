"""Other half of the recompute and schedule patches: what a function that runs later is bound to."""

from __future__ import annotations

from megatron_r3.replay import bind_to_microbatch


def install() -> None:
    """Bind every recompute and schedule node from now on to the microbatch it is made for.

    Idempotent and stateless: without an active microbatch they run without one.
    """
    from megatron.core.tensor_parallel.random import set_deferred_binder

    set_deferred_binder(bind_to_microbatch)
