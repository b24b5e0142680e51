"""Run a Megatron script on the CPU: `torchrun ... -m megatron_r3.cpu SCRIPT [ARGS...]`."""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch

from megatron_r3.cpu.errors import InstallError, is_users_mistake, lost_its_peer
from megatron_r3.cpu.install import CPU_ARGS, install
from megatron_r3.cpu.ranks import describe_rank, free_port, usable_cores
from megatron_r3.replay.ending import refuse_unpatched, say_last

PATIENCE_S = 2.0  # how long a rank holds back an error that another rank's end may have caused
USAGE = f"""\
usage: torchrun --nproc-per-node N -m megatron_r3.cpu SCRIPT [ARGS...]
       python -m megatron_r3.cpu SCRIPT [ARGS...]          (one process)

Runs a Megatron-LM script on CPU tensors and gloo. Megatron is found next to the script or by
PYTHONPATH. On the CPU a pretrain script needs these arguments (megatron_r3.cpu.CPU_ARGS):
  {" ".join(CPU_ARGS[:4])}
  {" ".join(CPU_ARGS[4:7])}
  {" ".join(CPU_ARGS[7:])}
"""


def main(argv: list[str]) -> None:
    """Run the script `argv[0]` with the arguments that follow it."""
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return
    if not argv:
        _leave(2, USAGE)
    script = Path(argv[0])
    if not script.is_file():
        _leave(2, f"error: no such script: {script}\n\n{USAGE}")
    describe_one_process()
    torch.set_num_threads(threads_of_a_rank())
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *argv[1:]]
    try:
        install()
    except InstallError as error:
        _leave(2, f"error: {error}")
    refuse_unpatched(argv)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Exception as error:
        _report(error)


def describe_one_process() -> None:
    """Set the variables that torchrun would set for a single rank, where they are not set."""
    for name, value in describe_rank(0, 1, free_port()).items():
        os.environ.setdefault(name, value)


def threads_of_a_rank() -> int:
    """How many threads torch uses in this rank: several ranks share the cores evenly.

    A single rank takes OMP_NUM_THREADS threads (the first number of a list) if the variable is set:
    on cores that other programs use too, more threads can make a step many times slower. With
    several ranks torchrun itself sets the variable to 1, so it does not tell what the user wants.
    """
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    given = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if ranks > 1 or not given:
        return max(1, usable_cores() // ranks)
    if not given.isdecimal() or int(given) < 1:
        _leave(2, f"error: OMP_NUM_THREADS={given!r}: expected a whole number above 0")
    return int(given)


def _report(error: Exception) -> NoReturn:
    """Print what went wrong, and end this process: a rank that stays would hold up the others."""
    if lost_its_peer(str(error)):
        # Let the rank that failed first print its error: torchrun then ends this rank.
        time.sleep(PATIENCE_S)
    if is_users_mistake(error):
        # All ranks tend to refuse the same value. Rank 0 leaves first, and torchrun then ends the
        # others before they print the same message again.
        time.sleep(min(0.5 * int(os.environ["LOCAL_RANK"]), PATIENCE_S))
        _leave(1, f"error: {error}")
    text = "".join(traceback.format_exception(error))
    given = {argument.split("=")[0] for argument in sys.argv}
    missing = [argument for argument in CPU_ARGS if argument.split("=")[0] not in given]
    if missing and "megatron.training.arguments" in sys.modules:
        text += f"hint: a Megatron pretrain script on the CPU also needs: {' '.join(missing)}"
    _leave(1, text)


def _leave(status: int, message: str = "") -> NoReturn:
    """End the process without waiting for its threads or for other ranks."""
    sys.stdout.flush()
    if message:
        say_last(message.rstrip())
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
