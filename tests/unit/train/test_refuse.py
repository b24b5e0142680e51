"""How a training ends for a user's mistake, with and without children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PARENT = """
import multiprocessing, sys, time
from megatron_r3.train import refuse

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    getattr(refuse, sys.argv[1])("the store is full\\nand more")
"""


def ended(how: str, path, wait_s: float = 10) -> subprocess.CompletedProcess:
    script = path / "parent.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        error = process.stderr.readline()  # it has refused; what follows is how it ends
        try:
            status = process.wait(wait_s)
        finally:
            os.kill(child, signal.SIGKILL)
        error += process.stderr.read()
    return subprocess.CompletedProcess(command, status, "", error)


def test_a_refusal_beside_a_child_ends_the_process_with_one_line(tmp_path, monkeypatch) -> None:
    """Only under torchrun the line goes into the file: tests/functional/test_bad_input.py."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    process = ended("refuse_beside_children", tmp_path)
    assert (process.returncode, process.stderr) == (1, "error: the store is full and more\n")
    assert not file.exists()


def test_python_itself_would_wait_for_the_child(tmp_path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        ended("refuse", tmp_path, wait_s=3)
