"""Fetch a known Megatron tree: its source package with pip, or its commit with git."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_r3.patching.git import PatchingError, git, new_repository
from megatron_r3.patching.tree_files import locked
from megatron_r3.patching.versions import KnownTree

UPSTREAM = "https://github.com/NVIDIA/Megatron-LM.git"

# Name and date are part of a commit's id: with fixed ones every machine makes the same commit.
_COMMITTER = {
    f"GIT_{who}_{field}": value
    for who in ("AUTHOR", "COMMITTER")
    for field, value in (
        ("NAME", "megatron-r3"),
        ("EMAIL", "megatron-r3@localhost"),
        ("DATE", "2026-01-01T00:00:00Z"),
    )
}


def tree_folder(tree: KnownTree, out: Path) -> Path:
    """The folder below `out` in which `fetch_tree` puts this tree."""
    return out / tree.pypi.replace("==", "-")


def clone_tree(tree: KnownTree, url: str, target: Path) -> None:
    """Check out the one commit of `tree`, without its history, as the new folder `target`.

    Raises:
        PatchingError: `target` is there already; or git cannot fetch the commit, and then `target`
            is not made.
    """
    if target.exists():
        raise PatchingError(f"{target}: is there already; remove it, or give another --out")
    # `run_git` drops every GIT_* variable, but https needs this one: the certificates to trust
    ca = {k: os.environ[k] for k in ("GIT_SSL_CAINFO",) if k in os.environ}
    source = str(Path(url).absolute()) if Path(url).is_dir() else url
    with new_folder(target) as folder:
        new_repository(folder)
        git(folder, "fetch", "--quiet", "--depth=1", source, tree.commit, env=ca)
        git(folder, "checkout", "--quiet", "--detach", tree.commit)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a path; the folder that the `with` body makes there is then renamed to `target`.

    Other files that the body makes beside the path are removed; so is the folder, if the body
    raises.

    Raises:
        PatchingError: the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".megatron-", dir=target.parent) as temp:
            yield Path(temp, "tree")
            Path(temp, "tree").rename(target)
    except OSError as error:
        raise PatchingError(f"{target}: {error}") from error


def fetch_tree(tree: KnownTree, out: Path) -> Path:
    """Download and unpack the sdist of `tree` below `out`, as a git checkout of one commit.

    The commit is the same on every machine. A folder that exists is left as it is; a new folder
    has all files, or is not made.

    Raises:
        PatchingError: the download fails, or gives another file than versions.toml names.
    """
    target = tree_folder(tree, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PatchingError(f"{target}: {error}") from error
    with locked(out):  # a second command waits here, and then finds the tree that the first fetched
        if target.exists():
            return target
        with new_folder(target) as folder:
            _unpack(_download(tree, folder.parent), folder.parent / "unpacked").rename(folder)
            new_repository(folder)
            git(folder, "add", "--all", "--force")  # --force: also files that .gitignore names
            message = f"{tree.pypi}\n\nsdist sha256: {tree.sdist_sha256}\n"
            git(folder, "commit", "--quiet", "-m", message, env=_COMMITTER)
    return target


def _download(tree: KnownTree, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{tree.pypi} --hash=sha256:{tree.sdist_sha256}\n")
    # --no-binary for this package alone: with ':all:' pip also builds setuptools from source
    # --ignore-requires-python: another Python may run the tree than the one that patches it
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"),
        *("--no-deps", "--no-binary", tree.pypi.split("==")[0], "--ignore-requires-python"),
        *("--require-hashes", "--requirement", str(requirements), "--dest", str(folder / "sdist")),
    ]
    pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if pip.returncode:
        last = "\n".join(pip.stdout.splitlines()[-5:])
        raise PatchingError(f"pip cannot download the sdist of {tree.pypi}:\n{last}")
    files = list((folder / "sdist").iterdir())
    if len(files) != 1 or not files[0].name.endswith(".tar.gz"):
        raise PatchingError(f"{tree.pypi}: pip gave {[f.name for f in files]}, not one .tar.gz")
    return files[0]


def _unpack(sdist: Path, folder: Path) -> Path:
    """Unpack `sdist` into `folder`; return its one top folder. Pip has compared its checksum."""
    try:
        with tarfile.open(sdist) as archive:
            # before 3.10.12 and 3.11.4 Python has no filters, for example Debian 12's Python
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, filter="data")
            else:
                archive.extractall(folder)
    except tarfile.TarError as error:
        raise PatchingError(f"cannot unpack {sdist.name}: {error}") from error
    folders = list(folder.iterdir())
    if len(folders) != 1 or not (folders[0] / "megatron" / "core").is_dir():
        raise PatchingError(f"{sdist.name} is no Megatron-LM source package")
    return folders[0]
