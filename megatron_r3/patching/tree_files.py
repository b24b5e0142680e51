"""Reads files of a tree, and replaces them: all of them or none.

Every new file is first written whole beside the old one, so that a full disk or a folder that
cannot be written is found before anything changes; then each new file is renamed over the old one.
A process that is killed between two renames leaves files that are each old or new, never half a
file; the next apply or revert goes on from there.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_r3.patching.git import PatchingError, blob_id, names


@dataclass(frozen=True)
class FileOnDisk:
    """The bytes and stat of a file; both are None without a file.

    `stat` is also None for contents that git has made, and that are not in the tree.
    """

    data: bytes | None
    stat: os.stat_result | None = None

    @cached_property
    def blob(self) -> str | None:
        """The file's git blob id; None without a file."""
        return None if self.data is None else blob_id(self.data)

    @property
    def executable(self) -> bool:
        """Whether git would give the file the mode 100755."""
        return self.stat is not None and bool(self.stat.st_mode & 0o100)


def read_file(root: Path, path: str) -> FileOnDisk:
    """Read one file of a tree; the data of a missing file is None.

    Raises:
        PatchingError: the file cannot be read, is no plain file, or is reached over a symlink.
    """
    for part in (path, *map(str, Path(path).parents)):
        # A file behind a link may belong to another tree; writing it would change that tree.
        if part != "." and (root / part).is_symlink():
            raise PatchingError(f"{root / part} is a symlink: patch the tree that it points into")
    try:
        info = (root / path).stat()
        if not stat.S_ISREG(info.st_mode):  # opening a pipe would wait for ever
            raise PatchingError(f"{root / path} is not a plain file")
        return FileOnDisk((root / path).read_bytes(), info)
    except (FileNotFoundError, NotADirectoryError):
        return FileOnDisk(None)
    except OSError as error:
        raise PatchingError(f"{root / path}: {error.strerror}") from None


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold a lock on the folder `root` while the body runs; wait for a command that holds the lock.

    The lock ends with the process, even if the process is killed. On a file system without locks
    the body runs without a lock.
    """
    folder = os.open(root, os.O_RDONLY)
    try:
        with suppress(OSError):  # on a file system without locks: go on without a lock
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def replace_files(
    root: Path,
    new: Mapping[str, bytes | None],
    old: Mapping[str, FileOnDisk],
    executables: Iterable[str] = (),
) -> None:
    """Write the `new` contents of some of the `old` files, all or none; None removes a file.

    A replaced file keeps its mode, and its owner if this process may set it; a created file gets
    the mode that git would give it. Folders are made if needed, and removed if they end up empty.
    A file of `root` that another environment shares by a hard link (package installers do that)
    stays unchanged in the other environment.

    Raises:
        PatchingError: a file cannot be written. All files are as they were, or the message names
            the files that are not.
    """
    executables = set(executables)
    path = ""
    try:
        for path, data in new.items():
            if data is not None:
                _stage(root / path, data, old[path].stat, path in executables)
        for path, data in new.items():
            _put(root / path, exists=data is not None)
    except BaseException as error:  # Ctrl-C too
        _restore(root, {p: old[p] for p in new}, executables)
        if isinstance(error, OSError):
            raise PatchingError(
                f"cannot write {root / path}: {error.strerror or error}; nothing was changed"
            ) from error
        raise
    finally:
        remove_leftovers(root, old)


def remove_leftovers(root: Path, paths: Iterable[str]) -> None:
    """Remove the new content that lies beside these files, and the empty folders of missing files.

    A process that is killed before a rename leaves such new content (see `_staged`).
    """
    for path in paths:
        with suppress(OSError):
            _staged(root / path).unlink()
        if not (root / path).exists():
            _remove_empty_folders(root, path)


def _staged(target: Path) -> Path:
    """Where the new content of a file waits: .router.py.megatron-r3-new beside router.py."""
    # The name is the same in every run, not random, so the next run finds and removes the file.
    return target.with_name(f".{target.name}.megatron-r3-new")


def _stage(target: Path, data: bytes, old: os.stat_result | None, executable: bool) -> None:
    """Write `data` beside `target`, with the mode and owner that `target` shall have."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _staged(target).unlink(missing_ok=True)
    # O_EXCL: if a symlink has this name by now, the open fails and does not follow the link
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(_staged(target), flags, 0o777 if executable else 0o666), "wb") as file:
        file.write(data)
        if old is not None:
            with suppress(PermissionError):  # only root can give a file to another user
                os.fchown(file.fileno(), old.st_uid, old.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(old.st_mode))


def _put(target: Path, *, exists: bool) -> None:
    if exists:
        os.replace(_staged(target), target)
    else:
        target.unlink(missing_ok=True)


def _restore(root: Path, old: Mapping[str, FileOnDisk], executables: set[str]) -> None:
    """Write every file back that is not as in `old`; files that are as in `old` are not touched."""
    lost = []
    for path, file in old.items():
        target = root / path
        try:
            now = target.read_bytes() if target.exists() else None
            if now == file.data:
                continue
            if file.data is not None:
                _stage(target, file.data, file.stat, path in executables)
            _put(target, exists=file.data is not None)
        except OSError:
            lost.append(path)
    if lost:
        raise PatchingError(
            f"cannot write {names(lost)} back: {root} is half applied; once the tree can be "
            "written, apply puts in all patches, and revert removes all"
        )


def _remove_empty_folders(root: Path, path: str) -> None:
    for folder in list(Path(path).parents)[:-1]:  # of a/b/c.py: a/b, then a, and not "."
        try:
            (root / folder).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return  # not empty, or not ours to change
