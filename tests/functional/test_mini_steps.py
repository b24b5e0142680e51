"""Several updates on a collection, against a loop in plain PyTorch on one process.

The loop has no batch, no padding, no schedule and no row ids: each rollout alone, its routes handed
over as arrays, the clipped loss written out, and torch's own SGD.

Shape suffixes (docs/glossary.md): B, K, L, N, S, T.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow import slow
from training import PART, Policy, steps_on, stores, train

from megatron_r3.data.store import Rollout, RolloutStore
from proof.fidelity.policy_loss import advantages
from proof.fidelity.reference import nll
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.rollouts import Sampled

# SGD, because the first steps of Adam divide a gradient by itself and hide its size
PLAIN = ["--optimizer", "sgd", "--sgd-momentum", "0", "--clip-grad", "0", "--lr", "0.05"]
STEPS, RATE, EPS = 4, 0.05, 0.2
Steps = list[np.ndarray]  # the log-probs of each step's response tokens, in store order


def in_training(rank: int, argv: list[str]) -> tuple[dict[int, list[np.ndarray]], dict[str, Any]]:
    """Train; for each step this rank's log-probs by row id, and the weights at the end."""
    from megatron_r3.train import step

    seen: dict[int, list[np.ndarray]] = {}
    loss = step.RolloutStep._loss

    def keep(self: Any, batch: Any, host: Any, policy: Any, output_BS: Any) -> Any:
        on_T = host["loss_mask"].reshape(-1) > 0
        rows, values = host["rows"].reshape(-1)[on_T], -output_BS.detach().reshape(-1)[on_T]
        parts = seen.setdefault(self.progress.iteration, [])
        parts.append(np.stack([rows.double().numpy(), values.double().numpy()]))
        return loss(self, batch, host, policy, output_BS)

    step.RolloutStep._loss = keep
    return seen, train(rank, argv)


@dataclass
class Updates:
    """What a plain loop did.

    Attributes:
        before: the log-probs of the last step's response tokens before the first update.
        logprobs: of each step's response tokens, before its update.
        weights: at the end.
    """

    before: np.ndarray
    logprobs: Steps
    weights: dict[str, torch.Tensor]


def by_hand(
    rank: int, argv: list[str], store: Path, mini_steps: int, epochs: int
) -> tuple[Updates, Updates]:
    """The same updates, and as a control those whose old policy is the newest one."""
    from megatron_r3.train.launch import build_model, initialize
    from megatron_r3.weights.checkpoint import load_whole

    sys.argv = ["by_hand.py", *argv]
    args = initialize()
    model = build_model(args)
    model.train()
    opened = RolloutStore([store])
    rollouts = [as_sampled(opened.rollout(i)) for i in range(len(opened))]
    found = []
    for old_is_newest in (False, True):
        load_whole([model], args)
        found.append(updates(model, rollouts, mini_steps, epochs, old_is_newest))
    return found[0], found[1]


