"""Real processes of `make bench-scale`: the gather of a plan, by gloo, on a single machine."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

ROUNDS = 15


def gather_times(sizes: Sequence[int], numbers: int) -> list[dict[str, Any]]:
    """How long ranks take to gather what the planner of each of them sends: L x E numbers.

    More ranks than cores take turns on them, so time grows with all that the ranks do together.

    Args:
        sizes: how many ranks.
        numbers: int32, of one rank.
    """
    rows = []
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as folder:
            context = get_context("spawn")
            queue = context.Queue()
            given = (ranks, numbers, os.path.join(folder, "meet"), queue)
            processes = [context.Process(target=_rank, args=(r, *given)) for r in range(ranks)]
            for process in processes:
                process.start()
            wall, cpu = queue.get(timeout=300)
            for process in processes:
                process.join()
        gathered = 4 * numbers * ranks
        rows.append({"ranks": ranks, "ms": 1e3 * wall, "cpu_ms": 1e3 * cpu, "bytes": gathered})
        print(
            f"gather on {ranks} ranks: {1e3 * wall:.1f} ms, {1e3 * cpu:.1f} ms of CPU in a rank, "
            f"{gathered} bytes",
            file=sys.stdout,
        )
    return rows


def _rank(rank: int, ranks: int, numbers: int, meet: str, queue: Any) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch gives the gather a new name
    store = torch.distributed.FileStore(meet, ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mine = torch.arange(numbers, dtype=torch.int32)
    gathered = torch.empty(ranks * numbers, dtype=torch.int32)
    times = []
    for _ in range(ROUNDS):
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        torch.distributed.all_gather_into_tensor(gathered, mine)
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    if rank == 0:
        queue.put(tuple(np.median(np.array(times), axis=0).tolist()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
