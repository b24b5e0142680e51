"""The reference policy of a KL term: a pass over each collection, with weights of its own.

The reference has the trainer's shape and layout. Its weights lie on the host, and change places
with the trainer's weights for the pass. The pass routes live, because no rollout has routes of the
reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_r3.data.store.schema import StoreError
from megatron_r3.replay.layers import unwrapped
from megatron_r3.train.collection_pass import CollectionPass
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.refuse import refuse


class Reference(CollectionPass):
    """Finds the reference's log-probs of each collection.

    The reference never changes, so a training that is resumed repeats the pass.

    Args:
        options: of the training.
        load: puts the reference's weights into this rank's model chunks; called once.
    """

    def __init__(self, options: RolloutOptions, load: Callable[[list[Any]], None]) -> None:
        super().__init__(options)
        self._load = load
        self._away: list[Tensor] | None = None  # on the host: the weights that are not in use

    def begin(self, models: list[Any], forward_step: Callable[..., Any], collection: int) -> None:
        """Run the pass over a collection, unless it has run already.

        All ranks call this together, outside of a step.

        Args:
            models: this rank's model chunks.
            forward_step: the forward step of the pass.
        """
        if self.policy.collection == collection:
            return
        with self._in_place(models):
            try:
                self._run(models, forward_step, collection)
            except StoreError as error:
                refuse(str(error))

    @contextmanager
    def _in_place(self, models: list[Any]) -> Iterator[None]:
        """Give the models the reference's weights inside the block, and their own back after it.

        The models' own weights come back bit by bit. The optimizers' copies are not touched.
        """
        finish_updates(models)
        here = _weights(models)
        if self._away is None:
            self._away = [tensor.detach().to("cpu", copy=True) for tensor in here]
            self._load(models)
        else:
            _exchange(here, self._away)
        yield  # an error in the block ends the training
        _exchange(here, self._away)


def _weights(models: list[Any]) -> list[Tensor]:
    """Parameters, and the buffers that a checkpoint saves, such as the expert bias.

    TE's extra states are left out.
    """
    states = [unwrapped(model).state_dict(keep_vars=True) for model in models]
    found = {
        id(value): value
        for state in states
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.endswith("_extra_state")
    }
    return list(found.values())


@torch.no_grad()
def _exchange(here: list[Tensor], away: list[Tensor]) -> None:
    for mine, other in zip(here, away, strict=True):
        kept = mine.detach().to("cpu", copy=True)
        mine.copy_(other)
        other.copy_(kept)


def finish_updates(models: Sequence[Any]) -> None:
    """Make every rank hold the newest weights.

    With --overlap-param-gather each rank of a distributed optimizer updates a part of the weights,
    and gets the rest from other ranks only in the next forward pass. Megatron too gets the rest
    before it saves a checkpoint (`disable_forward_pre_hook` in
    megatron/core/distributed/distributed_data_parallel.py).
    """
    for model in models:
        settings = getattr(model, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            with torch.no_grad():
                model.start_param_sync(force_sync=True)
