"""Wrong data and wrong options never train: one clear error, before any process group.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import rewrite
from training import Policy, changed_store, parse, parse_all, torchrun, train, unread_options

from demo.model import arguments
from megatron_r3.data.store import RolloutStore, SamplingSettings, write_shard
from megatron_r3.replay.routes import Routes
from megatron_r3.train.option_table import NOT_WITH_ROLLOUTS
from proof.fidelity import model_options
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker


def refused(worker: TreeWorker, argv: list[str], **options: Any) -> str:
    (text,) = worker.run(parse, 1, argv, **options)
    assert text.count("error:") == 1, text
    assert "Traceback" not in text
    return str(text)


def refused_each(worker: TreeWorker, given: dict[str, list[str]], **options: Any) -> None:
    """Each command is refused with one error, which says its key."""
    (said,) = worker.run(parse_all, 1, [*given.values()], timeout_s=240, **options)
    for reason, text in zip(given, said, strict=True):
        assert text.count("error:") == 1, (reason, text)
        assert reason in " ".join(text.split()), (reason, text)
        assert "Traceback" not in text


def test_good_commands_are_accepted(patched: TreeWorker, policy: Policy) -> None:
    good = [[], ["--mtp-num-layers", "1"], ["--bf16", "--overlap-moe-expert-parallel-comm"]]
    # what the refusal of graphs that capture the router alone says to give
    good += ["--cuda-graph-scope moe_router moe_preprocess --cuda-graph-impl none".split()]
    argvs = [policy.arguments(*more) for more in good]
    assert patched.run(parse_all, 1, argvs) == [[""] * len(argvs)]


OPTIONS = {
    "sinkhorn": ["--moe-router-load-balancing-type", "sinkhorn"],
    "quantile_balancing": ["--moe-router-load-balancing-type", "quantile_balancing"],
    "moe_expert_capacity_factor": ["--moe-expert-capacity-factor", "1.5"],
    "moe_router_force_load_balancing": ["--moe-router-force-load-balancing"],
    "moe_router_force_biased": ["--moe-router-force-biased", "0.5"],
    # what an extra refuses: tests/unit/balance/test_guest_refusals.py
    "one rank has all experts": ["--moe-router-replay-guest-slots", "2"],
    # the store is of another model, or not of this training
    "MoE layers": ["--num-layers", "6"],
    "topk 4 there, 2 here": ["--moe-router-topk", "2"],
    "experts 16 there, 8 here": ["--num-experts", "8"],
    "[0, 1, 2, 3] there, [0, 2] here": ["--moe-layer-freq", "2"],
    "more than --seq-length 16": ["--seq-length", "16"],
    "ids go from 0 to 7": ["--vocab-size", "8"],
}


def test_options_that_would_not_replay_exactly(patched: TreeWorker, policy: Policy) -> None:
    refused_each(patched, {reason: policy.arguments(*more) for reason, more in OPTIONS.items()})


def test_every_routing_option_of_this_tree_was_looked_at(patched: TreeWorker) -> None:
    assert patched.run(unread_options, 1) == [[]]
    assert model_options.unread(patched.tree) == []


SHARDED = ["--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor"]
SHARDED += ["--data-parallel-sharding-strategy", "optim_grads_params"]
ROLLOUTS = {
    "-pack needs --micro-batch-size 1: a pack is a micro-batch": ["--rollouts-pack"],
    "--dataloader-type external": ["--dataloader-type", "external"],
    "--logits-load-dir /nowhere: it brings its own loss": ["--logits-load-dir", "/nowhere"],
    "--sft: it brings its own batches": ["--sft"],
    "--skip-train: no rollout would be trained on": ["--skip-train"],
    "--perform-rl-step: it samples": ["--perform-rl-step"],
    "--hybrid-context-parallel: it moves": ["--hybrid-context-parallel"],
    "--use-megatron-fsdp: replay was not tested": ["--use-megatron-fsdp", *SHARDED],
    "--use-torch-fsdp2: replay was not tested": ["--use-torch-fsdp2"],
    "--iterations-to-skip 2: the step that skips": ["--iterations-to-skip", "2"],
    "--phase-transition-iterations 1: each phase": ["--phase-transition-iterations", "1"],
}


def test_options_that_do_not_go_with_rollouts(patched: TreeWorker, policy: Policy) -> None:
    given = {reason: policy.arguments(*more) for reason, more in ROLLOUTS.items()}
    refused_each(patched, given, env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"})  # FSDP asks for it


def test_every_option_that_does_not_go_with_rollouts_is_in_the_list() -> None:
    named = {word.rstrip(":") for reason in ROLLOUTS for word in reason.split()}
    elsewhere = {"use_legacy_models", "override_ckpt_iteration"}  # tests/unit/seams/test_option.py
    names = NOT_WITH_ROLLOUTS.keys() - elsewhere
    assert {f"--{name.replace('_', '-')}" for name in names} <= named


def test_a_dense_model(patched: TreeWorker, policy: Policy) -> None:
    argv = policy.arguments()
    for name in ("--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size"):
        at = argv.index(name)
        del argv[at : at + 2]
    assert "no MoE layer" in refused(patched, argv)


def test_a_missing_store(patched: TreeWorker, policy: Policy, tmp_path: Path) -> None:
    text = refused(patched, policy.arguments(store=tmp_path / "nothing"))
    assert f"{tmp_path / 'nothing'}: no such rollout store" in text


def test_missing_rows_with_policy_error(patched, policy, tmp_path):
    store = RolloutStore([policy.store])
    rollout = store.rollout(3)
    recorded = np.ones(rollout.routes.num_rows, bool)
    recorded[6] = False
    routes = Routes.from_array(rollout.routes.ids_LTK, 16, recorded)
    rollouts = [store.rollout(0), replace(rollout, routes=routes)]
    write_shard(tmp_path / "store", store.info, rollouts)
    argv = policy.arguments(store=tmp_path / "store")
    assert patched.run(parse, 1, argv) == [""]
    text = refused(patched, [*argv, "--moe-router-replay-missing", "error"])
    assert "rollout 1" in text
    assert "token 6" in text


def test_megatron_r3_not_installed(patched: TreeWorker, policy: Policy) -> None:
    """Nobody adds its options then; `--moe-router-replay` alone is refused by the config."""
    text = refused(patched, policy.arguments(), hidden=True)
    assert "unrecognized arguments: --rollouts" in text


def train_on(
    patched: TreeWorker, argv: list[str], folder: Path, ranks: int = 1
) -> tuple[bool, str]:
    """Train in forked ranks: whether the training ended well, and all that the ranks printed."""
    folder.mkdir()
    failure = ""
    try:
        patched.run(train, ranks, argv, timeout_s=120, log_dir=folder)
    except RankError as error:
        failure = error.text
    assert not failure or "SystemExit: 1" in failure, failure
    printed = "".join((folder / f"rank{rank}.log").read_text() for rank in range(ranks))
    assert "Traceback" not in printed, printed
    return not failure, printed


def the_error(trained: tuple[bool, str]) -> str:
    """The one line with which a training was refused."""
    ended_well, printed = trained
    assert not ended_well
    (line,) = (line for line in printed.splitlines() if line.startswith("error:"))
    return line


def test_replay_without_rollouts(patched: TreeWorker, tmp_path: Path) -> None:
    """The script's own forward step knows nothing of routes."""
    batch = ["--micro-batch-size", "4", "--global-batch-size", "4", "--train-iters", "1"]
    argv = arguments(batch, ["--lr", "1e-3", "--moe-router-replay"])
    line = the_error(train_on(patched, argv, tmp_path / "logs"))
    assert "this script's forward step replayed nothing" in line


