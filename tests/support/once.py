"""Make something expensive once for a whole test session, however many processes run it.

pytest-xdist runs a session in several worker processes, and a session fixture is set up in each of
them. A tree of Megatron, or a policy that takes half a minute to train, is the same in all of them.
The first worker that needs the folder makes it; the others wait for that, and then share it.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


class Once:
    """Folders that all workers of a session share. What is in such a folder may only be read.

    Args:
        root: a folder that is the same for all workers, and new in each session.
    """

    def __init__(self, root: Path) -> None:
        self.root = root / "once"
        self.root.mkdir(exist_ok=True)

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the folder `name`, which `make(folder)` has filled, in this worker or in another.

        If `make` raises, nothing is kept, and the next worker that asks tries again.
        """
        folder, done = self.root / name, self.root / f"{name}.done"
        with (self.root / f"{name}.lock").open("w") as lock:
            # The kernel drops this lock when a worker dies, so that the others never wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder
