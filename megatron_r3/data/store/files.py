"""Finds the shards in the directory of a store, and keeps a shard's file open while it is used.

Shards are called `shard-NNNNN.safetensors`, and are numbered 0, 1, 2 ... without a gap. The number
is in the name and in the header. So readers notice a shard that is missing, renamed or copied.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import stat
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.data.store.schema import StoreError

POLL_S = 0.2  # seconds between two checks for something that is waited for
SHARD_GLOB = "shard-[0-9]*.safetensors"
# Each number has exactly one name: it has five digits or, from 100000 on, more digits without a
# leading zero. So 7 is 00007 and never 000007.
_NAME = re.compile(r"shard-([0-9]{5}|[1-9][0-9]{5,8})\.safetensors")


def shard_name(number: int) -> str:
    """The file name of a shard, e.g. `shard-00007.safetensors`."""
    return f"shard-{number:05d}.safetensors"


def shard_number(path: Path) -> int:
    """The number in the name of a shard's file.

    Raises:
        StoreError: the name is not the name of a shard.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise StoreError(
            f"{path}: not the name of a shard ({shard_name(0)}, {shard_name(1)}, ...): give the "
            "file its own name again, or move it out of the store"
        )
    return int(match[1])


def listed_shards(directory: Path, but: Set[str] = frozenset()) -> list[int]:
    """The numbers of the shards of a directory, ascending; numbers may be missing.

    If there is no such directory, there are no shards: a sampler may make the directory later.

    Args:
        but: file names to leave out. A caller that lists a directory many times passes the names
            that it has seen before.

    Raises:
        StoreError: a safetensors file has a name that is not the name of a shard; or the directory
            cannot be listed.
    """
    try:
        names = {*os.listdir(directory)}
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(f"{directory}: cannot be listed ({error.strerror})") from error
    new = [directory / name for name in names - but if name.endswith(".safetensors")]
    return sorted(map(shard_number, new))


def shards_in_order(directory: Path) -> range:
    """The numbers of the shards of a directory: all numbers from 0 to the largest one.

    Raises:
        StoreError: a number is missing; or for the reasons of `listed_shards`.
    """
    numbers = listed_shards(directory)
    if len(numbers) <= max(numbers, default=-1):
        # A listing may miss a shard that is written meanwhile, but have the next shard. A second
        # listing has both.
        numbers = listed_shards(directory)
    for expected, number in enumerate(numbers):
        if expected != number:
            raise StoreError(
                f"{directory / shard_name(expected)}: is missing, though {shard_name(number)} is "
                "there: copy the missing shard again, or wait until another machine's shard is "
                "seen here"
            )
    return range(len(numbers))


class HeldFile:
    """A regular file that stays open from its check to its use.

    Everything is read through one descriptor. So if another file takes this file's name later, the
    other file is not read. The file is not mapped into memory: if somebody truncates a mapped file,
    SIGBUS ends the process, while a read of a truncated file returns fewer bytes.

    Args:
        path: the file's path.
        late_s: how many seconds to wait for a file that is not there.

    Attributes:
        size: the file's size in bytes when it was opened.

    Raises:
        StoreError: the file is not there or cannot be opened, or it is no regular file.
    """

    def __init__(self, path: Path, late_s: float = 0.0) -> None:
        self.path = path
        self._descriptor = -1
        try:
            self._descriptor = _open(path, late_s)
            status = os.fstat(self._descriptor)
        except OSError as error:
            advice = "copy it again or remove it"
            if error.errno == errno.EMFILE:
                advice = "raise `ulimit -n`: a store has as many open files as shards"
            raise StoreError(f"{path}: cannot be opened ({error.strerror}): {advice}") from error
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{path}: not a regular file, as every shard must be: remove it")
        self.size = status.st_size

    def __del__(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            with suppress(OSError):  # its file system may be gone
                os.close(self._descriptor)

    def read(self, into: np.ndarray, offset: int) -> np.ndarray:
        """Fill an array with the bytes from `offset` on, and return it.

        The caller compares the bytes with their checksum; this method does not.

        Args:
            into: C-contiguous, of any dtype.

        Raises:
            StoreError: the file is shorter than it was, or cannot be read any more.
        """
        rest: Any = into
        while rest.nbytes:
            try:
                count = os.preadv(self._descriptor, [rest], offset)
            except OSError as error:
                raise StoreError(
                    f"{self.path}: cannot be read any more ({error.strerror}): was it removed or "
                    "replaced while it is in use? Put the file back, and start again"
                ) from error
            if count == rest.nbytes:
                break
            if not count:  # the file ends here, though it was longer when it was opened
                raise StoreError(
                    f"{self.path}: was cut while it is in use: copy it again, and start again"
                )
            # a system may read less than it was asked for (Linux: at most 2 GiB)
            rest, offset = memoryview(rest).cast("B")[count:], offset + count
        return into

    def damaged(self, what_differs: str, where: str = "") -> StoreError:
        """The error for bytes that do not match their checksum."""
        return StoreError(
            f"{self.path}: {what_differs} differs{where}: the shard is damaged, or was changed "
            "while it is in use: copy it again or remove it"
        )


def _open(path: Path, late_s: float) -> int:
    # Without O_NONBLOCK the open of a named pipe would wait for a writer. Files ignore the flag.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    end, is_limit_raised = time.monotonic() + late_s, False
    while True:
        try:
            return os.open(path, flags)
        except OSError as error:
            if error.errno == errno.EMFILE and not is_limit_raised:
                allow_most_files()
                is_limit_raised = True
            elif error.errno == errno.ENOENT and time.monotonic() < end:
                time.sleep(POLL_S)
            else:
                raise


def allow_most_files() -> None:
    """Let this process have as many open files as the system allows.

    A store has as many open files as shards. Most systems allow a process 1024 open files (the soft
    limit) until the process asks for more (up to the hard limit).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
