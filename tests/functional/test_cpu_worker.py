"""A script runs as `-m megatron_r3.cpu` promises: its children, and a user's mistake."""

import os
import subprocess
import sys
from pathlib import Path

from megatron_r3.cpu import device

SPAWNING = """
import multiprocessing, os, sys, typing
import torch
from megatron.core import parallel_state
from megatron_r3.cpu.attention import zigzag

class Where:
    # pickled as a question, unpickled as the answer of the process that does it
    def __reduce__(self):
        return os.getpid, ()

@torch.compile(dynamic=True)
def child(pipe):
    pipe.send((torch.empty(1, device="cuda").is_cuda, hasattr(typing, "override")))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, its_end = context.Pipe()
    process = context.Process(target=child, args=(its_end,))
    process.start()
    print(sys.argv[1:], ours.recv())
    process.join()
    with context.Manager() as manager:  # a checkpoint makes one for a queue
        queue = manager.Queue()
        queue.put(Where())
        print(queue.get() == os.getpid(), "torch._inductor" in sys.modules)
    zigzag(3, 2, 0)
"""


def test_a_script_its_spawned_children_and_a_users_mistake(megatron_tree, tmp_path):
    (tmp_path / "script.py").write_text(SPAWNING)
    repo = Path(device.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_r3.cpu", "script.py", "--option", "1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(megatron_tree), str(repo)))},
        capture_output=True,
        text=True,
        timeout=180,
    )
    want = ["['--option', '1'] (True, True)", "True False"]
    assert done.stdout.splitlines()[-2:] == want, done.stderr
    message = "error: a sequence of 3 tokens cannot be split into 4 equal parts"
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
