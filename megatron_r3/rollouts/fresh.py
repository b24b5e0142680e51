"""A new store, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_r3.store import StoreError

__all__ = ["new_store"]


@contextmanager
def new_store(directory: Path) -> Iterator[Path]:
    """A folder to write shards to, which becomes `directory` when the block ends well.

    Raises:
        StoreError: something is there already.
    """
    if directory.is_symlink() or (directory.exists() and not _empty(directory)):
        raise StoreError(f"{directory}: is there already; a conversion writes a new store")
    parent = directory.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{directory.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        os.rename(folder, directory)  # over an empty folder, no other
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _empty(directory: Path) -> bool:
    return directory.is_dir() and not any(directory.iterdir())
