"""A file system in which calls fail or come late as on a network: a folder, seen through FUSE.

A child process serves it; this file is its program too. Two of them over one folder are two
clients of one server. What a test writes into the folder itself was written by another client. It
takes /dev/fuse, libfuse, mfusepy, and root or fusermount3; where one is missing, the test is
skipped.

Inodes, link counts and times are those of the folder. Nothing is cached.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

STATUS = (
    *("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize"),
    *("st_atime_ns", "st_mtime_ns", "st_ctime_ns"),
)


@dataclass
class Switches:
    """What is odd about a file system; as it is made, nothing is.

    Attributes:
        link: the errno that link() answers; 0 to link.
        lost_answers: how many times more a link() that succeeds is sent again, because its answer
            was lost: its caller hears EEXIST.
        lost_removals: the same of unlink(), whose caller hears ENOENT.
        late_s: by how many seconds a file's name that another client made comes too late, in a
            listing and in a look for it. The time counts from the last change of the file's
            inode, e.g. the removal of its temporary name.
        late_names: the names that come late; empty for all.
        stale: whether a file that has no name any more answers ESTALE.
        fallocate, sync_directory: the errno that posix_fallocate(), and fsync() of a directory,
            answer; 0 for none.
    """

    link: int = 0
    lost_answers: int = 0
    lost_removals: int = 0
    late_s: float = 0.0
    late_names: tuple[str, ...] = ()
    stale: bool = False
    fallocate: int = errno.EOPNOTSUPP  # as NFS 3, and FUSE where the server has no fallocate
    sync_directory: int = 0


@dataclass
class Mounted:
    """A file system that is mounted.

    Attributes:
        path: where it is mounted.
        folder: what it shows; the server's side, where nothing is odd.
        program: the pipes to the process that serves it.
    """

    path: Path
    folder: Path
    program: subprocess.Popen[str]

    def switch(self, **switches: object) -> None:
        """Make it odd in these ways, and in no other; returns when it is."""
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(json.dumps(asdict(Switches(**switches))) + "\n")  # type: ignore[arg-type]
        self.program.stdin.flush()
        assert self.program.stdout.readline() == "done\n"


@contextmanager
def mounted(path: Path, folder: Path) -> Iterator[Mounted]:
    """Mount a file system at `path`, which is made, over a folder, which may have another mount.

    The test is skipped where no FUSE file system can be mounted.
    """
    for needed in (path, folder):
        needed.mkdir(exist_ok=True)
    program = subprocess.Popen(
        [sys.executable, __file__, str(path), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not os.path.ismount(path):
            if program.poll() is not None:
                assert program.stderr is not None
                last = [line for line in program.stderr.read().splitlines() if line.strip()][-1:]
                pytest.skip(f"no FUSE file system can be mounted: {' '.join(last)}")
            time.sleep(0.01)
        yield Mounted(path, folder, program)
    finally:
        # A file may still be open: the name goes now, the rest when the process ends.
        command = ["umount", "--lazy"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, str(path)], check=False, stderr=subprocess.DEVNULL)
        program.terminate()
        program.communicate()


def serve(mount_point: str, folder: str) -> None:
    """Serve the file system until this process is ended, or the one that started it has ended."""
    import mfusepy  # by itself an import of libfuse, which not every machine has

    # A machine without /dev/fuse says so here, in one line.
    os.close(os.open("/dev/fuse", os.O_RDWR))

    switches = Switches()

    def listen() -> None:
        nonlocal switches
        for line in sys.stdin:
            switches = Switches(**json.loads(line))
            print("done", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    class Odd(mfusepy.Operations):  # type: ignore[misc]
        use_ns = True

        def __init__(self) -> None:
            self.mine: set[str] = set()  # the paths that this client made
            self.listed: dict[int, str] = {}  # the paths of the directories that are open

        def there(self, path: str) -> str:
            """The path in the folder.

            Raises:
                FileNotFoundError: it comes too late to be seen yet.
            """
            whole = folder + path
            if switches.late_s and path not in self.mine and not os.path.isdir(whole):
                late = not switches.late_names or os.path.basename(path) in switches.late_names
                if late and time.time() < os.lstat(whole).st_ctime + switches.late_s:
                    raise FileNotFoundError(errno.ENOENT, "it comes too late")
            return whole

        def not_stale(self, fh: int) -> os.stat_result:
            status = os.fstat(fh)
            if switches.stale and not status.st_nlink:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return status

        def init_with_config(self, conn_info: object, config: ctypes.Structure) -> None:
            for name in ("use_ino", "hard_remove", "direct_io", "nullpath_ok"):
                setattr(config, name, 1)
            for name in ("entry_timeout", "attr_timeout", "negative_timeout"):
                setattr(config, name, 0.0)

        def getattr(self, path: str | None, fh: int = -1) -> dict[str, int]:
            status = self.not_stale(fh) if path is None else os.lstat(self.there(path))
            # `use_ns`: a time is a whole number of nanoseconds, under the name of its seconds
            return {name.removesuffix("_ns"): getattr(status, name) for name in STATUS}

        # libfuse gives no path of what is open: see `nullpath_ok`

        def opendir(self, path: str) -> int:
            descriptor = os.open(self.there(path), os.O_RDONLY | os.O_DIRECTORY)
            self.listed[descriptor] = path
            return descriptor

        def readdir(self, path: None, fh: int) -> list[tuple[str, dict[str, int], int]]:
            names = []
            for name in os.listdir(fh):
                with suppress(FileNotFoundError):
                    status = self.getattr(os.path.join(self.listed[fh], name))
                    names.append((name, status, 0))
            return names

        def releasedir(self, path: None, fh: int) -> None:
            del self.listed[fh]
            os.close(fh)

        def open(self, path: str, flags: int) -> int:
            return os.open(self.there(path), flags & ~os.O_NOFOLLOW)

        def create(self, path: str, mode: int, flags: int) -> int:
            descriptor = os.open(folder + path, flags | os.O_CREAT, mode)
            self.mine.add(path)
            return descriptor

        def read(self, path: None, size: int, offset: int, fh: int) -> bytes:
            self.not_stale(fh)
            return os.pread(fh, size, offset)

        def write(self, path: None, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, path: str, length: int) -> None:
            os.truncate(folder + path, length)

        def fallocate(self, path: None, mode: int, offset: int, size: int, fh: int) -> None:
            if switches.fallocate:
                raise OSError(switches.fallocate, os.strerror(switches.fallocate))
            assert not mode
            os.posix_fallocate(fh, offset, size)

        def fsync(self, path: None, datasync: int, fh: int) -> None:
            os.fsync(fh)

        def fsyncdir(self, path: None, datasync: int, fh: int) -> None:
            if switches.sync_directory:
                raise OSError(switches.sync_directory, os.strerror(switches.sync_directory))

        def release(self, path: None, fh: int) -> None:
            os.close(fh)

        def link(self, new: str, old: str) -> None:
            if switches.link:
                raise OSError(switches.link, os.strerror(switches.link))
            os.link(folder + old, folder + new)
            self.mine.add(new)
            if switches.lost_answers:
                switches.lost_answers -= 1
                os.link(folder + old, folder + new)

        def unlink(self, path: str) -> None:
            os.unlink(folder + path)
            self.mine.discard(path)
            if switches.lost_removals:
                switches.lost_removals -= 1
                os.unlink(folder + path)

        def rename(self, old: str, new: str) -> None:
            os.rename(folder + old, folder + new)
            self.mine.discard(old)
            self.mine.add(new)

        def mkdir(self, path: str, mode: int) -> None:
            os.mkdir(folder + path, mode)
            self.mine.add(path)

        def rmdir(self, path: str) -> None:
            os.rmdir(folder + path)

        def chmod(self, path: str | None, mode: int) -> None:
            assert path is not None
            os.chmod(folder + path, mode)

        def utimens(self, path: str | None, times: tuple[int, int] | None = None) -> None:
            assert path is not None
            os.utime(folder + path, ns=times)

        def statfs(self, path: str) -> dict[str, int]:
            status = os.statvfs(folder + path)
            names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_namemax")
            return {name: getattr(status, name) for name in names}

    threading.Thread(target=listen, daemon=True).start()
    mfusepy.FUSE(Odd(), mount_point, foreground=True, nothreads=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
