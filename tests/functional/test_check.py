"""A tree between releases, from `make apply` to `make check` and back; and checks that fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from test_make import contents, make

from megatron_r3.cli import main
from proof.fidelity import check

MOE = "megatron/core/transformer/moe"
FEW = ("apply again", "record, replay", "upstream's tests")


@pytest.fixture
def tree(megatron_tree: Path, tmp_path: Path) -> Path:
    """A tree that is no release: one line of the default one differs."""
    tree = tmp_path / "my tree"
    shutil.copytree(megatron_tree, tree, ignore=shutil.ignore_patterns("__pycache__"))
    edit(tree / MOE / "router.py", "class TopKRouter(Router):", "class TopKRouter(Router):  # ours")
    return tree


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, file
    file.write_text(text.replace(old, new))


def test_apply_check_status_revert(tree: Path) -> None:
    before = contents(tree)
    where = f"MEGATRON={tree}"
    refused = make("apply", where)
    assert refused.returncode != 0
    assert "UNRELEASED=1" in refused.stderr
    assert f"{MOE}/router.py" in refused.stderr
    assert contents(tree) == before
    assert "apply" in make("check", where).stderr  # only a patched tree is checked
    applied = make("apply", where, "UNRELEASED=1")
    assert applied.returncode == 0, applied.stderr
    assert "(1 file differs)" in applied.stdout
    assert f"make check MEGATRON='{tree}'" in applied.stdout
    checked = make("check", where, "ONLY=again")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 of 6 checks passed" in checked.stdout
    assert "not checked" in make("status", where).stdout  # not by one check of six
    assert make("revert", where).returncode == 0
    assert contents(tree) == before


def test_what_was_checked_is_recorded_until_a_file_changes(tree, capsys, monkeypatch):
    # the other three take minutes; make matrix runs them
    monkeypatch.setattr(check, "CHECKS", {name: check.CHECKS[name] for name in FEW})
    assert main(["apply", str(tree), "--unreleased"]) == 0
    assert check.main([str(tree)]) == 0
    out = capsys.readouterr().out
    assert "not run" in out  # PyPI's tree has none of upstream's tests
    assert f"recorded in {tree}/.megatron-r3.json" in out
    assert main(["status", str(tree)]) == 0
    said = capsys.readouterr().out
    assert "\nchecked on 20" in said
    assert said.endswith("(not run: upstream's tests)\n")
    shared = tree / MOE / "shared_experts.py"
    shared.write_text(f"{shared.read_text()}# mine\n")
    main(["status", str(tree)])
    assert "its files have changed since" in capsys.readouterr().out
    # and a check that fails takes the date away
    monkeypatch.setitem(check.CHECKS, "apply again", lambda copies: (False, "made up"))
    assert check.main([str(tree), "--only", "again"]) == 1
    assert "FAILED apply again:\nmade up" in capsys.readouterr().out
    main(["status", str(tree)])
    assert "not checked" in capsys.readouterr().out


def test_a_tree_on_which_the_patches_fit_and_do_not_work_fails(tree, capsys):
    """Its router does not hand the hook on, so that nothing is recorded or replayed."""
    gating = "        logits = self.gating(input)\n"
    edit(tree / MOE / "router.py", gating, f"{gating}        self.router_replay = None\n")
    assert main(["apply", str(tree), "--unreleased"]) == 0
    assert check.main([str(tree), "--only", "record"]) == 1
    out = capsys.readouterr().out
    assert "record, replay    FAILED" in out
    assert "do not train on this tree" in out
