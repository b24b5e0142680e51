"""Experts in other places: the same model, and the same training on a sampler's routes.

Shape suffixes (docs/glossary.md): B, E, K, L, N, P, S, T.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import MODELS, make, move, move_placed
from once import Once
from skewed_routes import Gradients, furthest
from training import (
    Policy,
    changed_store,
    export,
    fails,
    gradients,
    import_and_forget,
    import_weights,
    older_patches,
    resumed,
    steps_on,
    stores,
    train,
    train_by_experts,
)

from demo.model import arguments
from fidelity.rig.rank_process import RankError
from fidelity.rig.worker import TreeWorker
from megatron_r3.cli import main
from megatron_r3.fingerprint import router_fingerprint
from megatron_r3.placement import Placement
from megatron_r3.policies.published import read_policy
from megatron_r3.store import RolloutStore, write_shard

EXPERTS = 16  # of the demo's model, on two ranks
EP2 = ["--expert-model-parallel-size", "2"]
ONE = ["--micro-batch-size", "1"]


def mixed_up(layers: tuple[int, ...], experts: int, groups: int = 1) -> Placement:
    """A placement by chance, another one for each layer, that keeps groups together."""
    generator = np.random.default_rng(11)
    rows = []
    for _ in layers:
        inside = [generator.permutation(experts // groups) for _ in range(groups)]
        order = generator.permutation(groups)
        rows.append(np.concatenate([order[g] * len(inside[g]) + inside[g] for g in range(groups)]))
    return Placement(layers, np.stack(rows))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_a_model_with_placed_experts_is_the_same_model(
    patched: TreeWorker, once: Once, tmp_path: Path, name: str
) -> None:
    folder = once(f"family {name}", lambda folder: make(name, folder))
    groups = MODELS[name][1].get("n_group", 1)
    layers = {"qwen3_moe": (0, 2), "qwen2_moe": (0, 2), "deepseek_v3": (1, 2)}.get(name, (0, 1, 2))
    placement = mixed_up(layers, 8, groups)
    (plain,) = patched.run(move, 1, folder, tmp_path / "plain", timeout_s=120)
    (placed,) = patched.run(move_placed, 1, folder, tmp_path / "placed", placement, timeout_s=120)
    # Two experts of a token have the same sum in either order, four do not; and the probabilities
    # of qwen2_moe are shares of a sum over all experts.
    if name in ("qwen3_moe", "mixtral", "gpt_oss"):
        assert torch.equal(placed.logits, plain.logits)
    assert (placed.logits - plain.logits).abs().max() < 1e-5 * plain.logits.abs().max()
    pairs = zip(placed.routes_BSE, plain.routes_BSE, placement.place_LE, strict=True)
    for ours_BSE, theirs_BSE, place_E in pairs:
        assert torch.equal(ours_BSE[..., place_E], theirs_BSE)
        assert not torch.equal(ours_BSE, theirs_BSE)
    # written with the placement the files are the same; without it they are another model's
    assert bytes_of(tmp_path / "placed") == bytes_of(tmp_path / "plain")
    assert bytes_of(tmp_path / "other") != bytes_of(tmp_path / "plain")


def test_two_ranks_read_and_write_placed_experts(
    patched: TreeWorker, once: Once, tmp_path: Path
) -> None:
    folder = once("family deepseek_v3", lambda folder: make("deepseek_v3", folder))
    placement = mixed_up((1, 2), 8, 4)
    (plain,) = patched.run(move, 1, folder, tmp_path / "plain", timeout_s=120)
    ranks = patched.run(
        move_placed, 2, folder, tmp_path / "placed", placement, tuple(EP2), timeout_s=120
    )
    for rank in ranks:
        assert (rank.logits - plain.logits).abs().max() < 1e-5 * plain.logits.abs().max()
    assert bytes_of(tmp_path / "placed") == bytes_of(tmp_path / "plain")


def test_a_placement_that_takes_groups_apart_is_refused(
    patched: TreeWorker, once: Once, tmp_path: Path
) -> None:
    folder = once("family deepseek_v3", lambda folder: make("deepseek_v3", folder))
    apart = mixed_up((1, 2), 8)
    with pytest.raises(RankError, match=r"here: layer 1: the experts of group \d are in several"):
        patched.run(move_placed, 1, folder, tmp_path / "placed", apart, timeout_s=120)


@pytest.fixture(scope="module")
def file(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The placement that the command makes of the policy's rollouts."""
    file = tmp_path_factory.mktemp("placement") / "placement.json"
    argv = ["rollouts", "place", str(policy.store), "--ep", "4", "--domain", "2"]
    assert main([*argv, "--output", str(file)]) == 0
    placement = Placement.read(file)
    assert (placement.place_LE != np.arange(EXPERTS)).any(1).all()
    return file


