"""The order of rollouts inside a global batch."""

import subprocess
import sys

import numpy as np

from megatron_r3.balance.order import mixed_batch, mixed_order


def test_each_batch_has_its_own_rollouts_in_an_order_of_its_own():
    order = mixed_order(18, 8, seed=1)
    assert sorted(order[:8]) == [*range(8)]
    assert sorted(order[8:16]) == [*range(8, 16)]
    assert order[16:].tolist() == [16, 17]  # not a whole batch
    assert order[:8].tolist() != [*range(8)]
    assert order[:8].tolist() != (order[8:16] - 8).tolist()
    assert order[8:16].tolist() == [8 + place for place in mixed_batch(8, 1, 1)]
    assert not np.array_equal(order, mixed_order(18, 8, seed=2))


def test_another_process_finds_the_same():
    code = "from megatron_r3.balance.order import mixed_batch; print(*mixed_batch(100, 7, 3))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(place) for place in mixed_batch(100, 7, 3)]


def test_the_order_does_not_change_from_one_version_to_the_next():
    """A training that is resumed with a later numpy must go on in the same order."""
    assert mixed_batch(8, 0, 1) == (2, 4, 7, 5, 0, 6, 3, 1)


def test_all_places_are_equally_likely():
    first = np.array([mixed_batch(4, number, 5) for number in range(4000)])
    counts = np.stack([(first == place).sum(0) for place in range(4)])
    assert (abs(counts - 1000) < 150).all()
