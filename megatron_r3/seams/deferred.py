"""Other half of the recompute patch: what Megatron binds a function to that it will run again."""

from __future__ import annotations

from megatron_r3.replay import bind_to_microbatch

__all__ = ["install"]


def install() -> None:
    """Bind every recompute from now on to the microbatch of its forward pass. Idempotent.

    Stateless: a model without an active microbatch recomputes without one.
    """
    from megatron.core.tensor_parallel.random import set_recompute_binder

    set_recompute_binder(bind_to_microbatch)
