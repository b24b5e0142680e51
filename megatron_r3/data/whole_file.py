"""Writes a file that is there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Write a file that gets its name when the block ends, or leaves nothing if the block raises.

    Until then the data is in a temporary file beside `path`, because a rename does not cross file
    systems. A file that already has the name is replaced. Missing folders are made.

    Args:
        sync: whether to wait until the bytes are on disk before the file gets its name. False is
            for a file that can be made again after a power failure.

    Raises:
        OSError: the file cannot be written.
    """
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    # A random name: a process in another container may have the same process id. `open`, unlike
    # mkstemp, gives the file the mode that the umask allows.
    temporary = folder / f".{path.name}-{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes | str, *, sync: bool = True) -> None:
    """Write these bytes, or this text in UTF-8, as a whole file; see `whole_file`.

    Raises:
        OSError: the file cannot be written.
    """
    with whole_file(path, sync=sync) as file:
        file.write(data.encode() if isinstance(data, str) else data)
