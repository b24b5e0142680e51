"""Megatron's own RL loop replays what its engine sampled, in every layout.

Run these with `--megatron CLONE` (a clone at core_v0.19.0 or main): megatron-core from PyPI has no
RL loop. They need the packages that proof/fidelity/rl_loop.py names.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from megatron_r3.cli import main
from megatron_r3.cpu import CPU_ARGS
from megatron_r3.data.store import RolloutStore
from megatron_r3.rl.rl_loop import OLD, UPDATE
from proof.fidelity import rl_loop
from proof.fidelity.gradients import assemble
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.rl_loop import Seen

NEEDED = "einops xxhash zmq msgpack quart hypercorn openai orjson h2 fastapi uvicorn pydantic"
REPLAY = ["--moe-router-replay", "--moe-router-replay-verify-dispatch"]
PACKED = ["--rl-use-sequence-packing"]
LAYOUTS = {
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "PP2": "--pipeline-model-parallel-size 2",
    "TP2, SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "EP2": "--expert-model-parallel-size 2",
    "DP2": "",
}
RANKS = {"recompute": 1}  # others 2
CONTROLS = ("shift", "layers", "turns")
TOLERANCE = 2e-5  # relative, of loss and gradients: what rounding in float32 makes of 4 layers
TOKENS = sum(len(tokens) - 1 for group in rl_loop.made_up() for t in group for tokens in t.tokens)
PAIRS = TOKENS * rl_loop.LAYERS * rl_loop.TOPK


@pytest.fixture(scope="module", autouse=True)
def has_loop(patched_tree: Path) -> None:
    if not (patched_tree / "train_rl.py").is_file():
        pytest.skip("this tree has no RL loop: give --megatron CLONE, at core_v0.19.0 or main")
    missing = [name for name in NEEDED.split() if find_spec(name) is None]
    if missing:
        pytest.skip(f"the RL loop needs {', '.join(missing)}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = rl_loop.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return ["--tokenizer-model", str(folder)]


@pytest.fixture(scope="module")
def base(
    patched: TreeWorker, tokenizer: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Arguments of one step from a checkpoint, so that every layout begins with one model."""
    argv = [*CPU_ARGS, *rl_loop.MODEL, *tokenizer]
    saved = str(tmp_path_factory.mktemp("policy") / "checkpoint")
    run(patched, [*argv, "--train-iters", "1", "--save", saved, "--save-interval", "1"])
    return [*argv, "--train-iters", "1", "--load", saved]


def run(worker: TreeWorker, argv: list[str], *given: object, ranks: int = 1) -> list[Seen]:
    return worker.run(rl_loop.on_given, ranks, str(worker.tree), argv, *given, timeout_s=240)


def dispatched(seen: list[Seen]) -> dict[str, tuple[int, int]]:
    """Of all ranks: the pairs that reached their expert, and all pairs."""
    sums: dict[str, Counter[int]] = {}
    for rank in seen:
        for name, pair in rank.dispatched.items():
            sums.setdefault(name, Counter()).update(dict(enumerate(pair)))
    return {name: (pair[0], pair[1]) for name, pair in sums.items()}


def loss_of(seen: list[Seen], step: int = 0) -> dict[str, float]:
    return next(rank.losses[step] for rank in seen if rank.losses[step])


def differs(seen: list[Seen], other: list[Seen]) -> bool:
    """Whether loss or gradients are others than rounding explains."""
    one, two = loss_of(seen), loss_of(other)
    if any(abs(one[name] - two[name]) > TOLERANCE * abs(two[name]) + 1e-7 for name in two):
        return True
    ours, theirs = (assemble([p for rank in s for p in rank.pieces[0]]) for s in (seen, other))
    assert ours.keys() == theirs.keys()
    return any(
        float((ours[name] - whole).abs().max()) > TOLERANCE * float(whole.abs().max()) + 1e-8
        for name, whole in theirs.items()
    )


