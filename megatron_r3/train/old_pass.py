"""The pass of the old policy over a collection, before the first update on the collection.

The pass is forward only. It uses the weights of that moment and the training's layout. A token
replays the route of its rollout if it will do so in the updates, else it routes live. `OldPolicy`
keeps the log-probs and routes that the pass finds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_r3.data.digest import short_digest
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.schema import StoreError
from megatron_r3.replay.layers import local_routers, unwrapped
from megatron_r3.train.collection_pass import CollectionPass
from megatron_r3.train.ledger import Ledger
from megatron_r3.train.old_policy import collection_folder, remove_unneeded
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.refuse import refuse


class OldPass(CollectionPass):
    """Runs the pass at the start of each collection.

    A training that is resumed inside a collection reads the record of that pass from files instead.
    """

    def __init__(self, options: RolloutOptions, store: RolloutStore, ledger: Ledger) -> None:
        super().__init__(options)
        self.store, self.ledger = store, ledger

    def begin(self, models: list[Any], forward_step: Callable[..., Any]) -> None:
        """Get the old policy's record for the coming step, from a pass or from files.

        Args:
            models: this rank's model chunks.
            forward_step: the forward step of the pass.
        """
        schedule = self.options.use.schedule
        step, rest = divmod(self.ledger.consumed(), schedule.batch)
        assert not rest, "the samples that were used are no whole steps"
        place = schedule.place(step)
        began_at = self.ledger.progress.iteration - step % schedule.steps
        try:
            if place.begins_collection:
                self._run(models, forward_step, place.collection)
                number = [secrets.token_hex(8)]
                torch.distributed.broadcast_object_list(number, src=0)
                self.ledger.note_pass(number[0])
                self._write(place.collection, began_at)
            elif self.policy.collection != place.collection:
                self._read(models, place.collection, began_at)
                if not self._reads_where_it_saves():
                    torch.distributed.barrier()  # until all ranks have read
                    self._write(place.collection, began_at)  # for the checkpoints to come
        except StoreError as error:
            refuse(str(error))

    def _write(self, collection: int, began_at: int) -> None:
        if (directory := self.options.save_directory) is None:
            return
        folder, rank = collection_folder(directory, began_at), torch.distributed.get_rank()
        self.policy.write(folder, rank, self._about(collection), self.ledger.old_pass)
        if rank == 0:
            steps = self.options.use.schedule.steps
            remove_unneeded(directory, self.options.checkpoint_directories, began_at, steps)

    def _reads_where_it_saves(self) -> bool:
        saved, loaded = self.options.save_directory, self.options.load_directory
        if saved is None or loaded is None:
            return saved is loaded
        return Path(saved).resolve() == Path(loaded).resolve()

    def _read(self, models: list[Any], collection: int, began_at: int) -> None:
        rows = [batch["rows"].reshape(-1).numpy() for batch in self._batches(collection)]
        wanted = np.unique(np.concatenate(rows))
        directory = self.options.load_directory
        assert directory is not None, "only a resumed training begins inside a collection"
        folder = collection_folder(directory, began_at)
        layers: list[int] = []
        if self.options.takes_old_routes:
            layers = [number for model in models for number in local_routers(unwrapped(model))]
        about = self._about(collection)
        wanted = wanted[wanted >= 0]
        self.policy.read(folder, collection, wanted, layers, about, self.ledger.old_pass)

    def _routes(self) -> str:
        """The sources of the updates' routes, as text that a resume compares."""
        use = self.options.use
        if use.replay_max_lag is None or not self.options.replay:
            return use.source
        return f"{use.source}, {use.stale_source} beyond {use.replay_max_lag} versions"

    def _about(self, collection: int) -> dict[str, str]:
        """The options and rollouts of a collection's record, as texts that a resume compares."""
        samples = self.options.use.schedule.of_collection(collection)
        assert self.data is not None
        rollouts = self.data.rollouts_of(range(samples.start, samples.stop))
        shards = sorted({self.store.shard_of_rollout(rollout) for rollout in rollouts})
        text = " ".join(self.store.shards[number].identity for number in shards)
        return {
            "order": self.options.sample_order,
            "routes": self._routes(),
            "rollouts": f"{min(rollouts)} to {max(rollouts)}",
            "shards": short_digest(text),
        }
