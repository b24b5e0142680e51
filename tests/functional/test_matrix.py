"""Each check of `make matrix` fails where it should; that all hold is for `make matrix` to say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keepers.clone import resolve
from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.fetch import tree_folder
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity import line_checks
from proof.fidelity.line_checks import QUICK, Checked
from proof.fidelity.matrix import CHECKS, IN_TESTS, NOTHING, checks_of, line_of, main, shared_out
from proof.fidelity.models import MODELS
from proof.fidelity.trees import ROOT

LINE = "core_r0.19.0"


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Checked]:
    """The default tree and a copy of the patches, to be damaged."""
    patches = tmp_path / "patches"
    shutil.copytree(patches_folder(), patches)
    versions = read_versions(patches)
    source = tree_folder(versions.default, ROOT / "build")
    commit = resolve(source, "HEAD")
    with Checked(versions.line(LINE), versions.default, source, commit, tmp_path / "trees") as made:
        yield made


def damage(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, file
    file.write_text(text.replace(old, new))


def test_a_patch_with_another_line_does_not_apply(checked: Checked) -> None:
    patch = next(checked.line.folder.glob("0001-*"))
    damage(
        patch,
        "+            padding_mask = begin_pass(self, padding_mask)\n",
        "+            padding_mask = begin_pass(self, None)\n",
    )
    passed, detail = CHECKS["apply, revert"](checked)
    assert not passed
    assert patch.name in detail


def test_a_patch_with_another_message_is_not_what_is_exported(checked: Checked) -> None:
    assert CHECKS["export"](checked)[0]
    patch = next(checked.line.folder.glob("0001-*"))
    damage(patch, "\nrouter is live. MTP", "\nrouter is live. \nMTP")  # git am strips it
    passed, detail = CHECKS["export"](checked)
    assert not passed, detail
    assert patch.name in detail


def test_a_patch_that_changes_something_when_off_is_caught(checked: Checked) -> None:
    apply_series(checked.patched, checked.patches)
    router = checked.patched / "megatron/core/transformer/moe/router.py"
    damage(
        router,
        "self.router_replay = None\n",
        "self.router_replay = None\n        self.weight.data *= 1.01\n",
    )
    passed, detail = CHECKS["off"](checked)
    assert not passed
    assert "1 process: other weights" in detail


def test_a_layout_that_trains_nothing_is_caught(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_series(checked.patched, checked.patches)
    monkeypatch.setattr(line_checks, "LAYOUTS_OFF", {"standstill": (1, "--lr 0 --min-lr 0")})
    assert CHECKS["off"](checked) == (
        False,
        "standstill: the same weights after the training: nothing was trained",
    )


def test_router_replay_that_ignores_its_routes_is_caught(checked: Checked) -> None:
    apply_series(checked.patched, checked.patches)
    replay = checked.patched / "megatron/core/transformer/moe/router_replay.py"
    damage(
        replay,
        "if self.router_replay_action == RouterReplayAction.RECORD:",
        "if self.router_replay_action is not None:",
    )
    passed, detail = CHECKS["RouterReplay"](checked)
    assert not passed
    assert "experts + 1" in detail


def test_a_layout_that_fails_is_named(checked: Checked) -> None:
    apply_series(checked.patched, checked.patches)
    one = line_checks.CASES[0]
    checked.cases = (replace(one, name="wrong", bitwise="", arguments="--moe-router-topk 3"),)
    passed, detail = CHECKS["replay"](checked)
    assert not passed
    assert detail.startswith("wrong: ")


def test_an_engine_that_returns_the_experts_of_the_token_before_is_caught(checked: Checked) -> None:
    apply_series(checked.patched, checked.patches)
    metadata = checked.patched / "megatron/core/inference/contexts/routing_metadata.py"
    stacked = "torch.stack(recorded_data, dim=1)"
    damage(metadata, f"return {stacked}", f"return {stacked}.roll(1, 0)")
    passed, detail = CHECKS["engine"](checked)
    assert not passed
    assert detail == "request 0: not the experts of the training forward"
    metadata.unlink()  # as on a line whose engine records nothing
    assert CHECKS["engine"](checked) is None


def test_where_there_is_nothing_to_check_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "matrix.json")]
    # main is not on PyPI
    for argv in (["--line", "core_r0.1.0"], ["--repo", str(tmp_path)], ["--line", "main"]):
        assert main([*argv, *out]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "matrix.json").exists()


def test_every_case_of_replay_runs_on_one_of_the_older_lines(
    megatron_tree: Path, tmp_path: Path
) -> None:
    lines = read_versions(patches_folder()).lines[:3]
    (tmp_path / "megatron" / "core").mkdir(parents=True)  # of PyPI's 0.16: no training loop
    trees = [*zip(lines, (tmp_path, megatron_tree, megatron_tree), strict=True)]
    shares = shared_out(trees)
    ran = sorted(case.name for share in shares for case in share)
    assert ran == sorted(
        case.name for case in QUICK if not case.script and case.since != "core_r0.19.0"
    )
    assert all(
        case.runs_on(tree, line.name)
        for share, (line, tree) in zip(shares, trees, strict=True)
        for case in share
    )
    assert all(not MODELS[case.model].update.mini_steps > 1 for case in shares[0])  # control
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_make_test_has_the_replay_of_the_default_tree() -> None:
    versions = read_versions(patches_folder())
    assert checks_of(versions, versions.default) == [n for n in CHECKS if n not in IN_TESTS]
    others = [tree for line in versions.lines for tree in line.trees if tree != versions.default]
    assert others
    assert all(checks_of(versions, tree) == [*CHECKS] for tree in others)
    result = {"line": "a", "tree": "b", "passed": True, "seconds": 1.0, "detail": ""}
    row = [result] * (len(CHECKS) - 1)
    assert line_of(row).endswith("make test-all")
    assert line_of([*row, result]).endswith("1 s")
    assert line_of([*row, {**result, "detail": NOTHING}]).endswith("none")
