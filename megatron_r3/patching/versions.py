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
blobs = { "<path>" = ["<40 hex>", ...] }  # files whose base is not the one the patches name: their
                                # blob ids (git hash-object FILE) before, between and after the
                                # patches
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.patching.git import PatchingError, names
from megatron_r3.patching.series import Blobs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# the strings of a tree's entry: the pattern of each, and what a message says was expected
_HEX = r"[0-9a-f]{40}"
_STRINGS = {
    "name": (r"(?s).*", "a string"),
    "commit": (_HEX, "40 hex digits"),
    "pypi": (r"[\w.-]+==[\w.]+", "'name==version'"),
    "sdist_sha256": (r"[0-9a-f]{64}", "64 hex digits"),
}


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
    """One release line: the folder of its patches, and the trees they are made for."""

    name: str
    folder: Path
    python: str
    image: str
    status: str
    trees: tuple[KnownTree, ...]


@dataclass(frozen=True)
class Versions:
    """The checked contents of `folder`/versions.toml."""

    folder: Path
    lines: tuple[Line, ...]
    default: KnownTree

    def line(self, name: str) -> Line:
        """The release line of this name.

        Raises:
            PatchingError: no line has this name; the message lists all lines.
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
    """The folder of this package's patches: inside the package in a wheel, else beside it."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "patches", package.parent / "patches"):
        if (folder / "versions.toml").is_file():
            return folder
    raise PatchingError(f"no patches/versions.toml in or beside {package}: reinstall megatron-r3")


def read_versions(folder: Path) -> Versions:
    """Read and check `folder`/versions.toml.

    Raises:
        PatchingError: the file cannot be read, or a key in it is missing, unknown or wrong.
    """
    file = folder / "versions.toml"
    try:
        return parse_versions(file.read_text(encoding="utf-8"), folder)
    except OSError as error:
        raise PatchingError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PatchingError(f"{file}: {error}") from None


def parse_versions(text: str, folder: Path) -> Versions:
    """Check `text`, the content of `folder`/versions.toml; errors are those of `read_versions`."""
    file = folder / "versions.toml"
    try:
        data = tomllib.loads(text)
    except ValueError as error:
        raise PatchingError(f"{file}: {error}") from None
    _check_keys(data, {"default", "lines"}, set(), str(file))
    lines = tuple(_line(name, table, folder, file) for name, table in data["lines"].items())
    default = [t for line in lines for t in line.trees if t.pypi and t.name == data["default"]]
    if len(default) != 1:
        raise PatchingError(
            f"{file}: default = {data['default']!r}: expected the name of one tree with pypi"
        )
    return Versions(folder, lines, default[0])


def _line(name: str, table: dict[str, Any], folder: Path, file: Path) -> Line:
    where = f"{file}: lines.{name}"
    _check_keys(table, {"python", "image", "status", "trees"}, set(), where)
    trees = tuple(_tree(entry, f"{where}.trees") for entry in table["trees"])
    return Line(name, folder / name, table["python"], table["image"], table["status"], trees)


def _tree(entry: dict[str, Any], where: str) -> KnownTree:
    _check_keys(entry, {"name"}, _STRINGS.keys() | {"absent", "blobs"}, where)
    where = f"{where}.{entry['name']}"
    strings = {key: entry[key] for key in _STRINGS.keys() & entry.keys()}
    for key, value in strings.items():
        pattern, expected = _STRINGS[key]
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise PatchingError(f"{where}: {key} must be {expected}; got {value!r}")
    if not strings.keys() & {"commit", "pypi"}:
        raise PatchingError(f"{where}: needs a commit or a pypi requirement")
    if "pypi" in strings and "sdist_sha256" not in strings:
        raise PatchingError(f"{where}: pypi needs an sdist_sha256")
    blobs = {path: tuple(ids) for path, ids in entry.get("blobs", {}).items()}
    for path, ids in blobs.items():
        if not all(re.fullmatch(_HEX, str(blob)) for blob in ids):
            raise PatchingError(f"{where}: blobs of {path} must be 40 hex digits each; got {ids!r}")
    return KnownTree(**strings, absent=tuple(entry.get("absent", ())), blobs=blobs)


def _check_keys(table: Any, needed: set[str], allowed: set[str], where: str) -> None:
    if not isinstance(table, dict):
        raise PatchingError(f"{where}: must be a table")
    # A misspelt key must not be ignored silently: with "absnet" no file would be skipped.
    for key in sorted(table.keys() - needed - allowed):
        raise PatchingError(f"{where}: unknown key {key!r}")
    for key in sorted(needed - table.keys()):
        raise PatchingError(f"{where}: no {key}")