@pytest.fixture(scope="module")
def checkpoints(
    patched: TreeWorker, policy: Policy, file: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Policy]:
    """The policy's weights imported as they are, placed, and placed without remembering it."""
    found = {}
    for name in ("plain", "placed", "forgotten"):
        folder = tmp_path_factory.mktemp(name)
        argv = [*ONE, "--hf-import", str(policy.hf), "--save", str(folder), "--save-interval", "1"]
        if name != "plain":
            argv += ["--hf-placement", str(file)]
        run = import_and_forget if name == "forgotten" else import_weights
        patched.run(run, 2, arguments(argv, EP2), timeout_s=120)
        found[name] = Policy(folder, policy.hf, policy.store)
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, EP2)])
def test_an_export_puts_the_experts_back(
    patched: TreeWorker,
    checkpoints: dict[str, Policy],
    tmp_path: Path,
    ranks: int,
    layout: list[str],
) -> None:
    for name, policy in checkpoints.items():
        argv = [*ONE, "--hf-export", str(tmp_path / name), "--load", str(policy.checkpoint)]
        patched.run(export, ranks, arguments(argv, layout), timeout_s=120)
    wanted = bytes_of(checkpoints["plain"].hf)
    assert bytes_of(tmp_path / "plain") == bytes_of(tmp_path / "placed") == wanted
    assert bytes_of(tmp_path / "forgotten") != wanted