def updates(
    model: Any, rollouts: list[Sampled], mini_steps: int, epochs: int, old_is_newest: bool
) -> Updates:
    """Update the model step by step.

    Args:
        old_is_newest: each step takes its own log-probs for the old ones. Else the old ones are
            those with which its collection began.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    advantage = advantages([r.reward for r in rollouts], [r.group for r in rollouts], True)

    def of_step(number: int) -> range:
        collection, inside = divmod(number, mini_steps * epochs)
        start = (collection * mini_steps + inside % mini_steps) * PART
        return range(start, start + PART)

    def without_gradients(chosen: range) -> dict[int, torch.Tensor]:
        with torch.no_grad():
            return {index: logprobs_of(model, rollouts[index]) for index in chosen}

    before = without_gradients(of_step(STEPS - 1))
    logprobs: Steps = []
    old: dict[int, torch.Tensor] = {}
    for number in range(STEPS):
        if number % (mini_steps * epochs) == 0:
            for later in range(number, number + mini_steps):
                old |= without_gradients(of_step(later))
        total, count, found = torch.zeros(()), 0, []
        for index in of_step(number):
            new_T = logprobs_of(model, rollouts[index])
            found.append(new_T.detach())
            ratio_T = (new_T - (new_T.detach() if old_is_newest else old[index])).exp()
            gain_T = torch.minimum(
                ratio_T * advantage[index], ratio_T.clamp(1 - EPS, 1 + EPS) * advantage[index]
            )
            total, count = total - gain_T.sum(), count + len(new_T)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        logprobs.append(torch.cat(found).double().numpy())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Updates(torch.cat([*before.values()]).double().numpy(), logprobs, weights)


def as_sampled(rollout: Rollout) -> Sampled:
    """The rollout of a store as the reference of the fidelity table takes it."""
    return Sampled(
        rollout.tokens_N,
        rollout.response_N.astype(bool),
        rollout.logprobs_N,
        rollout.reward,
        rollout.group,
        rollout.routes.ids_LTK,
        rollout.routes.recorded_T,
    )


def logprobs_of(model: Any, sampled: Sampled) -> torch.Tensor:
    """The trainer's log-probs of the response tokens `[T]`, replayed."""
    return -nll(model, sampled)[torch.from_numpy(sampled.response[1:])]


@pytest.mark.parametrize(
    ("mini_steps", "epochs", "layout"),
    [
        slow(4, 1, "1"),
        (2, 2, "EP2 PP2"),
    ],
)
def test_updates_are_those_of_a_plain_loop(
    patched: TreeWorker,
    policy: Policy,
    tmp_path: Path,
    mini_steps: int,
    epochs: int,
    layout: str,
) -> None:
    store = stores(policy, tmp_path, mixed=True)
    more = ["--rollouts-old-policy", "trainer", "--rollouts-mini-steps", str(mini_steps)]
    more += ["--rollouts-epochs", str(epochs), *PLAIN]
    argv = steps_on(policy, store, STEPS, *more)
    ((right, wrong),) = patched.run(by_hand, 1, argv, store, mini_steps, epochs, timeout_s=240)
    ranks, sizes = 1, []
    if layout != "1":
        ranks, sizes = 4, ["--expert-model-parallel-size", "2"]
        sizes += ["--pipeline-model-parallel-size", "2"]
    results = patched.run(in_training, ranks, [*argv, *sizes], timeout_s=240)
    got = []
    for number in range(STEPS):
        parts = [part for seen, _ in results for part in seen.get(number, [])]
        rows, values = np.concatenate(parts, axis=1)
        got.append(values[np.unique(rows, return_index=True)[1]])
    assert furthest(got, right.logprobs) <= 2e-5
    # controls: the updates moved the log-probs by much more, and the old policy matters
    assert furthest([right.before], got[-1:]) > 1e-2
    old_matters = mini_steps * epochs > 1
    assert (furthest(got, wrong.logprobs) > 2e-5) == old_matters
    if layout == "1":
        trained = results[0][1]
        assert furthest_weight(trained, right.weights) <= 2e-5
        assert (furthest_weight(trained, wrong.weights) > 2e-5) == old_matters


def furthest(one: Steps, other: Steps) -> float:
    """The largest difference of two log-probs of a token."""
    # numpy's maximum, because NaN among other values does not get lost there
    return float(np.max([np.abs(a - b).max() for a, b in zip(one, other, strict=True)]))


def furthest_weight(trained: dict[str, torch.Tensor], by_loop: dict[str, torch.Tensor]) -> float:
    """The largest difference of two weights, relative to the largest weight of the tensor."""
    differences = []
    for name, weight in by_loop.items():
        (found,) = (trained[n] for n in trained if n.endswith(name))
        differences.append(float((found - weight).abs().max()) / float(weight.abs().max()))
    return float(np.max(differences))
