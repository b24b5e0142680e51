"""Several updates on a collection, from the trainer's own policy at its start.

Shape suffixes (docs/glossary.md): B, E, K, L, N, S, T, U.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slow import slow, slow_except
from training import Policy, fails, parts, resumed, same, steps_on, stores, train

from megatron_r3.data.store import write_shard
from megatron_r3.replay.routes import Routes
from megatron_r3.train.schedule import SOURCES
from proof.fidelity.rig.worker import TreeWorker

TRAINER = ["--rollouts-old-policy", "trainer"]
TWO = [*TRAINER, "--rollouts-mini-steps", "2"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
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
    return watched_to_the_end(rank, argv)[0]


def watched_to_the_end(rank: int, argv: list[str]) -> tuple[Seen, dict[str, torch.Tensor]]:
    """As `watched`; the second result has the weights at the end."""
    from megatron_r3.train import step

    seen: Seen = []
    made = step.terms_of

    def keep(*given: Any) -> Any:
        terms = made(*given)
        fields = (terms.mask_BS, terms.old_logprobs_BS, terms.logprobs_BS)
        names = ("mask", "old", "new")
        seen.append({n: f.detach().clone() for n, f in zip(names, fields, strict=True)})
        return terms

    step.terms_of = keep
    return seen, train(rank, argv)


def on_response(seen: Seen, name: str) -> list[torch.Tensor]:
    return [one[name][one["mask"] > 0] for one in seen]


# EP2 is a layout of the tests of R2 below
SPLIT = ["TP2 SP", "PP2 VPP2", "CP2", "DP2, overlap"]


@pytest.mark.parametrize("layout", slow_except(SPLIT, "TP2 SP"))
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


FOUR = [*TRAINER, "--rollouts-mini-steps", "4"]


@dataclass
class Interrupted:
    """A training of four updates on one collection, and one that ended after two of them.

    Attributes:
        store: the rollouts.
        saved: the checkpoint after two updates, and the old policy's record.
        seen, weights: of the training that was not interrupted.
    """

    store: Path
    saved: Path
    seen: Seen
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def interrupted(
    patched: TreeWorker, policy: Policy, tmp_path_factory: pytest.TempPathFactory
) -> Interrupted:
    folder = tmp_path_factory.mktemp("interrupted")
    argv = steps_on(policy, stores(policy, folder, mixed=True), 4, *FOUR)
    (whole,) = patched.run(watched_to_the_end, 1, argv, timeout_s=120)
    saved = ["--save", str(folder / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    patched.run(train, 1, [*argv, *saved], timeout_s=120)
    return Interrupted(folder / "store", folder / "saved", *whole)


def test_a_training_goes_on_in_the_middle_of_a_collection(
    patched: TreeWorker, policy: Policy, interrupted: Interrupted, tmp_path: Path
) -> None:
    saved = shutil.copytree(interrupted.saved, tmp_path / "saved")
    argv = resumed(policy, interrupted.store, saved, *FOUR)
    assert same([interrupted.weights], patched.run(train, 1, argv, timeout_s=120))
    shutil.rmtree(saved / "old-policy")
    assert "checkpoint was saved in the middle of a collection" in fails(patched, argv)


def test_other_ranks_read_what_one_rank_wrote(
    patched: TreeWorker, policy: Policy, interrupted: Interrupted
) -> None:
    argv = resumed(policy, interrupted.store, interrupted.saved, *FOUR)
    ranks, more = LAYOUTS["PP2 VPP2"]
    results = patched.run(watched, ranks, [*argv, *more], timeout_s=120)
    (got,) = (seen for seen in results if seen)  # of the last stage
    want = interrupted.seen[len(interrupted.seen) // 2 :]
    for one, other in zip(got, want, strict=True):
        on_T = one["mask"] > 0
        assert torch.equal(on_T, other["mask"] > 0)
        assert torch.equal(one["old"][on_T], other["old"][on_T])
        assert not torch.equal(one["old"][on_T], one["new"][on_T])  # control


@pytest.mark.slow
def test_a_resumed_training_that_saves_elsewhere_can_be_resumed(
    patched: TreeWorker, policy: Policy, interrupted: Interrupted, tmp_path: Path
) -> None:
    argv = resumed(policy, interrupted.store, interrupted.saved, *FOUR)
    elsewhere = ["--save", str(tmp_path / "saved"), "--save-interval", "1", "--exit-interval", "3"]
    patched.run(train, 1, [*argv, *elsewhere], timeout_s=120)
    argv = resumed(policy, interrupted.store, tmp_path / "saved", *FOUR)
    assert same([interrupted.weights], patched.run(train, 1, argv, timeout_s=120))


Maps = list[tuple[int, torch.Tensor]]  # layer, and routing map, of each pass of a router


@dataclass
class Trained:
    """What a rank saw of a training.

    Attributes:
        passes, updates: the routing maps of the old-policy passes, and of the updates after each.
        gradients: of the first step, as the optimizer is about to see them.
        dispatched: the share of pairs that reached the recorded expert, of each step.
    """

    passes: list[Maps] = field(default_factory=list)
    updates: list[Maps] = field(default_factory=lambda: [[]])
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    dispatched: list[float] = field(default_factory=list)


def routed(rank: int, argv: list[str], shifted: bool = False) -> Trained:
    """Train and look on.

    Args:
        shifted: a control: each token takes the old policy's routes of the token before it.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import training

    from megatron_r3.train.lookahead import Preparer
    from megatron_r3.train.metrics import StepMetrics
    from megatron_r3.train.old_pass import OldPass

    seen = Trained()
    current = seen.updates[0]
    forward, run, take = TopKRouter.forward, OldPass._run, Preparer._take_old
    finalize, scalars = training.finalize_model_grads, StepMetrics.scalars

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        current.append((self.layer_number, result[1].detach().clone()))
        return result

    def passed(self: Any, *args: Any) -> None:
        nonlocal current
        current = []
        run(self, *args)
        seen.passes.append(current)
        current = []
        seen.updates.append(current)

    def finalized(models: Any, *args: Any, **kwargs: Any) -> None:
        finalize(models, *args, **kwargs)
        if not seen.gradients:
            seen.gradients = {
                f"{chunk}.{name}": p.main_grad.clone()
                for chunk, model in enumerate(models)
                for name, p in model.named_parameters()
            }

    def kept(self: Any) -> dict[str, float]:
        found = scalars(self)
        seen.dispatched.append(found["routes dispatched as recorded"])
        return found

    def shift(self: Any, routes: Any, here_T: np.ndarray) -> None:
        take(self, routes, here_T)
        routes.ids_LTK[:, here_T] = np.roll(routes.ids_LTK[:, here_T], 1, axis=1)

    TopKRouter.forward, OldPass._run, StepMetrics.scalars = keep, passed, kept
    training.finalize_model_grads = finalized
    if shifted:
        Preparer._take_old = shift
    train(rank, argv)
    seen.updates = [maps for maps in seen.updates if maps]
    return seen


FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
FULL += ["--recompute-num-layers", "1"]
PACK = ["--rollouts-pack", "--micro-batch-size", "1", "--global-batch-size", "2"]
OF_R2 = {name: LAYOUTS[name] for name in ("PP2 VPP2", "EP2", "CP2")}
OF_R2 |= {"packs": (1, PACK), "packs, CP2": (2, [*PACK, *LAYOUTS["CP2"][1]])}


@pytest.mark.parametrize("layout", slow_except(["PP2 VPP2", "CP2", "packs"], "PP2 VPP2"))
def test_r2_updates_take_the_routes_of_the_pass(
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout: str
) -> None:
    ranks, more = OF_R2[layout]
    store = stores(policy, tmp_path, mixed=True)
    argv = steps_on(policy, store, 4, *TWO, *more, *FULL)
    r2 = patched.run(routed, ranks, [*argv, *R2], timeout_s=240)
    for rank in r2:
        assert len(rank.passes) == len(rank.updates) == 2
        for recorded, replayed in zip(rank.passes, rank.updates, strict=True):
            assert _by_layer(replayed) == _by_layer(recorded, times=2)  # forward and recompute
        assert rank.dispatched == [1.0] * 4
    # control: live routing moves on with the weights
    live = patched.run(routed, ranks, [*argv, "--moe-router-replay-source", "live"], timeout_s=240)
    assert any(
        _by_layer(replayed) != _by_layer(recorded, times=2)
        for rank in live
        for recorded, replayed in zip(rank.passes, rank.updates, strict=True)
    )


