"""Fetch a known Megatron tree: its source package with pip, or its commit with git."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

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
    """Where `fetch_tree` puts this tree."""
    return out / tree.pypi.replace("==", "-")


def clone_tree(tree: KnownTree, url: str, target: Path) -> None:
    """Check out the one commit of `tree`, without its history, as the new folder `target`.

    Raises:
        PatchingError: `target` is there, or git cannot fetch the commit; nothing is left then.
    """
    if target.exists():
        raise PatchingError(f"{target}: is there already; remove it, or give another --out")
    # `run_git` drops every GIT_* variable, but https needs this one: which certificates to trust
    ca = {k: os.environ[k] for k in ("GIT_SSL_CAINFO",) if k in os.environ}
    source = str(Path(url).absolute()) if Path(url).is_dir() else url
    with new_folder(target) as folder:
        new_repository(folder)
        git(folder, "fetch", "--quiet", "--depth=1", source, tree.commit, env=ca)
        git(folder, "checkout", "--quiet", "--detach", tree.commit)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A path at which the `with` body makes a folder, which is then renamed to `target`.

    Other files beside the path are removed, and everything if the body raises.

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

    The commit is the same on every machine. A folder that exists is left as it is; a new one is
    whole.

    Raises:
        PatchingError: the download fails, or gives another file than versions.toml names.
    """
    target = tree_folder(tree, out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PatchingError(f"{target}: {error}") from error
    with locked(out):  # of two commands at once, the second one finds what the first one fetched
        if target.exists():
            return target
        with new_folder(target) as folder:
            _unpack(_download(tree, folder.parent), folder.parent / "unpacked").rename(folder)
            new_repository(folder)
            git(folder, "add", "--all", "--force")  # files that .gitignore names too
            message = f"{tree.pypi}\n\nsdist sha256: {tree.sdist_sha256}\n"
            git(folder, "commit", "--quiet", "-m", message, env=_COMMITTER)
    return target


def _download(tree: KnownTree, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{tree.pypi} --hash=sha256:{tree.sdist_sha256}\n")
    # --no-binary for this package alone: with ':all:' pip also builds setuptools from source
    # --ignore-requires-python: the tree is patched with this Python, and may run with another one
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
    """Unpack the archive to `folder`; return the one folder in it. No file can land elsewhere."""
    try:
        with tarfile.open(sdist) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(folder, filter="data")
            else:  # Python before 3.10.12 and 3.11.4, for example Debian 12's, has no filters
                archive.extractall(folder, _harmless(archive))
    except tarfile.TarError as error:
        raise PatchingError(f"cannot unpack {sdist.name}: {error}") from error
    folders = list(folder.iterdir())
    if len(folders) != 1 or not (folders[0] / "megatron" / "core").is_dir():
        raise PatchingError(f"{sdist.name} is no Megatron-LM source package")
    return folders[0]


def _harmless(archive: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """The members of an archive, if each is a file or folder: "../x" or a link is refused."""
    members = archive.getmembers()
    for member in members:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is no plain file or folder, or lies outside")
    return members
