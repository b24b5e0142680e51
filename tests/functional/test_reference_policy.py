"""--rollouts-reference: a pass with other weights, after which the trainer is as it was.

test_policy_update.py has the loss and the gradients.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from slow import slow_except
from training import Policy, fails, gradients, resumed, same, steps_on, stores, train

from proof.fidelity.rig.worker import TreeWorker

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "PP2 VPP2": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"],
    ),
    "DP2, overlap": (
        2,
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
}
LIVE = ["--moe-router-replay-source", "live"]


def reference(folder: Path, coefficient: float) -> list[str]:
    return ["--rollouts-reference", str(folder), "--rollouts-kl-coeff", str(coefficient)]


def kl(log: Path) -> list[float]:
    return [json.loads(line)["update/reference kl"] for line in log.read_text().splitlines()]


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "DP2, overlap"))
def test_the_trainer_gets_its_weights_back_and_the_reference_keeps_its_own(
    patched: TreeWorker, policy: Policy, tmp_path: Path, layout: str
) -> None:
    ranks, more = LAYOUTS[layout]
    log = ["--rollouts-log", str(tmp_path / "log.jsonl")]
    argv = steps_on(policy, stores(policy, tmp_path, mixed=True), 3, *LIVE, *more)
    # with a coefficient of 0 the KL is measured alone
    watched = [*argv, *reference(policy.checkpoint, 0), *log]
    trained = patched.run(train, ranks, watched, timeout_s=240)
    assert same(trained, patched.run(train, ranks, argv, timeout_s=240))
    first, *later = kl(tmp_path / "log.jsonl")
    assert first < 1e-12  # the trainer has begun as the reference, and both route live
    assert min(later) > 1e-6
    # control: the term does what it says
    pulled = patched.run(train, ranks, [*argv, *reference(policy.checkpoint, 5)], timeout_s=240)
    assert not same(trained, pulled)


@pytest.mark.slow
def test_a_schedule_that_cuts_the_graph_at_the_output_has_the_gradient_of_the_entropy(
    patched: TreeWorker, policy: Policy, tmp_path: Path
) -> None:
    store = stores(policy, tmp_path, mixed=True)
    more = ["--expert-model-parallel-size", "2", "--bf16"]
    argv = steps_on(policy, store, 1, *more, *reference(policy.hf, 0.5))
    entropy = ["--rollouts-entropy-coeff", "0.5"]
    combined = [*argv, *entropy, "--overlap-moe-expert-parallel-comm"]
    got, want, without = (
        patched.run(gradients, 2, given, timeout_s=240)
        for given in (combined, [*argv, *entropy], argv)
    )
    assert off(got, want) < 1e-2
    assert off(without, want) > 1e-1  # control


def off(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> float:
    """The norm of the difference of all gradients, relative to their norm."""
    pairs = [
        (a[name].float(), b[name].float()) for a, b in zip(one, other, strict=True) for name in b
    ]
    difference = sum(float((x - y).square().sum()) for x, y in pairs)
    return float((difference / sum(float(y.square().sum()) for _, y in pairs)) ** 0.5)


def test_a_resumed_training_has_the_same_reference(patched, policy, tmp_path):
    store = stores(policy, tmp_path, mixed=True)
    more = [*reference(policy.hf, 0.5), "--rollouts-log", str(tmp_path / "log.jsonl")]
    whole = patched.run(train, 1, steps_on(policy, store, 4, *more), timeout_s=120)
    save = ["--save", str(tmp_path / "saved"), "--save-interval", "2", "--exit-interval", "2"]
    patched.run(train, 1, steps_on(policy, store, 4, *more, *save), timeout_s=120)
    assert same(whole, patched.run(train, 1, resumed(policy, store, tmp_path / "saved", *more)))
    values = kl(tmp_path / "log.jsonl")
    assert values[:2] == values[4:6]
    assert values[2:4] == values[6:]
    # control: another reference
    other = tmp_path / "saved"
    argv = resumed(policy, store, tmp_path / "saved", *reference(other, 0.5))
    assert not same(whole, patched.run(train, 1, argv, timeout_s=120))
    (said,) = patched.run(notices, 1, argv, timeout_s=120)
    assert f"the reference policy is {other} (iteration 2), before it was {policy.hf}" in said
    argv = resumed(policy, store, tmp_path / "saved", *more)
    assert "the reference policy is" not in patched.run(notices, 1, argv, timeout_s=120)[0]


def notices(rank: int, argv: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(rank, argv)
    return printed.getvalue()


def test_a_reference_of_another_shape_is_refused(patched, policy, tmp_path):
    for folder in (policy.checkpoint, policy.hf):
        argv = steps_on(policy, stores(policy, tmp_path / folder.name), 1, *reference(folder, 1))
        argv += ["--moe-ffn-hidden-size", "24", "--rollouts-policy", "any"]
        argv.remove("--load")
        argv.remove(str(policy.checkpoint))
        assert str(folder) in fails(patched, argv)
