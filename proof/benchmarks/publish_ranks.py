"""What the ranks of the publishing benchmark do. Megatron is imported inside the functions."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from torch import distributed


def published(rank: int, argv: list[str], vocab_size: int, out: Path, rounds: int) -> list[Any]:
    """Write a model as a transformers directory, some times over.

    Args:
        argv: of Megatron.
        out: the directory; it is removed after each round.

    Returns:
        For each round: seconds, bytes by which this rank's resident memory grew at most, bytes of
        this rank's part of the model, and bytes of the weights that all ranks wrote together, and
        of the largest file of a layer.
    """
    from megatron_r3.train.launch import build_models, initialize
    from megatron_r3.weights.write_policy import write_policy

    sys.argv = ["publish.py", *argv]
    models = build_models(initialize())
    part = sum(p.nbytes for model in models for p in model.parameters())
    found = []
    for number in range(rounds + 1):
        # What was freed and is still resident would hide what the write needs.
        ctypes.CDLL(None).malloc_trim(0)
        distributed.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, begun = _memory("VmRSS"), time.perf_counter()
        written = write_policy(models, out, vocab_size=vocab_size)
        seconds, grown = time.perf_counter() - begun, _memory("VmHWM") - before
        layers = sorted(out.glob("model-*"))[1:-1]  # without the embedding and the head
        largest = max(file.stat().st_size for file in layers)
        if number:  # the first one imports, and makes connections
            found.append((seconds, grown, part, written, largest))
        distributed.barrier()
        if rank == 0:
            shutil.rmtree(out)
    return found


def _memory(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) * 1024
