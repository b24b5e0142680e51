"""Several updates on a collection, against a loop in plain PyTorch on one process.

The loop has no batch, no padding, no schedule and no row ids: each rollout alone, its routes handed
over as arrays, the clipped loss written out, and torch's own SGD.

Shape suffixes (docs/glossary.md): B, K, L, N, S, T.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import PART, Policy, steps_on, stores, train

from fidelity.policy_loss import advantages
from fidelity.reference import nll
from fidelity.rig.worker import TreeWorker
from fidelity.rollouts import Sampled
from megatron_r3.store import Rollout, RolloutStore

# SGD, because the first steps of Adam divide a gradient by itself and hide its size
PLAIN = ["--optimizer", "sgd", "--sgd-momentum", "0", "--clip-grad", "0", "--lr", "0.05"]
STEPS, RATE, EPS = 4, 0.05, 0.2
Steps = list[np.ndarray]  # the log-probs of each step's response tokens, in store order


def in_training(rank: int, argv: list[str]) -> tuple[dict[int, list[np.ndarray]], dict[str, Any]]:
    """Train; for each step this rank's log-probs by row id, and the weights at the end."""
    from megatron_r3.training import step

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


def by_hand(rank: int, argv: list[str], store: Path, mini_steps: int, epochs: int) -> Any:
    """The same updates: log-probs of each step, the weights at the end, and how far they moved.

    The last is by how much the updates changed a log-prob of the last step's rollouts, at most.
    """
    from megatron_r3.launch import build_model, initialize
    from megatron_r3.weights.checkpoint import load_whole

    sys.argv = ["by_hand.py", *argv]
    args = initialize()
    model = build_model(args)
    load_whole(model, args)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    opened = RolloutStore([store])
    rollouts = [as_sampled(opened.rollout(i)) for i in range(len(opened))]
    advantage = advantages([r.reward for r in rollouts], [r.group for r in rollouts], True)
    with torch.no_grad():
        before = [logprobs_of(model, rollout) for rollout in rollouts]
    steps: Steps = []
    old: dict[int, torch.Tensor] = {}
    for number in range(STEPS):
        collection, inside = divmod(number, mini_steps * epochs)
        first = collection * mini_steps * PART
        if not inside:
            with torch.no_grad():
                for index in range(first, first + mini_steps * PART):
                    old[index] = logprobs_of(model, rollouts[index])
        start = first + inside % mini_steps * PART
        chosen = range(start, start + PART)
        total, count, found = torch.zeros(()), 0, []
        for index in chosen:
            new_T = logprobs_of(model, rollouts[index])
            found.append(new_T.detach())
            ratio_T = (new_T - old[index]).exp()
            gain_T = torch.minimum(
                ratio_T * advantage[index], ratio_T.clamp(1 - EPS, 1 + EPS) * advantage[index]
            )
            total, count = total - gain_T.sum(), count + len(new_T)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        steps.append(torch.cat(found).double().numpy())
    names = {name: p.detach().clone() for name, p in model.named_parameters()}
    moved = max(
        float((new_T - before[i]).abs().max()) for i, new_T in zip(chosen, found, strict=True)
    )
    return steps, names, moved


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
    [(1, 1, "1"), (2, 1, "1"), (4, 1, "1"), (2, 2, "1"), (2, 2, "EP2 PP2")],
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
    (by_loop,) = patched.run(by_hand, 1, argv, store, mini_steps, epochs, timeout_s=240)
    steps, weights, moved = by_loop
    ranks, sizes = 1, []
    if layout != "1":
        ranks, sizes = 4, ["--expert-model-parallel-size", "2"]
        sizes += ["--pipeline-model-parallel-size", "2"]
    results = patched.run(in_training, ranks, [*argv, *sizes], timeout_s=240)
    for number, want in enumerate(steps):
        parts = [part for seen, _ in results for part in seen.get(number, [])]
        rows, values = np.concatenate(parts, axis=1)
        got = values[np.unique(rows, return_index=True)[1]]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    if layout == "1":
        trained = results[0][1]
        for name, weight in weights.items():
            (found,) = (trained[n] for n in trained if n.endswith(name))
            scale = float(weight.abs().max())
            assert float((found - weight).abs().max()) <= 2e-5 * scale, name
    assert moved > 1e-2  # control: the updates have moved the log-probs by much more than that