def in_order(ranks: Gradients, placement: Placement) -> Gradients:
    """What two ranks have of placed experts and routers, under the names without a placement."""
    found: Gradients = [{}, {}]
    for rank, tensors in enumerate(ranks):
        for name, tensor in tensors.items():
            layer = re.search(r"\.layers\.(\d+)\.", name)
            expert = re.search(r"\.local_experts\.(\d+)\.", name)
            home, new_name = rank, name
            if layer and name.endswith("router.weight"):
                tensor = tensor[placement.place_LE[int(layer[1])]]
            elif layer and expert:
                place = int(expert[1]) + rank * EXPERTS // 2
                home, local = divmod(int(placement.expert_LE[int(layer[1]), place]), EXPERTS // 2)
                new_name = name.replace(expert[0], f".local_experts.{local}.")
            found[home][new_name] = tensor
    return found


def test_training_is_the_same(
    patched: TreeWorker, checkpoints: dict[str, Policy], file: Path, tmp_path: Path
) -> None:
    found, logs = {}, {}
    store = RolloutStore([checkpoints["plain"].store])
    # The advantages of a group cancel each other, and rounding errors do not: here all are 1.
    alike = [replace(store.rollout(i), advantage=1.0) for i in range(len(store))]
    write_shard(tmp_path / "alike", store.info, alike)
    for name in ("plain", "placed"):
        argv = checkpoints[name].arguments(*EP2, store=tmp_path / "alike")
        argv += ["--clip-grad", "0", "--rollouts-advantages", "stored"]
        argv += ["--moe-router-replay-verify-plan", "--rollouts-log", str(tmp_path / name)]
        found[name] = patched.run(gradients, 2, argv, timeout_s=240)
        logs[name] = json.loads((tmp_path / name).read_text().splitlines()[-1])
    same = [n for n in logs["plain"] if "routes" in n or "mismatch" in n]
    assert logs["placed"]["routes dispatched as recorded"] == 1.0
    assert {n: logs["placed"][n] for n in same} == {n: logs["plain"][n] for n in same}
    placement = Placement.read(file)
    # Sums over experts have another order. The bound is of an expert that hardly any token takes.
    assert furthest(in_order(found["placed"], placement), found["plain"]) < 2e-5
    # the control: the gradients of other experts are far away
    assert furthest(found["placed"], found["plain"]) > 0.1


LAYOUTS = {
    "PP2": "--pipeline-model-parallel-size 2",
    "PP2xVPP2": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "TP2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "CP2": "--context-parallel-size 2",
    "EP2, guests": "--expert-model-parallel-size 2 --moe-router-replay-guest-slots 2 "
    "--moe-router-replay-guest-tokens 1",
    "old policy": "--expert-model-parallel-size 2 --rollouts-old-policy trainer "
    "--moe-router-replay-source old-policy --rollouts-epochs 2",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_reaches_its_expert(
    patched: TreeWorker, checkpoints: dict[str, Policy], tmp_path: Path, layout: str
) -> None:
    argv = [*checkpoints["placed"].arguments(), *LAYOUTS[layout].split()]
    patched.run(train, 2, [*argv, "--rollouts-log", str(tmp_path / "log")], timeout_s=240)
    logged = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert logged["routes dispatched as recorded"] == 1.0


def test_the_witness_sees_routes_that_are_not_places(
    patched: TreeWorker, checkpoints: dict[str, Policy], tmp_path: Path
) -> None:
    argv = [*checkpoints["placed"].arguments(*EP2), "--rollouts-log", str(tmp_path / "log")]
    patched.run(train_by_experts, 2, argv, timeout_s=240)
    logged = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert logged["routes dispatched as recorded"] < 0.5


def test_a_tree_with_older_patches_is_refused(
    patched: TreeWorker, checkpoints: dict[str, Policy]
) -> None:
    with pytest.raises(RankError, match="--rollouts: this Megatron would lose where the experts"):
        patched.run(older_patches, 1, checkpoints["placed"].arguments(), timeout_s=120)


def test_a_stage_without_experts(patched: TreeWorker, policy: Policy, tmp_path: Path) -> None:
    """The first pipeline stage has dense layers alone, and layer 2 is the first of the routes."""
    freq, pp2 = ["--moe-layer-freq", "[0,0,1,1]"], ["--pipeline-model-parallel-size", "2"]
    options = "--micro-batch-size 4 --global-batch-size 4 --train-iters 1 --lr 1e-3"
    saved, hf, placed = (tmp_path / name for name in ("saved", "hf", "placed"))
    argv = arguments(options.split(), freq, ["--save", str(saved), "--save-interval", "1"])
    patched.run(train, 1, argv, timeout_s=120)
    argv = arguments(ONE, freq, ["--load", str(saved), "--hf-export", str(hf)])
    patched.run(export, 1, argv, timeout_s=120)
    mixed_up((2, 3), EXPERTS).write(tmp_path / "placement.json")
    argv = ["--hf-import", str(hf), "--hf-placement", str(tmp_path / "placement.json")]
    argv = arguments(ONE, freq, pp2, argv, ["--save", str(placed), "--save-interval", "1"])
    patched.run(import_weights, 2, argv, timeout_s=120)
    store = changed_store(
        policy.store,
        tmp_path / "store",
        lambda routes: [ids_LTK[2:] for ids_LTK in routes],
        moe_layers=(2, 3),
        router_fingerprint=router_fingerprint(hf, (2, 3)),
    )
    argv = Policy(placed, hf, store).arguments(*freq, *pp2, "--rollouts-log", str(tmp_path / "log"))
    patched.run(train, 2, argv, timeout_s=120)
    logged = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert logged["routes dispatched as recorded"] == 1.0


def test_a_placement_that_was_forgotten_is_seen(
    patched: TreeWorker, checkpoints: dict[str, Policy]
) -> None:
    message = fails(patched, checkpoints["forgotten"].arguments())
    assert "sampled from another policy: the router of layer 1" in message


def test_checkpoints_and_policies_of_a_training(
    patched: TreeWorker, checkpoints: dict[str, Policy], tmp_path: Path
) -> None:
    """A training hands its placement on: --finetune and a resume load it, policies know nothing."""
    for name in ("plain", "placed"):
        policy, folder = checkpoints[name], tmp_path / name
        store = stores(policy, folder, mixed=True)
        publish = ["--rollouts-publish", str(folder / "policies"), "--rollouts-follow", "20"]
        publish += ["--rollouts-publish-like", str(policy.hf)]
        save = ["--save", str(folder / "saved"), "--save-interval", "1"]
        half = [*steps_on(policy, store, 4, *publish, *save), "--exit-interval", "2"]
        patched.run(train, 2, [*half, *EP2], timeout_s=240)
        argv = resumed(policy, store, folder / "saved", *publish, *save)
        patched.run(train, 2, [*argv, *EP2], timeout_s=240)
        out = [*ONE, "--hf-export", str(folder / "hf"), "--load", str(folder / "saved")]
        patched.run(export, 1, arguments(out), timeout_s=120)
    for version in range(5):
        plain, placed = (
            read_policy(tmp_path / n / "policies", version) for n in ("plain", "placed")
        )
        assert np.array_equal(placed.probe.tokens_PN, plain.probe.tokens_PN)
        assert np.abs(placed.probe.logprobs_PN - plain.probe.logprobs_PN).max() < 1e-4
        routes = [np.sort(one.probe.routes_LPNK, axis=-1) for one in (plain, placed)]
        assert (routes[0] == routes[1]).mean() > 0.999
        if version == 0:
            assert placed.files == plain.files
    assert nearly(tmp_path / "plain" / "hf", tmp_path / "placed" / "hf")
    assert not nearly(tmp_path / "plain" / "hf", checkpoints["plain"].hf)


def nearly(one: Path, other: Path) -> bool:
    """Whether two directories have the same weights, to a few roundings of bfloat16."""
    from safetensors.torch import load_file

    ours, theirs = (
        {k: t.float() for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}
        for folder in (one, other)
    )
    return all((ours[k] - t).norm() <= 1e-3 * t.norm() for k, t in theirs.items())


def test_a_script_with_routes_of_its_own_is_refused(
    patched: TreeWorker, checkpoints: dict[str, Policy]
) -> None:
    argv = checkpoints["placed"].arguments()
    rollouts = argv.index("--rollouts")
    argv = [a for i, a in enumerate(argv) if i not in (rollouts, rollouts + 1)]
    argv = [a for a in argv if not a.startswith("--moe-router-replay-")]
    del argv[argv.index("1", argv.index("--calculate-per-token-loss"))]
    assert "experts in other places (--hf-placement)" in fails(patched, argv)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--hf-export", "--hf-placement is for --hf-import"),
        ("--hf-import", "a placement of 8 experts in the layers"),
    ],
)
def test_options_that_do_not_fit(
    patched: TreeWorker, policy: Policy, tmp_path: Path, option: str, message: str
) -> None:
    mixed_up((0, 1, 2, 3), 8).write(tmp_path / "placement.json")
    argv: list[Any] = [*ONE, "--hf-placement", str(tmp_path / "placement.json")]
    if option == "--hf-export":
        argv += [option, str(tmp_path / "hf"), "--load", str(policy.checkpoint)]
    else:
        argv += [option, str(policy.hf), "--save", str(tmp_path / "c"), "--save-interval", "1"]
    with pytest.raises(RankError) as failure:
        patched.run(export, 1, arguments(argv), timeout_s=120)
    assert message in str(failure.value)
    assert not [path for path in tmp_path.iterdir() if path.name != "placement.json"]
