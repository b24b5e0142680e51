"""Refuse rollouts that another policy sampled than the one that training starts from.

The sampler's routers are stamped into a store (`megatron_r3.fingerprint`). The first time that a
rollout of a stamped policy is used, the stamp is compared with this rank's own routers. After the
first update the weights differ from those that sampled, so a stamp that was accepted once stays
accepted; the age of a rollout is bounded by --rollouts-max-lag.
"""

from __future__ import annotations

from typing import Any

from megatron_r3.fingerprint import router_digest
from megatron_r3.store.reader import RolloutStore
from megatron_r3.training.ledger import Ledger
from megatron_r3.training.options import RolloutOptions
from megatron_r3.training.refuse import refuse


class PolicyCheck:
    """Compares the policies of rollouts with the routers of one model chunk of this rank.

    Args:
        routers: the chunk's routers by Megatron's layer number; empty where no router can be
            compared, as in a dense model.
    """

    def __init__(
        self, options: RolloutOptions, store: RolloutStore, ledger: Ledger, routers: dict[int, Any]
    ) -> None:
        self.options, self.store, self.ledger, self.routers = options, store, ledger, routers
        self._accepted: set[tuple[str, ...]] | None = None  # stamps; None before the first check

    def check(self, shards: list[int]) -> None:
        """End training if a rollout of these shards is too old, or of another policy.

        Args:
            shards: the numbers of the shards that hold the rollouts of a micro-batch.
        """
        self._check_lag(shards)
        if not self.routers or self.options.any_policy:
            return
        if self._accepted is None:
            self._accepted = self._used_before()
        for number in shards:
            stamp = self.store.shards[number].info.router_fingerprint
            if stamp and stamp not in self._accepted:
                self._compare(stamp)
                self._accepted.add(stamp)

    def _check_lag(self, shards: list[int]) -> None:
        max_lag, store = self.options.max_lag, self.store
        if max_lag is None:
            return
        store.refresh()
        newest = int(store.shards[-1].tensors["policy_version"].max())
        for shard in (store.shards[number] for number in shards):
            oldest = int(shard.tensors["policy_version"].min())
            if newest - oldest > max_lag:
                refuse(
                    f"{shard.path}: sampled with policy version {oldest}, which is more "
                    f"than --rollouts-max-lag {max_lag} behind version {newest}: sample "
                    "again, or raise --rollouts-max-lag"
                )

    def _used_before(self) -> set[tuple[str, ...]]:
        """The stamps whose rollouts an interrupted training, resumed here, has begun to use.

        Only rollouts of this store count: those of another store, which the checkpoint was trained
        on before, say nothing about the policy that sampled these.
        """
        store, used = self.store, self.ledger.used()
        if not used:
            return set()
        if self.options.pack:  # samples are packs, and all rollouts are of one policy
            return {store.info.router_fingerprint}
        if self.options.follow_s is not None:
            store.wait_for(used - 1)
        last = store.shards_of(store.row_ids(min(used, len(store)) - 1))[0]
        return {shard.info.router_fingerprint for shard in store.shards[: last + 1]}

    def _compare(self, stamp: tuple[str, ...]) -> None:
        from megatron.core import mpu

        # All ranks of a pipeline stage hold the same routers: its first rank speaks for them.
        ranks = mpu.get_tensor_model_parallel_rank(), mpu.get_data_parallel_rank(True)
        for number, router in sorted(self.routers.items()):
            trace = self.store.info.moe_layers.index(number - 1)
            here = router_digest(router.weight)
            if here != stamp[trace]:
                refuse(
                    f"{self.options.where}: sampled from another policy: the router of layer "
                    f"{number} is {stamp[trace]} there, {here} here. Load the checkpoint that "
                    "sampled (--load), sample again, or, to train on other policies' rollouts, "
                    "give --rollouts-policy any",
                    speaks=ranks == (0, 0),
                )
