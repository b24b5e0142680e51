"""Advantages against what their papers say.

Shape suffixes (docs/glossary.md): M.
"""

import numpy as np
import pytest

from megatron_r3.train.losses.advantages import ADVANTAGES

REWARD_M = np.array([1.0, 5.0, 0.0, 7.0, 1.0, 2.0])
GROUP_M = np.array([3, 9, 3, 9, 3, 4])


def test_advantages_are_those_of_each_group() -> None:
    normalised_M = ADVANTAGES["group-normalised"](REWARD_M, GROUP_M)
    centred_M = ADVANTAGES["group-centred"](REWARD_M, GROUP_M)
    for group in (3, 9):
        inside_M = REWARD_M[group == GROUP_M]
        deviation_M = inside_M - inside_M.mean()
        assert centred_M[group == GROUP_M] == pytest.approx(deviation_M)
        assert normalised_M[group == GROUP_M] == pytest.approx(
            deviation_M / inside_M.std(), rel=1e-4
        )
    assert normalised_M.dtype == centred_M.dtype == np.float32
    assert normalised_M[5] == centred_M[5] == 0  # alone in its group


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_no_advantage(name: str) -> None:
    assert (ADVANTAGES[name](np.full(4, 0.3), np.zeros(4)) == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_order_of_rollouts_does_not_matter_and_their_groups_do(name: str) -> None:
    order = np.array([4, 2, 0, 5, 3, 1])
    want_M = ADVANTAGES[name](REWARD_M, GROUP_M)
    assert np.array_equal(ADVANTAGES[name](REWARD_M[order], GROUP_M[order]), want_M[order])
    assert not np.allclose(ADVANTAGES[name](REWARD_M, GROUP_M[order]), want_M, atol=1e-3)
