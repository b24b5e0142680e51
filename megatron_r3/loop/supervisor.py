"""Starts sampler, collector and trainer of a run, and restarts each of them that dies.

Every part can also be started alone: `megatron-r3 rl sampler`, `rl collector`, `rl trainer`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from megatron_r3.loop.collected import told
from megatron_r3.loop.config import Config
from megatron_r3.loop.processes import start, stop
from megatron_r3.loop.trainer import is_trained

PART = "supervisor"
_POLL_S = 0.1
_BEGIN = "--- started"  # a line of a log: a new process begins here


def run(config: Config) -> None:
    """Keep the parts running until the run is over, and print a line for each new collection.

    The caller makes signals raise (`signals_raise`). If the run is over already, no part starts.

    Raises:
        ValueError: a part ended with an error message, or died too often; the error names its log.
    """
    if is_trained(config):
        return
    parts = ["sampler", "collector", "trainer"]
    if config.sampler.engine != "embedded" and not config.sampler.command:
        parts.remove("sampler")  # the user runs the server
    running = {part: _start(config, part) for part in parts}
    deaths = dict.fromkeys(parts, 0)
    events, size, lines = config.directory.events("collector"), 0, len(told(config))
    try:
        while {"collector", "trainer"} & running.keys():
            time.sleep(_POLL_S)
            if events.exists() and events.stat().st_size != size:
                size = events.stat().st_size
                for line in (new := told(config))[lines:]:
                    print(line, flush=True)
                lines = len(new)
            for part, process in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                if _ended(config, part, status, deaths):
                    del running[part]
                else:
                    running[part] = _start(config, part)
    finally:
        for process in running.values():
            stop(process)


def _start(config: Config, part: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "megatron_r3.cli", "rl", part, str(config.file)]
    log = config.directory.log(part)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n{_BEGIN}\n")
    process = start(command, {}, log)
    config.directory.note(PART, "started", part=part)
    return process


def _ended(config: Config, part: str, status: int, deaths: dict[str, int]) -> bool:
    """Write an event about a part's end, and return whether the part needs no restart."""
    # --exit-interval and the like end a training before its last collection, with status 0
    done = status == 0 and (part != "trainer" or is_trained(config))
    config.directory.note(PART, "ended" if done else "died", part=part, status=status)
    if done:
        return True
    deaths[part] += 1
    log = config.directory.log(part)
    if status == 1 and (error := _refusal(log)):
        # the same command would fail with the same error
        raise ValueError(f"{part} (status {status}, {log}): {error}")
    if deaths[part] > config.run.restarts:
        raise ValueError(f"{part} died {deaths[part]} times (status {status}); see {log}")
    print(f"the {part} died (status {status}) and is started again; see {log}", flush=True)
    return False


def _refusal(log: Path) -> str:
    """The last `error: ` line of a part's newest process; empty if it printed none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    started = max((i for i, line in enumerate(lines) if line == _BEGIN), default=-1)
    errors = [line for line in lines[started + 1 :] if line.startswith("error: ")]
    return errors[-1].removeprefix("error: ") if errors else ""
