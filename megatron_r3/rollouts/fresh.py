"""A new store, whole or not at all, and what is said where it cannot be written."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_r3.store import StoreError
from megatron_r3.untrusted import one_line

__all__ = ["new_store", "writing"]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name what was being written in the error of a full disk or a folder that may not be written.

    Raises:
        StoreError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or one_line(str(error), 300)
        if isinstance(error, FileExistsError | NotADirectoryError):
            why = f"{error.filename} is no directory"
        raise StoreError(f"{path}: cannot be written ({why})") from error


@contextmanager
def new_store(directory: Path) -> Iterator[Path]:
    """A folder to write shards to, which becomes `directory` when the block ends well.

    Raises:
        StoreError: something is there already, or it cannot be written.
    """
    with writing(directory):
        if directory.is_symlink() or (directory.exists() and not _empty(directory)):
            raise StoreError(f"{directory}: is there already; a conversion writes a new store")
        parent = directory.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{directory.name}-"))
    try:
        yield folder
        with writing(directory):
            folder.chmod(0o755)
            os.rename(folder, directory)  # over an empty folder, no other
    except StoreError as error:  # of a shard in a folder that nobody has asked for
        raise StoreError(str(error).replace(str(folder), str(directory))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())
