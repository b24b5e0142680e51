"""A shard's file and its header, opened when somebody first asks for one of them.

One process looks at a store and tells the others what it found (`index.py`). These open a shard
only where they read rows of it, and then they compare it with what they were told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.store.files import HeldFile
from megatron_r3.data.store.header import PART_CRC32, Header, read_header
from megatron_r3.data.store.schema import StoreError, StoreInfo

# How long a file may come later to this machine than the first rank has seen it: the most that an
# NFS client keeps what it knows of a directory (acdirmax).
LATE_S = 60.0
# What the first look at a shard reads at once: its header, and most of what each rollout has once.
LOOK_BYTES = 1 << 14


@dataclass(frozen=True)
class Known:
    """What a process knows of a shard that another process has looked at.

    Attributes:
        size, mtime_ns: of the file, in bytes and in ns since 1970.
        identity: as in `Header`.
        version: of the format.
        has_parts: whether parts of rollouts have checksums, so that whatever is read is compared
            with what was written.
        recorded_rows: how many of its rows have routes.
        memory: the tensors that have a value for each rollout.
    """

    size: int
    mtime_ns: int
    identity: str
    version: int
    has_parts: bool
    recorded_rows: int
    info: StoreInfo
    memory: Mapping[str, np.ndarray]


class LaterLooks:
    """The files that were read since somebody last looked whether they are still the same.

    Training looks at them once in a step, before its update, and not after each read. Example: a
    step reads the tokens and then the routes of 4 rollouts of one shard; that is one look, not 12.
    """

    def __init__(self) -> None:
        self._files: dict[HeldFile, None] = {}

    def __reduce__(self) -> Any:
        """Another process has files of its own."""
        return LaterLooks, ()

    def note(self, file: HeldFile) -> None:
        """Remember a file that was read."""
        self._files[file] = None

    def forget(self) -> None:
        """Look at none of the files that were read until now."""
        self._files = {}

    def look(self) -> None:
        """Refuse to go on with a file that somebody changed or removed.

        Raises:
            StoreError: see `HeldFile.check_unchanged`.
        """
        # A thread that reads ahead may note a file meanwhile; that one is for the next look.
        files, self._files = self._files, {}
        for file in files:
            file.check_unchanged()


class ShardFile:
    """A shard's file with its header.

    Args:
        path: of the file.
        known: what another process found there; None if nobody has looked.
        late_s: how long to wait for a file that is not there, if nobody has looked. A file that
            another process has looked at is waited for, for LATE_S.

    Attributes:
        looks: where to note that the file was read; None to look at the file after each read.
    """

    def __init__(self, path: Path, known: Known | None, late_s: float) -> None:
        self.path, self._known, self._late_s = path, known, late_s
        self.looks: LaterLooks | None = None
        self._opened: tuple[HeldFile, Header] | None = None

    @property
    def file(self) -> HeldFile:
        """The file, which stays open from now on.

        Raises:
            StoreError: it cannot be opened, or is not the one that was looked at.
        """
        return self._open()[0]

    @property
    def header(self) -> Header:
        """The header, read and checked.

        Raises:
            StoreError: as `file`.
        """
        return self._open()[1]

    def after_read(self) -> None:
        """Have the file looked at: was it changed? Every read ends with this call.

        The checksums of parts show whatever was written over the file while it is open. They show
        it at once, so the look may come later; it finds a file that was removed or replaced. A
        shard without such sums has nothing but the look.

        Raises:
            StoreError: see `HeldFile.check_unchanged`.
        """
        file, header = self._open()
        if self.looks is None or PART_CRC32 not in header.entries:
            file.check_unchanged()
        else:
            self.looks.note(file)

    def _open(self) -> tuple[HeldFile, Header]:
        # No lock: two threads that are here at once both open the file, and one of the two files is
        # closed again. A lock could be held by another thread while a process is forked.
        if self._opened is None:
            known = self._known
            if known is None:
                file = HeldFile(self.path, late_s=self._late_s)
                file.read_begin(LOOK_BYTES)
                header = read_header(file)
            else:
                file = HeldFile(self.path, known.size if known.has_parts else None, LATE_S)
                try:
                    header = read_header(file)
                except StoreError as error:  # of another file, whose size is not the known one
                    raise self._another(known) from error
                self._compare(file, header, known)
            self._opened = file, header
        return self._opened

    def _compare(self, file: HeldFile, header: Header, known: Known) -> None:
        """Refuse another file than the one that was looked at.

        The header has the checksums of all bytes, directly or through those of the parts. So the
        time is compared only where parts have no checksums: a copy on a disk of this node may be of
        another time.
        """
        same = file.size == known.size and header.identity == known.identity
        if same and (known.has_parts or file.mtime_ns == known.mtime_ns):
            return
        raise self._another(known)

    def _another(self, known: Known) -> StoreError:
        times = "" if known.has_parts else " (copies keep their times)"
        return StoreError(
            f"{self.path}: was changed or replaced since the first rank looked at it, or is another"
            f" file on this node: put the old file back{times}, and start again"
        )
