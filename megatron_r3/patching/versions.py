"""versions.toml: which release lines have patches, and the trees that these patches fit.

default = "<name of the tree that `megatron-r3 megatron` fetches by default>"

[lines."<release line>"]        # its patches lie in the folder of the same name
python = ">=3.12"               # the versions of Python that upstream asks for
image = "<image:tag>"           # the base of upstream's own image (docker/.ngc_version.dev)
status = "supported"

[[lines."<release line>".trees]]
name = "core_v0.19.0"           # how messages call the tree
commit = "<40 hex>"             # for a tree that is in upstream's git
pypi = "megatron-core==0.19.2"  # for a tree that is on PyPI, with
sdist_sha256 = "<64 hex>"
absent = ["<path>", ...]        # files of the series that this tree lacks: apply skips them
blobs = { "<path>" = ["<40 hex>", ...] }  # files with another base than the patches name, and
                                # their blob ids (git hash-object FILE) before, between and after
                                # the patches
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.series import Blobs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class KnownTree:
    """One version of a release line; the fields are those of versions.toml."""

    name: str
    commit: str = ""
    pypi: str = ""
    sdist_sha256: str = ""
    absent: tuple[str, ...] = ()
    blobs: Mapping[str, Blobs] | None = None


@dataclass(frozen=True)
class Line:
    """One release line: the folder of its patches, and the trees that these patches fit."""

    name: str
    folder: Path
    python: str
    image: str
    status: str
    trees: tuple[KnownTree, ...]


@dataclass(frozen=True)
class Versions:
    """The contents of `folder`/versions.toml."""

    folder: Path
    lines: tuple[Line, ...]
    default: KnownTree

    def line(self, name: str) -> Line:
        """The release line of this name.

        Raises:
            PatchingError: no line has this name; the message lists known lines.
        """
        for line in self.lines:
            if line.name == name:
                return line
        known = names([line.name for line in self.lines])
        raise PatchingError(f"{name} is no release line of versions.toml; known: {known}")

    @property
    def default_line(self) -> Line:
        """The release line of the default tree."""
        return next(line for line in self.lines if self.default in line.trees)

    def find(self, name: str, source: str) -> tuple[Line, KnownTree]:
        """The tree of this name, which must be available from `source`: git or pypi.

        The name of a release line stands for the line's first such tree.

        Raises:
            PatchingError: no such tree; the message lists the trees of `source`.
        """
        field = "commit" if source == "git" else "pypi"
        trees = [(line, t) for line in self.lines for t in line.trees if getattr(t, field)]
        for line, tree in trees:
            if name in (tree.name, line.name):
                return line, tree
        known = names([f"{tree.name} ({line.name})" for line, tree in trees], most=99)
        raise PatchingError(
            f"{name} is no tree that versions.toml knows from {source}; known: {known}"
        )


def patches_folder() -> Path:
    """The folder of this package's patches: inside the package in a wheel, else beside it.

    Raises:
        PatchingError: there is no such folder.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "patches", package.parent / "patches"):
        if (folder / "versions.toml").is_file():
            return folder
    raise PatchingError(f"no patches/versions.toml in or beside {package}: reinstall megatron-r3")


def read_versions(folder: Path) -> Versions:
    """Read `folder`/versions.toml.

    Raises:
        PatchingError: the file cannot be read, or a key in it is missing or unknown.
    """
    file = folder / "versions.toml"
    try:
        return parse_versions(file.read_text(encoding="utf-8"), folder)
    except OSError as error:
        raise PatchingError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PatchingError(f"{file}: {error}") from None


def parse_versions(text: str, folder: Path) -> Versions:
    """Read `text`, the content of `folder`/versions.toml; errors are those of `read_versions`."""
    file = folder / "versions.toml"
    try:
        data = tomllib.loads(text)
        lines = tuple(_line(name, folder, **table) for name, table in data["lines"].items())
        wanted = data["default"]
    except (ValueError, TypeError, KeyError) as error:
        raise PatchingError(f"{file}: {error!r}") from None
    default = [tree for line in lines for tree in line.trees if tree.pypi and tree.name == wanted]
    if len(default) != 1:
        raise PatchingError(
            f"{file}: default = {wanted!r}: expected the name of one tree with pypi"
        )
    return Versions(folder, lines, default[0])


def _line(name: str, folder: Path, *, trees: list[dict[str, Any]], **fields: str) -> Line:
    return Line(name, folder / name, **fields, trees=tuple(_tree(**tree) for tree in trees))


def _tree(
    absent: Sequence[str] = (), blobs: Mapping[str, Any] | None = None, **fields: str
) -> KnownTree:
    chains = {path: tuple(ids) for path, ids in (blobs or {}).items()}
    return KnownTree(**fields, absent=tuple(absent), blobs=chains)
