"""Several updates on a collection, from the trainer's own policy at its start.

Shape suffixes (docs/glossary.md): B, E, S, T.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from training import Policy, fails, resumed, same, steps_on, stores, train

from fidelity.rig.worker import TreeWorker

TRAINER = ["--rollouts-old-policy", "trainer"]
TWO = [*TRAINER, "--rollouts-mini-steps", "2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1": (1, []),
    "TP2 SP": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "PP2 VPP2": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"],
    ),
    "CP2": (2, ["--context-parallel-size", "2"]),
    "EP2": (2, ["--expert-model-parallel-size", "2"]),
    "DP2, overlap": (
        2,
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
}
R2 = ["--moe-router-replay-source", "old-policy"]
Seen = list[dict[str, torch.Tensor]]  # of each micro-batch of the updates


def watched(rank: int, argv: list[str]) -> Seen:
    """Train, and keep what the loss of each micro-batch was made of."""
    from megatron_r3.training import step

    seen: Seen = []
    made = step.terms_of

    def keep(batch: Any, output_BS: Any, old_BS: Any) -> Any:
        terms = made(batch, output_BS, old_BS)
        fields = (terms.mask_BS, terms.old_logprobs_BS, terms.logprobs_BS)
        names = ("mask", "old", "new")
        seen.append({n: f.detach().clone() for n, f in zip(names, fields, strict=True)})
        return terms

    step.terms_of = keep
    train(rank, argv)
    return seen


def on_response(seen: Seen, name: str) -> list[torch.Tensor]:
    return [one[name][one["mask"] > 0] for one in seen]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_old_policy_is_the_trainer_before_the_first_update(
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout: str
) -> None:
    ranks, more = LAYOUTS[layout]
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 4, *TWO, *more)
    for seen in patched.run(watched, ranks, argv, timeout_s=240):
        if not seen:  # not the last stage
            continue
        per_step = len(seen) // 4
        old, new = on_response(seen, "old"), on_response(seen, "new")
        for step in range(4):
            for i in range(step * per_step, (step + 1) * per_step):
                if not len(old[i]):  # a rank of CP may hold the prompts alone
                    assert layout == "CP2"
                    continue
                # in the first of the two updates the weights are those of the pass
                assert torch.equal(old[i], new[i]) == (step % 2 == 0), (step, i)


def test_one_update_needs_no_pass(patched: TreeWorker, policy: Policy, tmp_path: Path) -> None:
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 2, *TRAINER)
    (seen,) = patched.run(watched, 1, argv, timeout_s=120)
    assert all(torch.equal(one["old"], one["new"]) for one in seen)
    (sampler,) = patched.run(watched, 1, steps_on(policy, tmp_path / "store", 2), timeout_s=120)
    assert not any(torch.equal(one["old"], one["new"]) for one in sampler)  # control


def test_a_training_goes_on_in_the_middle_of_a_collection(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    store = stores(policy, tmp_path, mixed=True)
    four = [*TRAINER, "--rollouts-mini-steps", "4"]
    want = patched.run(train, 1, steps_on(policy, store, 4, *four), timeout_s=120)
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    patched.run(train, 1, steps_on(policy, store, 4, *four, *saved), timeout_s=120)
    argv = resumed(policy, store, tmp_path / "saved", *four)
    assert same(want, patched.run(train, 1, argv, timeout_s=120))
    layout = [*argv, *LAYOUTS["PP2 VPP2"][1]]  # other ranks read what one rank wrote
    patched.run(train, 2, layout, timeout_s=120)
    shutil.rmtree(tmp_path / "saved" / "old-policy")
    assert "the checkpoint lies in the middle of a collection" in fails(patched, argv)


Maps = list[tuple[int, torch.Tensor]]  # layer, and routing map, of each pass of a router


def routed(rank: int, argv: list[str]) -> tuple[list[Maps], list[Maps]]:
    """Train; the routing maps of the old-policy passes, and of the updates."""
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_r3.training.old_pass import OldPass

    in_pass: list[Maps] = []
    updates: list[Maps] = [[]]
    current = updates[0]
    forward, run = TopKRouter.forward, OldPass._run

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        current.append((self.layer_number, result[1].detach().clone()))
        return result

    def passed(self: Any, *args: Any) -> None:
        nonlocal current
        current = []
        run(self, *args)
        in_pass.append(current)
        current = []
        updates.append(current)

    TopKRouter.forward, OldPass._run = keep, passed
    train(rank, argv)
    return in_pass, [maps for maps in updates if maps]


FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
FULL += ["--recompute-num-layers", "1"]


@pytest.mark.parametrize("layout", ["1", "PP2 VPP2", "EP2", "CP2"])
def test_r2_updates_take_the_routes_of_the_pass(
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout: str
) -> None:
    ranks, more = LAYOUTS[layout]
    store = stores(policy, tmp_path, mixed=True)
    argv = steps_on(policy, store, 4, *TWO, *more, *FULL)
    for passes, updates in patched.run(routed, ranks, [*argv, *R2], timeout_s=240):
        assert len(passes) == len(updates) == 2
        for recorded, replayed in zip(passes, updates, strict=True):
            assert _by_layer(replayed) == _by_layer(recorded, times=2)  # forward and recompute
    # control: live routing moves on with the weights
    live = patched.run(routed, ranks, [*argv, "--moe-router-replay-source", "live"], timeout_s=240)
    assert any(
        _by_layer(replayed) != _by_layer(recorded, times=2)
        for passes, updates in live
        for recorded, replayed in zip(passes, updates, strict=True)
    )


def _by_layer(maps: Maps, times: int = 1) -> dict[int, list[bytes]]:
    """The maps of each layer, sorted, so that the order of passes does not matter."""
    found: dict[int, list[bytes]] = {}
    for layer, map_TE in maps:
        found.setdefault(layer, []).extend([map_TE.numpy().tobytes()] * times)
    return {layer: sorted(parts) for layer, parts in found.items()}