@pytest.mark.slow
def test_all_ranks_find_it_and_one_speaks(patched_tree: Path, policy: Policy) -> None:
    done = torchrun(
        patched_tree, "demo/pretrain.py", 2, *policy.arguments("--moe-router-topk", "2")
    )
    assert done.returncode in (1, 2)
    ours = done.stderr.split("torch/distributed/elastic")[0]  # torchrun has a traceback of its own
    assert "Traceback" not in ours, ours
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert "topk 4 there, 2 here" in line
    assert done.stderr.splitlines()[-2] == line  # below it stands the end of torchrun's frame


@pytest.mark.slow
def test_an_unpatched_tree_is_named_before_megatron_reads_options(megatron_tree, policy):
    done = torchrun(
        megatron_tree, "demo/pretrain.py", 1, *policy.arguments("--moe-router-topk", "2")
    )
    assert done.returncode == 1
    line = done.stderr.splitlines()[-2]
    assert line.startswith("error: --moe-router-replay")
    assert f": the Megatron-LM in {megatron_tree} is not patched; run " in line
    assert "usage:" not in done.stdout + done.stderr


def test_a_store_that_recorded_nothing(patched: TreeWorker, policy: Policy, tmp_path: Path) -> None:
    store = shutil.copytree(policy.store, tmp_path / "store")
    for path in store.glob("*.safetensors"):
        rewrite(path, recorded=np.zeros_like(load_file(path)["recorded"]))
    argv = policy.arguments(store=store)
    line = the_error(train_on(patched, argv, tmp_path / "logs"))
    assert "no token has recorded routes" in line


