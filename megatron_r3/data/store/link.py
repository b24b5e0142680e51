"""Gives a shard its name by link(), which never replaces a file that has the name already.

rename() could replace another writer's shard. A file that is made under its final name would be
seen before it is whole. If a file system has no link(), an error says so.
"""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megatron_r3.data.store.schema import StoreError

# The errors of link() on file systems without it: EPERM on FAT, EOPNOTSUPP on SMB, ENOSYS on most
# object stores; POSIX allows EXDEV and EMLINK too.
_NO_LINK = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
# The errors of fsync on a directory, where only files can be synced.
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


def check_links(directory: Path) -> None:
    """Refuse a directory in which no shard can get its name; called before sampling.

    Raises:
        StoreError: the file system cannot link().
        OSError: no file can be made or linked in the directory.
    """
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".shard-", suffix=".tmp")
    second = f"{temporary.removesuffix('.tmp')}-linked.tmp"
    try:
        with open(descriptor, "wb") as file:
            _link(file, temporary, Path(second))
    finally:
        for path in (temporary, second):
            with suppress(FileNotFoundError):
                os.unlink(path)


def give_name(file: BinaryIO, temporary: str, path: Path) -> bool:
    """Give a finished file its second name, also on disk; False if another file has that name.

    Args:
        file: the finished file, still open.
        temporary: the path of its first name.
        path: the path of its second name.

    Raises:
        StoreError: the file system cannot link().
        OSError: the file cannot be linked for another reason, or the directory cannot be synced.
    """
    is_named = _link(file, temporary, path)
    if is_named:
        _sync_directory(path.parent)
    return is_named


def _link(file: BinaryIO, temporary: str, path: Path) -> bool:
    """Give an open file its second name; False if another file has that name.

    NFS may lose the answer of a link() that succeeded: the client asks again, and hears that the
    name is taken. Then this file itself has the name, and the result is True.
    """
    try:
        os.link(temporary, path)  # unlike rename, link refuses to overwrite
    except FileExistsError:
        if not _has_name(file, path):
            return False
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        raise StoreError(
            f"{path.parent}: no shard can be written: its file system cannot link() "
            f"({error.strerror}), and only link() gives a whole shard its name without ever "
            "replacing another: write to a local disk or another file system, and copy the "
            "finished shards"
        ) from error
    return True


def _has_name(file: BinaryIO, path: Path) -> bool:
    """Whether an open file, which had one name before, has this name too."""
    status = os.fstat(file.fileno())
    try:
        return os.path.samestat(status, os.stat(path))
    except FileNotFoundError:  # the name is taken, but not visible on this machine yet
        return status.st_nlink > 1


def _sync_directory(directory: Path) -> None:
    """Write the names in a directory to disk; to sync the files themselves does not do that."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)
