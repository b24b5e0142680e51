"""Checks that the shards of a store belong together: one model, no copy, no rollout twice.

Shape suffixes (docs/glossary.md): M.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_r3.data.store.schema import StoreError, differences
from megatron_r3.data.store.shard import Shard


@contextmanager
def without_collector() -> Iterator[None]:
    """Switch Python's collector of reference cycles off while many shards are opened.

    The collector goes over all objects each time their number has grown by a quarter. Opening
    10,000 shards makes a million objects, none of them in a cycle. The collector took 40 % of the
    time of opening them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Kinship:
    """Checks that the shards of a store are of one model, and that no shard is there twice.

    Args:
        mixed_policies: see RolloutStore.
    """

    def __init__(self, mixed_policies: bool) -> None:
        self.mixed_policies = mixed_policies
        self._path_of: dict[str, Path] = {}  # by the shard's identity

    def add(self, shard: Shard) -> None:
        """Remember a shard that was checked."""
        self._path_of[shard.identity] = shard.path

    def check(self, shard: Shard, others: Sequence[Shard]) -> None:
        """Refuse a shard of another model, engine or policy, and a copy.

        Args:
            others: the shards that were added.

        Raises:
            StoreError: naming the refused shard, and the earlier shard that it contradicts.
        """
        if others:
            first = others[0]
            expected = first.info
            cure = "keep them in stores of their own"
            if expected != shard.info:
                names = ("router_fingerprint", "policy_stamp", "engine_policy")
                same_policy = replace(expected, **{n: getattr(shard.info, n) for n in names})
                expected = same_policy if self.mixed_policies else expected
                if same_policy == shard.info:
                    cure += (
                        "; to train on rollouts of several policies, give --rollouts-policy any, "
                        "or --rollouts-follow if the policies of the store come in order"
                    )
            different = [] if expected == shard.info else differences(expected, shard.info)
            if different:
                raise StoreError(
                    f"{shard.path}: does not belong to {first.path}: {'; '.join(different)}: {cure}"
                )
        if shard.identity in self._path_of:
            raise StoreError(
                f"{shard.path}: is the same shard as {self._path_of[shard.identity]}: name only "
                "one of the two stores, or remove the copy"
            )


Policy = tuple[tuple[str, ...], str, str]  # `StoreInfo.policy`


class Versions:
    """Checks shards with a policy stamp: the same weights must not have two policy versions.

    Example: a sampler never got the weights of version 1. The sampler's next shard says version 1,
    and has the stamp of version 0. A reader that believes the version takes old rollouts for new
    ones.

    Args:
        is_right: called with a shard that gives a second version to the same weights. True means
            that the shard is right: an update with a learning rate of 0 changes no weights.
    """

    def __init__(self, is_right: Callable[[Shard], bool] = lambda shard: False) -> None:
        self._is_right = is_right
        self._first: dict[Policy, tuple[int, Path]] = {}
        self._right: set[tuple[Policy, int]] = set()

    def check(self, shard: Shard) -> None:
        """Refuse a shard if its weights have another version in an earlier shard.

        A shard with several versions is not compared: the engine got new weights while it sampled,
        and the shard's stamp belongs to only one of the versions.

        Raises:
            StoreError: naming both shards.
        """
        info, version_M = shard.info, shard.tensors["policy_version"]
        version, newest = int(version_M.min()), int(shard.newest_version_M.max())
        # router digests alone prove nothing: frozen routers keep their digests
        if version != newest or not info.policy_stamp:
            return
        before, path = self._first.setdefault(info.policy, (version, shard.path))
        if before != version and (info.policy, version) not in self._right:
            if self._is_right(shard):  # reads all weights, so the answer is kept
                self._right.add((info.policy, version))
                return
            raise StoreError(
                f"{shard.path}: policy version {version} has the stamp of version {before} in "
                f"{path}, so the same weights sampled both: sample again, with the new weights in "
                "the sampler and as --model of collect; or, if the update has changed nothing, "
                "train with --rollouts-policy any"
            )


class Names:
    """Checks the names of rollouts, which must differ inside one directory."""

    def __init__(self) -> None:
        self._taken: dict[Path, set[bytes]] = {}  # by directory; see `_names`
        self._checked: list[bytes] = []  # names in the shard that was checked last

    def add(self, shard: Shard) -> None:
        """Remember the shard that was checked last."""
        self._taken.setdefault(shard.path.parent, set()).update(self._checked)

    def check(self, shard: Shard, others: Sequence[Shard]) -> None:
        """Refuse two rollouts with the same policy version, group and sample in one directory.

        Args:
            others: the shards that were added.

        Raises:
            StoreError: naming both rollouts.
        """
        folder, here, names = shard.path.parent, set[bytes](), _names(shard)
        self._checked, taken = names, self._taken.get(folder, set())
        if len(set(names)) == len(names) and taken.isdisjoint(names):
            return
        for rollout, name in enumerate(names):
            if name in here or name in taken:
                shards = [other for other in (*others, shard) if other.path.parent == folder]
                namesake = next(
                    f"{other.path}: rollout {_names(other).index(name)}"
                    for other in shards
                    if name in _names(other)
                )
                version, group, sample = np.frombuffer(name, np.int64).tolist()
                raise StoreError(
                    f"{shard.path}: rollout {rollout} is sample {sample} of group {group}, policy "
                    f"version {version}: the same as {namesake}; remove one, or number the "
                    "samples of a group"
                )
            here.add(name)


def refuse_namesakes(shards: Sequence[Shard]) -> None:
    """Refuse the first rollout that has the name of an earlier rollout of its directory.

    Raises:
        StoreError: naming both rollouts.
    """
    names = Names()
    for place, shard in enumerate(shards):
        names.check(shard, shards[:place])
        names.add(shard)


def _names(shard: Shard) -> list[bytes]:
    """policy_version, group and sample of each rollout as bytes, which are smaller than a tuple."""
    names = np.empty((shard.num_rollouts, 3), np.int64)
    for column, name in enumerate(("policy_version", "group", "sample")):
        names[:, column] = shard.tensors[name]
    data = names.tobytes()
    return [data[i : i + 24] for i in range(0, len(data), 24)]