@pytest.fixture(scope="module")
def alone(patched: TreeWorker, base: list[str]) -> list[Seen]:
    """One process, not packed."""
    return run(patched, [*base, *REPLAY])


def test_old_pass_and_update_take_the_given_experts(alone: list[Seen]) -> None:
    assert dispatched(alone) == {OLD: (PAIRS, PAIRS), UPDATE: (PAIRS, PAIRS)}
    assert loss_of(alone)["rl/pi_over_pi_old"] == 1
    assert loss_of(alone)["lm loss"] != 0


def test_the_reference_pass_is_live(patched, base, alone):
    (off,) = run(patched, base)
    old, reference = alone[0].logprobs
    assert off.dispatched == {}
    assert np.array_equal(reference, off.logprobs[1])
    assert np.abs(old - off.logprobs[0]).max() > 0.01  # the control: given routes act


@pytest.mark.parametrize("packed", [[], PACKED], ids=["unpacked", "packed"])
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_layouts_have_the_loss_and_gradients_of_one_process(patched, base, alone, layout, packed):
    argv = [*base, *REPLAY, *packed, *LAYOUTS.get(layout, "").split()]
    ranks = 2 if layout in LAYOUTS and layout not in RANKS else 1
    seen = run(patched, argv, ranks=ranks)
    assert not differs(seen, alone)
    for name, (matched, total) in dispatched(seen).items():
        # a recompute is counted too; ranks that share a sequence each see the experts of all
        assert matched == total
        assert total >= PAIRS, name
        assert total % PAIRS == 0, name
    assert dispatched(seen).keys() == {OLD, UPDATE}
    for how in CONTROLS:
        wrong = run(patched, argv, how, ranks=ranks)
        assert differs(wrong, alone), how
        assert all(matched < total for matched, total in dispatched(wrong).values()), how


def test_fillers_and_turns_without_routes(patched, base, tmp_path):
    """15 turns on two ranks need one filler. The turns of two rollouts are live."""
    argv = [*base, *REPLAY]
    seen = patched.run(
        rl_loop.on_given, 2, str(patched.tree), argv, "", 2, 3, timeout_s=240, log_dir=tmp_path
    )
    assert all(matched == total > 0 for matched, total in dispatched(seen).values())
    assert re.search(r"> rollouts: 15 turns, .*; [2-4] turns without", logs(tmp_path))
    with pytest.raises(RankError, match=r"rollout 0 .*turn 0: the engine sent no routes"):
        run(patched, [*argv, "--moe-router-replay-missing", "error"], "", 2)
    with pytest.raises(RankError, match="no turn of this collection has routes"):
        run(patched, argv, "", 8)


def test_a_conversation_takes_the_routes_of_its_requests(patched, base, tmp_path):
    """On main a rollout whose second turn begins with the first one is one sequence."""
    argv = [*base, *REPLAY, *PACKED]
    given = (str(patched.tree), argv, "", 0, 0, True)
    seen = patched.run(rl_loop.on_given, 1, *given, timeout_s=240, log_dir=tmp_path)
    assert all(matched == total > 0 for matched, total in dispatched(seen).values())
    is_main = (patched.tree / "megatron" / "rl" / "types").is_dir()
    talks = [talk for group in rl_loop.made_up(0, True) for talk in group]
    sequences = len(talks) if is_main else sum(len(talk.tokens) for talk in talks)
    assert f"> rollouts: {sequences} turns," in logs(tmp_path)


def logs(folder: Path) -> str:
    return "".join(log.read_text() for log in folder.glob("*.log"))


def test_several_updates_replay_one_collection(patched: TreeWorker, base: list[str]) -> None:
    twice = ["--grpo-iterations", "2", "--train-iters", "2"]
    (seen,) = run(patched, [*base, *REPLAY, *twice])
    assert dispatched([seen]) == {OLD: (PAIRS, PAIRS), UPDATE: (2 * PAIRS, 2 * PAIRS)}
    assert len(seen.logprobs) == 2  # one collection: an old-policy pass, and one of the reference
    assert seen.losses[1]["rl/pi_over_pi_old"] != 1


