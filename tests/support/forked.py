"""A function in a process of its own that has torch already: it is forked, and begins in 20 ms.

`python -c PROGRAM` takes two seconds until torch is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO


class Forked:
    """Run `fn(*args)` in a fork of this process: much of subprocess.Popen, with pipes.

    Its status is 0 if `fn` returns, what SystemExit says, and 1 for another exception.

    Args:
        fn: what it runs.
        args: of `fn`.
        env: its environment variables that this process has not.
        errors: the file that it writes its errors to.
    """

    def __init__(
        self, fn: Callable[..., object], *args: object, env: Mapping[str, str], errors: Path
    ) -> None:
        given, stdin = os.pipe()
        stdout, said = os.pipe()
        self._errors = errors
        self._process = multiprocessing.get_context("fork").Process(
            target=_run, args=(fn, args, env, (given, said, errors)), daemon=False
        )
        self._process.start()
        os.close(given)
        os.close(said)
        self.stdin: TextIO = os.fdopen(stdin, "w")
        self.stdout: TextIO = os.fdopen(stdout)

    def errors(self) -> str:
        return self._errors.read_text()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float = 60) -> int:
        """Its status, once it has ended."""
        self._process.join(timeout_s)
        status = self._process.exitcode
        assert status is not None, f"it runs past {timeout_s} s"
        return status

    def close(self) -> None:
        """End it, and close its pipes."""
        self.kill()
        self._process.join()  # with a time-out, join waits for its children too
        self.stdin.close()
        self.stdout.close()


def _run(
    fn: Callable[..., object],
    args: tuple[object, ...],
    env: Mapping[str, str],
    files: tuple[int, int, Path],
) -> None:
    given, said, errors = files
    os.dup2(given, 0)
    os.dup2(said, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.update(env)
    status: object = 0
    try:
        fn(*args)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of gloo's may abort a process that ends by itself
    os._exit(status if isinstance(status, int) else 1)
