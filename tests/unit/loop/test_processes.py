"""What a part has started ends with it: told to, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from megatron_r3.loop.processes import start, stop

REPO = Path(__file__).parents[3]
# it and its child ignore SIGTERM; the child is in a session of its own, as torchrun's ranks are
STUBBORN = "trap '' TERM; (trap '' TERM; setsid sleep 61) & echo $! > {file}; wait"


def until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)
    return is_so()


def sleepers(file: Path) -> list[psutil.Process]:
    """What the command has started, as long as it lives."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        environment = process.info["environ"] or {}
        if environment.get("STARTED_FOR") == str(file) and process.info["cmdline"]:
            found.append(process)
    return found


def stubborn(file: Path) -> list[str]:
    return ["sh", "-c", STUBBORN.format(file=file)]


def test_a_command_is_stopped_with_all_that_it_has_started(tmp_path: Path) -> None:
    file, log = tmp_path / "pid", tmp_path / "logs" / "log"
    process = start(stubborn(file), {"STARTED_FOR": str(file)}, log)
    assert until(file.exists)
    assert until(lambda: len(sleepers(file)) >= 2)
    stop(process, 0.2)
    assert process.returncode is not None
    assert until(lambda: not sleepers(file))
    assert log.exists()


@pytest.mark.parametrize("_", range(3))  # on a busy machine the signal may come too late to tell
def test_a_signal_that_comes_as_the_command_starts_is_passed_on(tmp_path: Path, _: int) -> None:
    """A long PATH makes the start last: the command is looked for in each of its folders."""
    path = "/:" * 54_000 + os.environ["PATH"]
    process = start(["sleep", "61"], {"STARTED_FOR": str(tmp_path), "PATH": path})
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text():  # as often as can be, while the start lasts
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not sleepers(tmp_path)


def test_a_signal_that_nohup_ignores_is_not_passed_on(tmp_path: Path) -> None:
    """Neither the part ends, nor what it has started, when its guard has its handlers."""
    part = (
        "import os, signal, time\nfrom megatron_r3.loop.processes import signals_raise, start\n"
        "with signals_raise():\n"
        "    process = start(['sh', '-c', 'touch up; sleep 1; exit 3'], {})\n"
        "    while not os.path.exists('up'): time.sleep(0.01)\n"
        "    for number in (process.pid, 0): os.kill(number, signal.SIGHUP)\n"
        "    raise SystemExit(process.wait())"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", part]
    run = partial(subprocess.run, env=env, cwd=tmp_path, start_new_session=True)
    assert run(["nohup", *command]).returncode == 3
    assert run(command).returncode != 3


def test_what_a_part_has_started_dies_with_it(tmp_path: Path) -> None:
    """torchrun gives each rank a session of its own, so a process group is not enough."""
    grandchild = f"import time; open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(60)"
    child = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True)\n"
        "time.sleep(60)"
    )
    part = (
        "import sys, time\nfrom megatron_r3.loop.processes import start\n"
        f"p = start([sys.executable, '-c', {child!r}], {{}})\ntime.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    process = subprocess.Popen([sys.executable, "-c", part], env=env)
    end = time.monotonic() + 30
    while not (tmp_path / "up").exists() and time.monotonic() < end:
        time.sleep(0.05)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(below, timeout=15)
    assert not alive


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"^no-such-command: no such command"):
        start(["no-such-command"], {})