SIZE = 16  # tokens of a sample, and fewer than those of the shortest rollout


def store_without_padding(policy: Policy, folder: Path) -> Path:
    """Rollouts of SIZE + 1 tokens each, with rewards 0 and 1 in turn.

    Padding tokens route live in a live training, and are spread over the experts in a replayed one.
    The experts then multiply matrices of other sizes, which may round otherwise.
    """
    info, shards = parts(policy)
    for shard in shards:
        cut = [
            replace(
                rollout,
                tokens_N=rollout.tokens_N[: SIZE + 1],
                response_N=rollout.response_N[: SIZE + 1],
                logprobs_N=rollout.logprobs_N[: SIZE + 1],
                turns_U2=None,
                routes=Routes.from_array(rollout.routes.ids_LTK[:, :SIZE], info.num_experts),
                reward=i % 2,
            )
            for i, rollout in enumerate(shard)
        ]
        write_shard(folder / "store", replace(info, router_fingerprint=()), cut)
    return folder / "store"


BLOCK = ["--recompute-granularity", "full", "--recompute-method", "block"]
BLOCK += ["--recompute-num-layers", "2"]
MOE = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
RECOMPUTES = {"full": FULL, "block": BLOCK, "moe": MOE}
BITWISE = {
    name: (OF_R2[name][0], [*OF_R2[name][1], *FULL]) for name in ("EP2", "PP2 VPP2", "packs, CP2")
}
BITWISE |= {"no recompute": (1, []), "block": (1, BLOCK)}


@pytest.mark.parametrize("layout", slow_except(BITWISE, "block", "EP2"))
def test_the_first_r2_update_is_bitwise_the_live_one(
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout: str
) -> None:
    """In the first update on a collection the weights are those of the pass."""
    ranks, more = BITWISE[layout]
    size = str(2 * SIZE if "packs" in layout else SIZE)
    argv = steps_on(policy, store_without_padding(policy, tmp_path), 1, *TWO, *more)
    argv += ["--seq-length", size, "--moe-router-replay-source"]
    r2, live, r3 = (
        [rank.gradients for rank in patched.run(routed, ranks, [*argv, source], timeout_s=240)]
        for source in ("old-policy", "live", "rollout")
    )
    assert all(any(bool(gradient.any()) for gradient in rank.values()) for rank in r2)
    assert same(r2, live)
    assert not same(r2, r3)  # control: the rollouts have other routes


# every recompute, and every source, but not each with each
@pytest.mark.parametrize(
    ("recompute", "source"),
    [
        *(("block", source) for source in SOURCES),
        slow("full", "old-policy"),
        slow("moe", "rollout"),
    ],
)
def test_a_recompute_does_not_move_the_ratio(
    patched: TreeWorker, policy: Policy, tmp_path: Path, recompute: str, source: str
) -> None:
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 2, *TWO, *RECOMPUTES[recompute])
    argv += ["--moe-router-replay-source", source]
    (seen,) = patched.run(watched, 1, argv, timeout_s=120)
    pairs = [*zip(on_response(seen, "old"), on_response(seen, "new"), strict=True)]
    first, second = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
    assert all(torch.equal(old, new) for old, new in first)
    assert not any(torch.equal(old, new) for old, new in second)


def test_routes_that_are_not_those_of_the_pass_show(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 2, *TWO, *R2)
    (shifted,) = patched.run(routed, 1, argv, shifted=True, timeout_s=120)
    assert all(share < 0.9 for share in shifted.dispatched)


def _by_layer(maps: Maps, times: int = 1) -> dict[int, list[bytes]]:
    """The maps of each layer, sorted, so that the order of passes does not matter."""
    found: dict[int, list[bytes]] = {}
    for layer, map_TE in maps:
        found.setdefault(layer, []).extend([map_TE.numpy().tobytes()] * times)
    return {layer: sorted(parts) for layer, parts in found.items()}