def of_another_policy(policy: Policy, folder: Path) -> Path:
    """The policy's store with the fingerprint of other routers."""
    others = ("0" * 16,) * 4
    return changed_store(policy.store, folder, lambda routes: routes, router_fingerprint=others)


def test_a_store_of_another_policy(patched: TreeWorker, policy: Policy, tmp_path: Path) -> None:
    argv = policy.arguments(store=of_another_policy(policy, tmp_path / "s"))
    trained = train_on(patched, argv, tmp_path / "logs", ranks=2)
    assert "sampled from another policy: the router of layer 1" in the_error(trained)
    assert "elapsed time per iteration" not in trained[1]


def test_rollouts_of_another_policy_on_request(patched, policy, tmp_path):
    store = of_another_policy(policy, tmp_path / "s")
    argv = policy.arguments("--rollouts-policy", "any", store=store)
    ended_well, printed = train_on(patched, argv, tmp_path / "logs", ranks=2)
    assert ended_well, printed
    assert "routes dispatched as recorded: 1.0000" in printed


def test_rollouts_without_replay_train_live_and_say_so_once(patched, policy, tmp_path):
    argv = [a for a in policy.arguments() if a != "--moe-router-replay"]
    ended_well, printed = train_on(patched, argv, tmp_path / "logs", ranks=2)
    assert ended_well, printed
    assert printed.count("routing live, not replaying") == 1


def sampled(policy: Policy, folder: Path, **settings: float) -> Path:
    """The policy's store, saying that it was sampled with these settings."""
    plain = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=13)
    changed = replace(plain, **settings)
    return changed_store(policy.store, folder, lambda routes: routes, sampling=changed)


SAMPLING: dict[str, dict[str, float]] = {
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.9, top_k 20": {"top_p": 0.9, "top_k": 20},
    "min_p 0.1": {"min_p": 0.1},
}


def test_sampling_that_the_loss_does_not_know_is_refused_or_accepted_by_name(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    given, taken = {}, []
    for named, settings in SAMPLING.items():
        store = sampled(policy, tmp_path / named, **settings)
        reason = f"sampled with {named}, and it does not have what the loss needs for that"
        given[reason] = policy.arguments(store=store)
        taken.append(policy.arguments("--rollouts-sampling", "any", store=store))
    refused_each(patched, given)
    taken.append(policy.arguments(store=sampled(policy, tmp_path / "plain", max_tokens=5)))
    assert patched.run(parse_all, 1, taken) == [[""] * len(taken)]


def test_what_a_user_should_know_is_said_at_the_start(patched, policy, tmp_path):
    known = changed_store(
        policy.store,
        tmp_path / "s",
        lambda routes: routes,
        vocab_size=65,
        sampling=SamplingSettings(temperature=0.7),
    )
    more = ("--rollouts-sampling", "any", "--mock-data")
    ended_well, printed = train_on(patched, policy.arguments(*more, store=known), tmp_path / "logs")
    assert ended_well, printed
    said = [line for line in printed.splitlines() if "> rollouts:" in line]
    padded = next(line for line in said if "65 rows, and the trainer's softmax has 64" in line)
    assert padded.count("warning:") == 1
    assert any("warning: the rollouts were sampled with temperature 0.7" in line for line in said)
    assert any("--data-path and --mock-data are not trained on" in line for line in said)
    # control: of the store as it is there is nothing to say
    _, printed = train_on(patched, policy.arguments(), tmp_path / "plain")
    assert "elapsed time per iteration" in printed
    assert "softmax has" not in printed
    assert "--mock-data are not trained on" not in printed
