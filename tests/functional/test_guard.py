"""Nothing that is not finite, and no routes that nobody took, gets into a weight.

Shape suffixes (docs/glossary.md): N.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import Policy, parts, steps_on, train

from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.train import launch
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker

PP2 = ["--pipeline-model-parallel-size", "2"]
OVERLAP = ["--bf16", "--overlap-moe-expert-parallel-comm", "--expert-model-parallel-size", "2"]


def poisoned(rank: int, argv: list[str], poison: str, token: int = 0) -> None:
    """Train with something wrong in the model; the first iteration of the process finds it."""
    from demo.pretrain import datasets, forward_step

    def spoil(models: list[torch.nn.Module]) -> None:
        for name, parameter in ((n, p) for model in models for n, p in model.named_parameters()):
            if poison == "embedding" and "word_embeddings" in name:
                parameter.data[token] = float("nan")
            if poison == "gradient" and name.endswith("layers.1.mlp.router.weight"):
                parameter.register_hook(lambda gradient: gradient * float("nan"))
        if "routing" in poison:
            from megatron.core.transformer.moe.router import TopKRouter

            # four layers in the first micro-batch, one in the second
            layers = 5 if poison == "routing, but for the first five layers" else 0
            TopKRouter.routing = _asks_nobody(TopKRouter.routing, layers)

    sys.argv = ["pretrain.py", *argv]
    launch.train(datasets, forward_step, spoil)


def ends(rank: int, argv: list[str]) -> Any:
    """How this rank ends where rank 1 has a wrong gradient: its status, or None if it goes on."""
    from megatron_r3.train import refuse

    refuse.SILENCE_S = 1.0
    try:
        poisoned(rank, argv, "gradient" if rank == 1 else "nothing")
    except SystemExit as end:
        return end.code
    return None


def _asks_nobody(original: Any, after: int) -> Any:
    calls = count()

    def routing(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if next(calls) < after:
            return original(self, logits, *args, **kwargs)
        hook, self.router_replay, self.config.moe_router_replay = self.router_replay, None, False
        try:
            return original(self, logits, *args, **kwargs)
        finally:
            self.router_replay, self.config.moe_router_replay = hook, True

    return routing


def refused(patched: TreeWorker, ranks: int, argv: list[str], *poison: Any) -> str:
    """What the rank that speaks said."""
    with pytest.raises(RankError) as failure:
        patched.run(poisoned, ranks, argv, *poison, timeout_s=120)
    text = str(failure.value)
    assert "SystemExit: 1" in text
    (line,) = {line for line in text.splitlines() if line.startswith("error: ")}
    return line


def saves(policy: Policy, folder: Path, *more: str) -> list[str]:
    saved = ["--save", str(folder), "--save-interval", "1"]
    return steps_on(policy, policy.store, 1, *saved, *more)


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, PP2)])
def test_a_log_prob_that_is_not_finite_names_rollout_and_token_in_the_first_iteration(
    patched: TreeWorker, policy: Policy, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    store = RolloutStore([policy.store])
    rollout = store.rollout(2)  # of the first micro-batch; not its first
    earlier = {int(t) for index in (0, 1) for t in store.rollout(index).tokens_N}
    token = next((int(t) for t in rollout.tokens_N[:-1] if int(t) not in earlier), None)
    if token is None:
        token = int(rollout.tokens_N[0])
    inputs = [store.rollout(i).tokens_N[:-1] for i in range(8)]
    first = next(i for i, tokens in enumerate(inputs) if token in tokens)
    line = refused(patched, ranks, saves(policy, tmp_path / "s", *layout), "embedding", token)
    # what is predicted from the spoilt token on is wrong; of that the first response token is named
    at = int(np.argmax(inputs[first] == token))
    response_N = store.rollout(first).response_N
    named = next(t for t in range(at + 1, len(response_N)) if response_N[t])
    assert f"rollout {first}, token {named}: " in line
    assert str(policy.store) in line
    assert "the trainer's log-prob is nan" in line
    assert "Iteration 1 changed no weight" in line
    assert not (tmp_path / "s" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, PP2)])
def test_a_gradient_that_is_not_finite_names_its_parameter_and_the_rollouts(
    patched: TreeWorker, policy: Policy, tmp_path: Path, ranks: int, layout: list[str]
) -> None:
    line = refused(patched, ranks, saves(policy, tmp_path / "s", *layout), "gradient")
    assert "layers.1.mlp.router.weight is not finite" in line
    assert "rollout 0 to " in line
    assert not (tmp_path / "s" / "latest_checkpointed_iteration.txt").exists()


def test_a_rank_that_found_nothing_ends_with_the_one_that_did(patched, policy, tmp_path):
    argv = saves(policy, tmp_path / "s", *PP2)
    assert patched.run(ends, 2, argv, timeout_s=60) == [1, 1]


@pytest.mark.parametrize(
    ("layout", "poison"),
    [([], "routing"), ([], "routing, but for the first five layers"), (OVERLAP, "routing")],
)
def test_a_framework_that_replaces_routing_cannot_train_live(
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout: list[str], poison: str
) -> None:
    ranks = 2 if layout else 1
    line = refused(patched, ranks, saves(policy, tmp_path / "s", *layout), poison)
    assert "no router took them" in line
    assert not (tmp_path / "s" / "latest_checkpointed_iteration.txt").exists()


def other_digest(rank: int, argv: list[str]) -> None:
    """Ranks whose digests of the used shards differ, in the second step."""
    from megatron_r3.train.step import RolloutStep

    RolloutStep._digest_of_used_shards = (  # type: ignore[method-assign]
        lambda self: rank * (self.progress.iteration == 1)
    )
    train(rank, argv)


def test_ranks_that_do_not_see_the_same_shards_end_before_an_update(patched, policy, tmp_path):
    """One rank tells the others what there is, so this cannot be; if it were, it would be seen."""
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    argv = steps_on(policy, policy.store, 2, *saved, "--expert-model-parallel-size", "2")
    with pytest.raises(RankError) as failure:
        patched.run(other_digest, 2, argv, timeout_s=120)
    assert f"error: {policy.store}: the ranks do not see the same shards" in str(failure.value)
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"


def other_folders(rank: int, argv: list[str], folder: str) -> None:
    """Two nodes that have another store under the same name."""
    from megatron_r3.train import refuse

    refuse.SILENCE_S = 3.0  # the first rank finds nothing wrong and says nothing
    os.chdir(Path(folder) / f"node{rank}")
    train(rank, argv)


def test_a_rank_that_has_another_shard_ends_before_an_update(patched, policy, tmp_path):
    info, shards = parts(policy)
    plain = replace(info, router_fingerprint=())
    for node, order in (("node0", (0, 1, 2)), ("node1", (0, 2, 1))):
        for version, index in enumerate(order):
            moved = [replace(rollout, policy_version=version) for rollout in shards[index]]
            write_shard(tmp_path / node / "store", plain, moved)
    saved = ["--save", str(tmp_path / "saved"), "--save-interval", "1"]
    follow = ["--rollouts-follow", "5", "--expert-model-parallel-size", "2"]
    argv = steps_on(policy, Path("store"), 2, *saved, *follow)
    with pytest.raises(RankError) as failure:
        patched.run(other_folders, 2, argv, str(tmp_path), timeout_s=120)
    assert "shard-00001.safetensors: was changed or replaced since the first rank" in str(
        failure.value
    )
    assert "or is another file on this node" in str(failure.value)
    # the first shard is the same on both: that step was updated, and the second one was not
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_the_same_training_without_poison_saves(patched, policy, tmp_path):
    patched.run(poisoned, 1, saves(policy, tmp_path / "s"), "nothing", timeout_s=120)
    assert (tmp_path / "s" / "latest_checkpointed_iteration.txt").read_text() == "1"
