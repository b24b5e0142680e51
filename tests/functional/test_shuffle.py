"""--rollouts-shuffle: the training is that on a store whose rollouts lie in the mixed order."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from slow import slow_except
from training import Policy, same, train

from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.train.schedule import Schedule

SEED, BATCH, ROLLOUTS = 3, 16, 32
EP2 = ["--expert-model-parallel-size", "2"]
OLD = ["--rollouts-old-policy", "trainer", "--rollouts-mini-steps", "2", "--rollouts-epochs", "2"]


@dataclass(frozen=True)
class Case:
    """A layout, and how the rollouts are used."""

    ranks: int
    options: tuple[str, ...]
    steps: int = 2


CASES = {"1": Case(1, ()), "EP2, two mini-steps twice, old policy": Case(2, (*EP2, *OLD), steps=4)}


@pytest.fixture(scope="session")
def mixed_store(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy's rollouts, written in the order in which the option takes them."""
    store = RolloutStore([policy.store])
    folder = tmp_path_factory.mktemp("mixed") / "store"
    schedule = Schedule(BATCH, seed=SEED)
    order = [schedule.mixed(sample) for sample in range(ROLLOUTS)]
    write_shard(folder, store.info, [store.rollout(i) for i in order])
    return folder


def arguments(policy: Policy, case: Case, *more: str, store: Path | None = None) -> list[str]:
    steps = ["--global-batch-size", str(BATCH), "--train-iters", str(case.steps), "--lr", "1e-3"]
    return policy.arguments(*steps, *case.options, *more, store=store)


@pytest.mark.parametrize("name", slow_except(CASES, "EP2, two mini-steps twice, old policy"))
def test_it_trains_as_on_a_store_in_that_order(patched, policy, mixed_store, name):
    case = CASES[name]
    option = ["--rollouts-shuffle", str(SEED)]
    mixed, expected, plain = (
        patched.run(train, case.ranks, argv, timeout_s=240)
        for argv in (
            arguments(policy, case, *option),
            arguments(policy, case, store=mixed_store),
            arguments(policy, case),
        )
    )
    assert same(mixed, expected)
    assert not same(mixed, plain)  # the control: another order sums in another order
    # but it is the same update
    for one, other in zip(mixed, plain, strict=True):
        for key in one:
            assert torch.allclose(one[key].float(), other[key].float(), atol=2e-3), key