def test_a_collection_becomes_a_shard(patched, base, tmp_path, capsys):
    store = tmp_path / "store"
    run(patched, [*base, *REPLAY, "--rl-write-rollouts", str(store)], ranks=2)
    assert main(["rollouts", "verify", str(store)]) == 0
    assert main(["rollouts", "inspect", str(store)]) == 0
    assert "missing rows              0\n" in capsys.readouterr().out
    written = RolloutStore([store])
    given = [
        (t.tokens[i], t.routes[i])
        for g in rl_loop.made_up()
        for t in g
        for i in range(len(t.tokens))
    ]
    assert len(written) == len(given)
    for number, (tokens, routes) in enumerate(given):
        rollout = written.rollout(number)
        assert rollout.tokens_N.tolist() == tokens
        assert rl_loop.sent(rollout.routes.ids_LTK.swapaxes(0, 1)) == routes


@pytest.mark.parametrize("more", [[], PACKED, ["--bf16"]], ids=["unpacked", "packed", "bf16"])
def test_off_two_steps_are_those_of_the_unpatched_tree(patched, unpatched, tokenizer, more):
    argv = [*CPU_ARGS, *rl_loop.MODEL, *tokenizer, "--train-iters", "2", *more]
    (ours,), (theirs,) = (run(worker, argv) for worker in (patched, unpatched))
    assert ours.losses == theirs.losses
    assert len(ours.losses) == 2
    for one, two in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert np.array_equal(one, two)
    for step, same in zip(ours.pieces, theirs.pieces, strict=True):
        for piece, other in zip(step, same, strict=True):
            assert np.array_equal(piece.values, other.values)


# -- with the engine


@pytest.fixture
def free_port() -> None:
    """The loop's server has one port, and would share it with another loop without a word."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 8294)) == 0:
            pytest.skip("port 8294 is taken, and the loop has no other")


def sampled(tree: Path, folder: Path, argv: list[str]) -> str:
    """Run train_rl.py with its engine; its log."""
    command = [
        sys.executable,
        "-m",
        "proof.fidelity.rl_loop",
        str(folder),
        str(tree / "train_rl.py"),
    ]
    root = str(Path(rl_loop.__file__).parents[1])
    path = os.pathsep.join([str(tree), root, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*command, *CPU_ARGS, *rl_loop.MODEL, "--bf16", "--train-iters", "2", *argv],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=300)
    finally:  # the loop leaves its coordinator behind
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, log[-3000:]
    return log


@pytest.mark.usefixtures("free_port")
@pytest.mark.parametrize(
    "more", [[], [*PACKED, *LAYOUTS["recompute"].split()]], ids=["unpacked", "packed, recompute"]
)
def test_what_the_engine_sampled_is_replayed(
    patched_tree: Path, tokenizer: list[str], tmp_path: Path, more: list[str]
) -> None:
    store = tmp_path / "store"
    writes = ["--rl-write-rollouts", str(store)]
    log = sampled(patched_tree, tmp_path, [*tokenizer, *REPLAY, *writes, *more])
    shares = re.findall(r"(old pass: |\| )routes dispatched as recorded: ([\d.]+)", log)
    assert [share for _, share in shares] == ["1.0000"] * 4
    # a router that is asked again, on the same weights, rarely changes its mind in bfloat16
    mismatch = re.findall(r"router mismatch: ([\d.]+)", log)
    assert len(mismatch) == 4
    assert all(float(share) < 0.05 for share in mismatch)
    assert len(re.findall(r"> rollouts: 8 turns, .* 0 turns without routes", log)) == 2
    assert len(RolloutStore([store])) == 16
