"""Each check of `make matrix` fails where it should; that all hold is for `make matrix` to say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from keepers.clone import resolve
from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.fetch import tree_folder
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity import line_checks
from proof.fidelity.line_checks import Checked
from proof.fidelity.matrix import CHECKS
from proof.fidelity.trees import ROOT

LINE = "core_r0.19.0"
METADATA = "megatron/core/inference/contexts/routing_metadata.py"


@contextmanager
def default_tree(folder: Path) -> Iterator[Checked]:
    """The default tree and a copy of the patches, to be damaged."""
    patches = folder / "patches"
    shutil.copytree(patches_folder(), patches)
    versions = read_versions(patches)
    source = tree_folder(versions.default, ROOT / "build")
    commit = resolve(source, "HEAD")
    with Checked(versions.line(LINE), versions.default, source, commit, folder / "trees") as made:
        yield made


def damage(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, file
    file.write_text(text.replace(old, new))


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Checked]:
    with default_tree(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    """Three faults in one patched tree, so that one process imports it; each check finds one."""
    with default_tree(tmp_path_factory.mktemp("faulty")) as made:
        apply_series(made.patched, made.patches)
        moe = made.patched / "megatron/core/transformer/moe"
        hook = "self.router_replay = None\n"
        damage(moe / "router.py", hook, f"{hook}        self.weight.data *= 1.01\n")
        record = "if self.router_replay_action == RouterReplayAction.RECORD:"
        damage(moe / "router_replay.py", record, "if self.router_replay_action is not None:")
        stacked = "return torch.stack(recorded_data, dim=1)"
        damage(made.patched / METADATA, stacked, f"{stacked}.roll(1, 0)")
        yield made


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


def test_a_patch_that_changes_something_when_off_is_caught(faulty: Checked) -> None:
    passed, detail = CHECKS["off"](faulty)
    assert not passed
    assert "1 process: other weights" in detail


def test_a_layout_that_trains_nothing_is_caught(faulty, monkeypatch):
    monkeypatch.setattr(line_checks, "LAYOUTS_OFF", {"standstill": (1, "--lr 0 --min-lr 0")})
    monkeypatch.setattr(faulty, "patched", faulty.unpatched)  # the same weights before it, too
    assert CHECKS["off"](faulty) == (
        False,
        "standstill: the same weights after the training: nothing was trained",
    )


def test_router_replay_that_ignores_its_routes_is_caught(faulty: Checked) -> None:
    passed, detail = CHECKS["RouterReplay"](faulty)
    assert not passed
    assert "experts + 1" in detail


def test_a_layout_that_fails_is_named(faulty: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    one = line_checks.CASES[0]
    wrong = replace(one, name="wrong", bitwise="", arguments="--moe-router-topk 3")
    monkeypatch.setattr(faulty, "cases", (wrong,))
    passed, detail = CHECKS["replay"](faulty)
    assert not passed
    assert detail.startswith("wrong: ")
    assert "topk 2 there, 3 here" in detail


def test_an_engine_that_returns_the_experts_of_the_token_before_is_caught(
    faulty: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed, detail = CHECKS["engine"](faulty)
    assert not passed
    assert detail == "request 0: no experts, or not those of the training forward"
    monkeypatch.setattr(faulty, "patched", tmp_path)  # as on a line whose engine records nothing
    assert CHECKS["engine"](faulty)[0] is None
