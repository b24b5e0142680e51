"""Stopping a demo leaves no process behind. (CI runs the demo itself, whole.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def processes_naming(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, UnicodeDecodeError):
            continue
        if text in command and int(entry.name) != os.getpid():
            found.append(command)
    return found


@pytest.mark.parametrize(
    ("module", "number"),
    [("demo.run", signal.SIGINT), ("demo.run", signal.SIGTERM), ("demo.online", signal.SIGTERM)],
)
def test_stopping_a_demo(patched_tree, tmp_path, module, number):
    out = tmp_path / "demo"  # demo.online makes its policy there too, beside its own folder
    own = tmp_path / "online" if module == "demo.online" else out
    command = [sys.executable, "-m", module, "--megatron", str(patched_tree)]
    with subprocess.Popen(
        [*command, "--out", str(own)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as demo:
        # torchrun and its two ranks, which may have imported nothing yet
        deadline = time.monotonic() + 90
        while len(processes_naming(f"{out}/checkpoint")) < 3:
            assert time.monotonic() < deadline, "the demo did not begin to train"
            time.sleep(0.1)
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert "Traceback" not in errors
    assert processes_naming(str(tmp_path)) == []
    assert not (out / "pretrain.done").exists()
