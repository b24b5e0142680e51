"""Forward passes of a model on micro-batches, with their routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_r3.replay.active import replaying
from megatron_r3.replay.microbatch import MicrobatchRoutes, ReplayError
from megatron_r3.replay.rank_layout import packed_seq_params
from megatron_r3.train.refuse import refuse

# not moved to the device: `packed_seq_params` moves cu_seqlens, and the rest is read on the host
_HOST_FIELDS = {"rows", "cu_seqlens", "source", "turn", "version", "collection"}


def on_device(host: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model and the loss need of a batch, moved to the device without a wait."""
    return {k: v.cuda(non_blocking=True) for k, v in host.items() if k not in _HOST_FIELDS}


def run_forward(
    forward: Callable[..., Any],
    batch: dict[str, Tensor],
    host: dict[str, Tensor],
    microbatch: MicrobatchRoutes | None,
) -> Any:
    """Run a forward pass with the routes of a micro-batch; a ReplayError ends the training.

    Args:
        forward: the model, or a function that is called as the model is.
        batch, host: the batch on the device, and on the host.
        microbatch: the routes; None for a live pass.
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


def forward_only(
    models: list[Any],
    forward_step: Callable[..., Any],
    batches: Callable[[], Iterator[dict[str, Tensor]]],
    *,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
) -> None:
    """Run micro-batches through this rank's model chunks by Megatron's schedule, without gradients.

    All ranks call this function together, outside of a step. The models are in evaluation mode
    meanwhile, and in training mode afterwards.

    Args:
        forward_step: as scripts hand it to `pretrain()`, except that Megatron calls the returned
            function with the output and `non_loss_data=True`.
        batches: makes an iterator over the micro-batches; called once for each model chunk.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    iterators = [batches() for _ in models]
    for model in models:
        model.eval()
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=models if len(models) > 1 else models[0],
            num_microbatches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=None,
            forward_only=True,
            collect_non_loss_data=True,
        )
    for model in models:
        model.train()
