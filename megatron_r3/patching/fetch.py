"""Fetch a known Megatron tree: its source package with pip, or its commit with git."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from megatron_r3.patching.cleanroom import clean_room
from megatron_r3.patching.git import PatchingError, run_git
from megatron_r3.patching.versions import KnownTree

UPSTREAM = "https://github.com/NVIDIA/Megatron-LM.git"

_COMMITTER = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "megatron-r3"),
        ("EMAIL", "megatron-r3@localhost"),
        ("DATE", "2026-01-01T00:00:00Z"),
    )
}


def tree_folder(tree: KnownTree, out: Path) -> Path:
    """Where `fetch_tree` puts this tree."""
    return out / tree.pypi.replace("==", "-")


def clone_tree(tree: KnownTree, url: str, target: Path) -> None:
    """Check out the one commit of `tree`, without its history, as the new folder `target`.

    Raises:
        PatchingError: `target` is there, or git cannot fetch the commit; nothing is left then.
    """
    if target.exists():
        raise PatchingError(f"{target}: is there already")
    ca = {k: os.environ[k] for k in ("GIT_SSL_CAINFO",) if k in os.environ}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".megatron-", dir=target.parent) as temp:
            root = Path(temp) / "tree"
            root.mkdir()
            run_git("init", "--quiet", "--template=", cwd=root)
            git = partial(run_git, cwd=root, git_dir=root / ".git")
            with _source(url) as source:
                git("fetch", "--quiet", "--depth=1", source, tree.commit, env=ca)
            git("checkout", "--quiet", "--detach", tree.commit)
            root.rename(target)
    except OSError as error:
        raise PatchingError(f"{target}: {error}") from error


@contextmanager
def _source(url: str) -> Iterator[str]:
    """What git fetches from: a clean room for a repository of this machine, else `url`.

    From a folder git fetches by running a second git there, with the configuration there.
    """
    path = Path(unquote(url.removeprefix("file://")) if url.startswith("file://") else url)
    if not path.is_dir():
        yield url
        return
    with clean_room(path) as room:
        yield str(room)


def fetch_tree(tree: KnownTree, out: Path) -> Path:
    """Download, check and unpack the sdist of `tree` below `out`, as a git checkout of one commit.

    The commit is the same on every machine. The folder is there whole or not at all; one that is
    there already is left as it is.

    Raises:
        PatchingError: the download fails, or is not the file that versions.toml names.
    """
    target = tree_folder(tree, out)
    if target.exists():
        return target
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".megatron-", dir=out) as temp:
            sdist = _download(tree, Path(temp))
            unpacked = _unpack(sdist, Path(temp) / "tree")
            _commit(unpacked, f"{tree.pypi}\n\nsdist sha256: {tree.sdist_sha256}\n")
            unpacked.rename(target)
    except OSError as error:
        raise PatchingError(f"{target}: {error}") from error
    return target


def _download(tree: KnownTree, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{tree.pypi} --hash=sha256:{tree.sdist_sha256}\n")
    # --no-binary for this package alone: with ':all:' pip also builds setuptools from source
    # --ignore-requires-python: it is read and patched here, and runs elsewhere
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
    digest = hashlib.sha256(files[0].read_bytes()).hexdigest()
    if digest != tree.sdist_sha256:
        raise PatchingError(f"{files[0].name}: sha256 is {digest}, not {tree.sdist_sha256}")
    return files[0]


def _unpack(sdist: Path, folder: Path) -> Path:
    """The one folder that is in the archive; no member of it can land elsewhere."""
    try:
        with tarfile.open(sdist) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, filter="data")
            else:  # before 3.10.12 and 3.11.4; a source package has files and folders alone
                archive.extractall(folder, _harmless(archive))
    except tarfile.TarError as error:
        raise PatchingError(f"cannot unpack {sdist.name}: {error}") from error
    folders = list(folder.iterdir())
    if len(folders) != 1 or not (folders[0] / "megatron" / "core").is_dir():
        raise PatchingError(f"{sdist.name} is no Megatron-LM source package")
    return folders[0]


def _harmless(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    members = archive.getmembers()
    for member in members:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is no file or folder inside of it")
    return members


def _commit(root: Path, message: str) -> None:
    run_git("init", "--quiet", "--template=", cwd=root)
    git_dir = root / ".git"
    run_git("add", "--all", "--force", cwd=root, git_dir=git_dir)
    run_git("commit", "--quiet", "-m", message, cwd=root, git_dir=git_dir, env=_COMMITTER)
