"""The order of rollouts inside a global batch, mixed by a seed.

A store has the rollouts of a prompt beside each other. Where they are one micro-batch, they take
the same experts, and load one rank more than the others.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=64)
def mixed_batch(size: int, number: int, seed: int) -> tuple[int, ...]:
    """The places 0 to `size` - 1 of a global batch in an order by chance.

    It is the same on every rank and in every run: numpy promises the bits of `PCG64`, of which the
    order is made here, as the places sorted by a random number each.

    Args:
        size: of the batch.
        number: of the batch in its store.
    """
    keys = np.random.PCG64((seed, number)).random_raw(size)
    return tuple(np.argsort(keys, kind="stable").tolist())


def mixed_order(num_rollouts: int, batch_size: int, seed: int) -> np.ndarray:
    """All rollouts of a store, each batch mixed; a last batch that is not full is left as it lies.

    Example: 5 rollouts in batches of 2 may become `1 0 2 3 4`.
    """
    order = np.arange(num_rollouts)
    for number in range(num_rollouts // batch_size):
        first = number * batch_size
        order[first : first + batch_size] = first + np.array(mixed_batch(batch_size, number, seed))
    return order
