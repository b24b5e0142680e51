"""Refuse rollouts of another policy than the policy from which training starts.

A shard has digests of the sampler's routers (`megatron_r3.data.fingerprint`). When rollouts with
new digests are first used, the digests must equal the digests of this rank's own routers, or of a
policy that this training has published. After the first update the trainer's weights differ from
the sampler's weights, so digests that were accepted once stay accepted. --rollouts-policy any turns
this check off. --rollouts-max-lag bounds the age of rollouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.fingerprint import router_digest, router_fingerprint
from megatron_r3.data.store.reader import RolloutStore
from megatron_r3.data.store.shard import Shard
from megatron_r3.train.ledger import Ledger
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.publish_options import version_name
from megatron_r3.train.refuse import refuse


class PolicyCheck:
    """Compares the policies of rollouts with the routers of one model chunk of this rank.

    Args:
        routers: the chunk's routers by Megatron's layer number; empty where no router can be
            compared, as in a dense model.
    """

    def __init__(
        self,
        options: RolloutOptions,
        store: RolloutStore,
        ledger: Ledger,
        routers: dict[int, Any],
    ) -> None:
        self.options, self.store, self.ledger, self.routers = options, store, ledger, routers
        # the router digests that were accepted; None before the first check
        self._accepted: set[tuple[str, ...]] | None = None

    def check(self, rollouts: list[int]) -> None:
        """End training if one of these rollouts is too old, or of another policy.

        Args:
            rollouts: the indices, in the store, of a micro-batch's rollouts.
        """
        self._check_lag(rollouts)
        if not self.routers or self.options.any_policy:
            return
        if self._accepted is None:
            self._accepted = self._used_before()
        for number in sorted({self.store.shard_of_rollout(rollout) for rollout in rollouts}):
            stamp = self.store.shards[number].info.router_fingerprint
            if stamp and stamp not in self._accepted:
                if not self._was_published(number, stamp):
                    self._compare(stamp)
                self._accepted.add(stamp)

    def _check_lag(self, rollouts: list[int]) -> None:
        """Refuse a rollout if its oldest span is too far behind the newest span of the store.

        In a store that grows, each rank compares with the shards that it has seen by now: one rank
        may refuse a rollout a little before the others, which ends the training for all.
        """
        max_lag, store = self.options.max_lag, self.store
        if max_lag is None:
            return
        store.refresh()
        newest = int(store.newest_versions().max())
        for rollout in rollouts:
            shard, index = store.find(rollout)
            oldest = int(shard.tensors["policy_version"][index])
            if newest - oldest > max_lag:
                token = int(np.argmax(store.versions(rollout) == oldest))
                refuse(
                    f"{store.name(rollout)}: token {token} was sampled with policy version "
                    f"{oldest}, which is more than --rollouts-max-lag {max_lag} behind version "
                    f"{newest}: sample again, or raise --rollouts-max-lag"
                )

    def _was_published(self, number: int, stamp: tuple[str, ...]) -> bool:
        """Whether this training has published the policy that sampled a shard.

        The trainer's own routers do not show this, because updates may have changed them since. The
        training has published the policy if it has reached the shard's version, and the routers in
        the version's folder have the shard's digests. Example: with an interval of 2, at iteration
        5, versions 0 to 2 are published; a folder of version 3 belongs to another training.

        Args:
            number: the shard's place in the store.
            stamp: the shard's router digests.
        """
        shard, publish = self.store.shards[number], self.options.publish
        folder = published_folder(self.options, shard)
        if publish is None or folder is None:
            return False
        if version_of(shard) * publish.interval > self.ledger.progress.iteration:
            return False
        return router_fingerprint(folder, self.store.info.moe_layers) == stamp

    def _used_before(self) -> set[tuple[str, ...]]:
        """The router digests of the rollouts of this store that a resumed training used before.

        Rollouts of an earlier store, which the checkpoint was also trained on, are left out: they
        say nothing about the policy that sampled this store.
        """
        store, used = self.store, self.ledger.used()
        if not used:
            return set()
        if self.options.pack:  # all rollouts are of one policy, and `used` counts packs
            return {store.info.router_fingerprint}
        if self.options.follow_s is not None:
            store.wait_for(used - 1)
        last = store.shards_of(store.row_ids(min(used, len(store)) - 1))[0]
        index = store.index
        infos = np.unique(index.table["info"][: last + 1]).tolist()
        return {index.infos[place].router_fingerprint for place in infos}

    def _compare(self, stamp: tuple[str, ...]) -> None:
        for number, router in sorted(self.routers.items()):
            trace = self.store.info.moe_layers.index(number - 1)
            here = router_digest(router.weight)
            if here != stamp[trace]:
                refuse(
                    f"{self.options.where}: sampled from another policy: the router of layer "
                    f"{number} has the digest {stamp[trace]} in the store, and {here} in the "
                    "trainer. Load the checkpoint that sampled (--load), sample again, or, to "
                    "train on other policies' rollouts, give --rollouts-policy any",
                    speaks=speaks_for_stage(),  # the stage's ranks have the same routers
                )


def speaks_for_stage() -> bool:
    """Whether this rank is the first of its pipeline stage, and so reports for the stage."""
    from megatron.core import mpu

    return not mpu.get_tensor_model_parallel_rank() and not mpu.get_data_parallel_rank(True)


def version_of(shard: Shard) -> int:
    """The policy version of a shard; all of its rollouts must have the same version."""
    return int(shard.tensors["policy_version"][0])


def published_folder(options: RolloutOptions, shard: Shard) -> Path | None:
    """This training's published folder of a shard's policy version; None if there is none."""
    if options.publish is None:
        return None
    folder = options.publish.directory / version_name(version_of(shard))
    return folder if folder.is_dir() else None
