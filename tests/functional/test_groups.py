"""A tree with the patches of r3 alone trains as the whole one; what it lacks is an error."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training import Policy, parse, same, steps_on, stores, train

from demo import megatron_server
from demo.model import arguments
from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.versions import patches_folder
from proof.fidelity.rig.worker import TreeWorker

EP2 = ["--expert-model-parallel-size", "2", "--moe-router-replay-verify-dispatch"]


@pytest.fixture(scope="module")
def r3_alone(megatron_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TreeWorker]:
    tree = tmp_path_factory.mktemp("r3") / "tree"
    shutil.copytree(megatron_tree, tree, ignore=shutil.ignore_patterns("__pycache__"))
    status = apply_series(tree, patches_folder(), groups=["r3"]).status
    assert status.groups == ("r3",)
    with TreeWorker(tree, ["megatron.training", "pytest"]) as worker:
        yield worker


@pytest.mark.slow
def test_it_trains_as_a_tree_with_all_groups(r3_alone, patched, policy, tmp_path):
    argv = steps_on(policy, stores(policy, tmp_path, mixed=False), 2, *EP2)
    ours, whole = (tree.run(train, 2, argv, timeout_s=240) for tree in (r3_alone, patched))
    assert same(ours, whole)
    live = r3_alone.run(train, 2, [*argv, "--moe-router-replay-source", "live"], timeout_s=240)
    assert not same(ours, live)  # the control: routes were replayed


@pytest.mark.parametrize(
    ("option", "group"),
    [
        (["--moe-router-replay-guest-slots", "2"], "guests"),
        (["--moe-enable-routing-replay"], "engine"),
        (["--moe-token-dispatcher-type", "flex"], "fixes"),
    ],
)
def test_an_option_of_another_group_is_one_error_that_names_it(
    r3_alone: TreeWorker, patched: TreeWorker, policy: Policy, option: list[str], group: str
) -> None:
    argv = policy.arguments(*EP2)
    assert r3_alone.run(parse, 1, argv) == [""]
    assert patched.run(parse, 1, [*argv, *option]) == [""]
    (said,) = r3_alone.run(parse, 1, [*argv, *option])
    assert f"the group {group}" in said


def served(rank: int, words: list[str]) -> str:
    from megatron_r3.loop import serve

    sys.argv = ["serve.py", *words]
    with pytest.raises(SystemExit) as ended:
        serve.main()
    return str(ended.value.code)


def test_its_engine_is_not_served(r3_alone: TreeWorker, policy: Policy) -> None:
    values = {"{checkpoint}": str(policy.checkpoint), "{port}": "0"}
    words = arguments(megatron_server.SERVER, ["--load", "{checkpoint}"])
    (said,) = r3_alone.run(served, 1, [values.get(word, word) for word in words])
    assert "lacks the patches of the group engine" in said
