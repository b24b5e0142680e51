"""Which rollouts each optimizer step uses: collections, their mini-steps and their epochs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# The sources of a token's routes: its rollout (R3), the old policy (R2), or none.
SOURCES = ("rollout", "old-policy", "live")
STORED = "stored"  # advantages that the store brings


@dataclass(frozen=True)
class Place:
    """The place of an optimizer step in a training; each number counts from 0."""

    collection: int
    epoch: int
    mini_step: int

    @property
    def begins_collection(self) -> bool:
        """Whether the step is the first step on its collection."""
        return self.epoch == 0 and self.mini_step == 0


@dataclass(frozen=True)
class Schedule:
    """The order in which a training goes over its samples.

    A collection is the `mini_steps * batch` samples that updates from one old policy use. Each of
    its `epochs` is `mini_steps` optimizer steps of `batch` samples. Samples are counted from the
    first sample that the training took from its store.

    Example with batch 2, 2 mini-steps, 2 epochs: the steps use the samples 0-1, 2-3, 0-1, 2-3 of
    the store, then 4-5, 6-7, 4-5, 6-7.

    Attributes:
        batch: samples of an optimizer step, over all ranks.
        mini_steps, epochs: see above. If both are 1, each sample is used in one step.
        seed: mixes the samples of each optimizer step, in the same way in every epoch; None keeps
            the order of the store.
    """

    batch: int
    mini_steps: int = 1
    epochs: int = 1
    seed: int | None = None

    @property
    def steps(self) -> int:
        """How many optimizer steps a collection has."""
        return self.mini_steps * self.epochs

    def place(self, step: int) -> Place:
        """Where an optimizer step is."""
        collection, inside = divmod(step, self.steps)
        return Place(collection, *divmod(inside, self.mini_steps))

    def in_store(self, sample: int) -> int:
        """Which sample of the store the training takes as its sample number `sample`."""
        return self.mixed(self._unmixed(sample))

    def _unmixed(self, sample: int) -> int:
        """What `in_store` would return without a seed."""
        step, within = divmod(sample, self.batch)
        place = self.place(step)
        return (place.collection * self.mini_steps + place.mini_step) * self.batch + within

    def mixed(self, sample: int) -> int:
        """Which sample of the store the training takes instead of sample `sample`, by the seed.

        Example with batch 4: a seed may give 2 0 3 1 for 0 1 2 3, and 4 7 6 5 for 4 5 6 7.
        """
        if self.seed is None:
            return sample
        number, within = divmod(sample, self.batch)
        return number * self.batch + _mixed_batch(self.batch, number, self.seed)[within]

    def used(self, consumed: int) -> int:
        """How many samples of the store are among the first `consumed` samples of the training.

        These are the first samples of the store. With a seed they are the first ones only if
        `consumed` is a number of whole optimizer steps.
        """
        if not consumed:
            return 0
        place = self.place((consumed - 1) // self.batch)
        if place.epoch:  # the first epoch has used the whole collection
            return (place.collection + 1) * self.mini_steps * self.batch
        return self._unmixed(consumed - 1) + 1

    def collection_of(self, sample: int) -> int:
        """The collection to which a sample of the store belongs."""
        return sample // (self.mini_steps * self.batch)

    def of_collection(self, collection: int) -> range:
        """The samples of the store that belong to a collection."""
        size = self.mini_steps * self.batch
        return range(collection * size, (collection + 1) * size)


@lru_cache(maxsize=64)
def _mixed_batch(size: int, number: int, seed: int) -> tuple[int, ...]:
    """The places 0 to `size` - 1 of a global batch in random order.

    A number is drawn for each place, and the places are sorted by their numbers. Example: the
    numbers 70 20 90 40 of the places 0 to 3 give the order 1 3 0 2. All ranks, and later versions
    of numpy, find the same order, because numpy promises that the bits of `PCG64` stay the same. It
    promises nothing about `shuffle`.

    Args:
        number: the number of the global batch, from 0 on.
    """
    drawn = np.random.PCG64((seed, number)).random_raw(size)
    return tuple(np.argsort(drawn, kind="stable").tolist())


@dataclass(frozen=True)
class UseOfRollouts:
    """How a training uses its rollouts.

    Attributes:
        seq_length: S, to which samples are padded on the right.
        schedule: the order in which the samples are used.
        start: how many samples the training had consumed when it began with the store; above 0 in a
            training that was resumed with a new store.
        advantages: a name of `ADVANTAGES`, or "stored".
        source: where the routes of tokens come from, a name of `SOURCES`.
        replay_max_lag: a rollout is stale if its oldest span is more than this many versions behind
            the newest span up to the end of its collection. None: no rollout is stale.
        stale_source: where the routes of stale rollouts' tokens come from, a name of `SOURCES`.
    """

    seq_length: int
    schedule: Schedule
    start: int = 0
    advantages: str = "group-normalised"
    source: str = "rollout"
    stale_source: str = "live"
    replay_max_lag: int | None = None
