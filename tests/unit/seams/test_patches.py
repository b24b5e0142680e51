"""Patches and seams fit together: what a patch imports is there, and no other room is called."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from megatron_r3.patching.series import Patch, read_series

ROOT = Path(__file__).parents[3]
SEAMS = ROOT / "megatron_r3" / "seams"
PATCHES = [
    patch
    for folder in sorted((ROOT / "patches").iterdir())
    if folder.is_dir()
    for patch in read_series(folder).patches
]
IMPORT = re.compile(r"^\+ *from (megatron_r3\S*) import (.+)$", re.MULTILINE)


def names_of(patch: Patch) -> str:
    return f"{patch.file.parent.name}/{patch.file.name[:4]}"


def imports(patch: Patch) -> list[tuple[str, list[str]]]:
    """Each module of ours that the patch imports from, and the names."""
    text = "".join(change.diff.decode() for change in patch.changes)
    return [(module, names.split(", ")) for module, names in IMPORT.findall(text)]


def defined(file: Path) -> set[str]:
    """The functions and classes of a module, and what it imports."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("patch", PATCHES, ids=names_of)
def test_what_a_patch_imports_is_in_seams(patch: Patch) -> None:
    for module, names in imports(patch):
        room, _, file = module.rpartition(".")
        assert room == "megatron_r3.seams"
        assert {*names} <= defined(SEAMS / f"{file}.py")


def test_every_file_of_seams_is_called_by_a_patch() -> None:
    called = {module.rpartition(".")[2] for patch in PATCHES for module, _ in imports(patch)}
    files = {file.stem for file in SEAMS.glob("*.py")} - {"__init__"}
    assert files - called == {"deferred"}  # patch 2 is called by it, and option.py calls it


@pytest.mark.parametrize("patch", PATCHES, ids=names_of)
def test_a_patch_is_named_by_its_whole_subject(patch: Patch) -> None:
    words = re.sub(r"[^A-Za-z0-9._]+", "-", patch.subject).strip("-.")
    assert patch.file.name == f"{patch.number:04d}-{words}.patch"
    # a fix of upstream's own says what the fix does
    fixes = "Broadcast |Escape |Keep |Record the routing |Send recorded routing "
    assert re.match(rf"(moe_router_replay|rollouts|RouterReplay): |{fixes}", patch.subject)
