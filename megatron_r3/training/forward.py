"""One forward pass of a model on a micro-batch of rollouts, with its routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_r3.integrations.layout import packed_seq_params
from megatron_r3.microbatch import MicrobatchRoutes, ReplayError
from megatron_r3.replay import replaying
from megatron_r3.training.refuse import refuse

# the loss does not need these fields, so they stay
_HOST_FIELDS = {"rows", "cu_seqlens", "source", "version", "collection"}


def on_device(host: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model and the loss need of a batch, on the device; no wait."""
    return {k: v.cuda(non_blocking=True) for k, v in host.items() if k not in _HOST_FIELDS}


def run_forward(
    forward: Callable[..., Any],
    batch: dict[str, Tensor],
    host: dict[str, Tensor],
    microbatch: MicrobatchRoutes | None,
) -> Any:
    """Run a forward pass with the routes of a micro-batch; ends training where it takes none.

    Args:
        batch, host: the batch on the device, and on the host.
    """
    try:
        with replaying(microbatch):
            return forward(
                batch["tokens"],
                batch["position_ids"],
                None,
                labels=batch["labels"],
                loss_mask=batch["loss_mask"],
                packed_seq_params=packed_seq_params(host),
            )
    except ReplayError as error:
        refuse(str(error))
