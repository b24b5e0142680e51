"""`make bench-scale`: what opening, reading and planning cost as a job and its store grow.

    python -m proof.benchmarks.scale --out build/bench/scale.json [--shards 8] [--startup 1000]

One process plays each of 1,024 ranks in turn (PP4 x CP2 x EP8 x DP16) on a store of the shape of
Qwen3-30B-A3B: opens, stats and bytes are counted, not timed. Start-up is the CPU time of the first
rank, and of a rank to which the first rank sent its index, each in a process of its own. Reading
and planning are CPU time too. Exit status 1: a count is above its limit.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from megatron_r3.data.store import Rollout, RolloutStore, write_shard
from megatron_r3.data.store import shard as store_shard
from megatron_r3.data.store.part_sums import PartSums
from megatron_r3.data.store.verify_shard import ReadChecks, verify_shard
from megatron_r3.replay.plan import ExpertRanks, by_owner, layer_sizes
from megatron_r3.replay.planner import messages
from megatron_r3.replay.routes import Routes
from megatron_r3.replay.rows import count_tokens
from megatron_r3.train.one_look import Place
from proof.benchmarks.bench import Bench, Row, number, text
from proof.benchmarks.store import EXPERTS, INFO, LAYERS, TOPK

ROLLOUTS = 64  # in a shard
TOKENS, SEQUENCE = 2000, 2048  # of a rollout, before and after padding
# The ranks that share experts have rollouts of their own: EP8 x DP16 are 128 data-parallel ranks.
PP, CP, DP = 4, 2, 128
MODEL_LAYERS, MODEL_TOKENS, ACTIVE, PEAK, UTILISATION = 58, 16384, 37e9, 989e12, 0.4
STEP_ROLLOUTS = 512  # of a global batch
COUNTED = ("opens", "stats", "listings", "bytes")


def write_store(folder: Path, shards: int, tokens: int) -> None:
    """Write shards of 64 rollouts of `tokens` tokens; nothing is synced to the disk."""
    rng = np.random.default_rng(0)
    known = np.argsort(rng.random((512, EXPERTS)), axis=-1)[:, :TOPK].astype(np.uint8)
    routes = Routes.from_array(known[rng.integers(0, 512, (LAYERS, tokens - 1))], EXPERTS)
    response = np.arange(tokens) >= 1
    logprobs, ids = np.where(response, -0.5, 0).astype(np.float32), np.arange(tokens, dtype="i4")
    with mock.patch("os.fsync"):
        for shard in range(shards):
            numbers = range(shard * ROLLOUTS, (shard + 1) * ROLLOUTS)
            rollouts = [
                Rollout(ids, response, logprobs, 1.0, n // 8, 0, routes, n % 8) for n in numbers
            ]
            write_shard(folder, INFO, rollouts)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the file calls of this process inside the block, and the bytes that it reads."""
    counts = dict.fromkeys(COUNTED, 0)

    def count(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            answer = real(*given, **named)
            counts[name] += answer if name == "bytes" else 1
            return answer

        return counting

    names = {"open": "opens", "stat": "stats", "lstat": "stats", "fstat": "stats"}
    names |= {"listdir": "listings", "scandir": "listings", "preadv": "bytes"}
    patches = [mock.patch.object(os, n, count(what, getattr(os, n))) for n, what in names.items()]
    for patch in patches:
        patch.start()
    try:
        yield counts
    finally:
        for patch in patches:
            patch.stop()


def play(folder: Path) -> Iterator[Row]:
    """Rows with the file calls and bytes of 1,024 ranks, divided by what the row's name says."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    ranks = [(data, peer) for data in range(DP) for peer in range(CP * PP)]
    pairs, used_bytes, steps = 0, 0, dict.fromkeys(COUNTED, 0)
    with counted() as start:
        first = RolloutStore([folder])
    for data, peer in ranks:
        sent = pickle.loads(pickle.dumps(first.index))
        store = RolloutStore.told(sent) if data or peer else first
        with counted() as mine:
            store.trained_on(None)
            for number in Place(data, DP, peer, CP * PP, 1).shards(store.index.first_rollout):
                verify_shard(store.shards[number], thorough=False)
        start = {name: start[name] + mine[name] for name in start}
        with counted() as mine:
            used_bytes += _steps_of(store, data, peer)
        steps = {name: steps[name] + mine[name] for name in steps}
        pairs += len({store.shard_of_rollout(i) for i in range(data, len(store), DP)})
    limit = pairs + len(first.shards)
    path = len(folder.resolve().parts)  # Path.resolve calls lstat once for each part of the path
    rows = [
        ("opens, of used shards x ranks + shards", start["opens"] + steps["opens"], limit, 1.0),
        ("stats, of the same + the path", start["stats"] + steps["stats"], limit + path, 1.0),
        ("listings of the directory", start["listings"] + steps["listings"], 1, 1.0),
        ("bytes before the first step, of the store", start["bytes"], size, 1.1),
        # a part's sums are read for all layers at once, whichever layers the rank has
        ("bytes in the steps, of what is used", steps["bytes"], used_bytes, 1.06),
    ]
    for what, asked, of, most in rows:
        yield {"what": what, "found": asked / of, "most": most, "counted": True}


def _steps_of(store: RolloutStore, data: int, peer: int) -> int:
    """Read what a rank reads in all steps; return how many of the bytes the rank needs."""
    used = 0
    for first in range(0, len(store), STEP_ROLLOUTS):
        for rollout in range(first + data, min(first + STEP_ROLLOUTS, len(store)), DP):
            store.fields(rollout)
            rows, layers = _slice(store, rollout, peer)
            store.routes(rows, layers)
            # token, response and log-prob have 9 bytes, and each row says whether it is recorded
            of_tokens = 9 * TOKENS + TOKENS - 1
            used += of_tokens + len(rows) * (len(layers) * TOPK + 1)
    return used


def _slice(store: RolloutStore, rollout: int, peer: int) -> tuple[np.ndarray, range]:
    """The rows and layers of a rollout that one of the 8 ranks of PP4 x CP2 needs."""
    stage, piece = divmod(peer, CP)
    chunk, rows = SEQUENCE // (2 * CP), store.row_ids(rollout)
    parts = [rows[place * chunk :][:chunk] for place in (piece, 2 * CP - 1 - piece)]
    return np.concatenate(parts), range(stage * LAYERS // PP, (stage + 1) * LAYERS // PP)


def reading(folder: Path) -> Iterator[Row]:
    """CPU time of a rank's reads that check sums (and values), divided by that of bare reads."""
    store = RolloutStore([folder])

    def read() -> None:
        for rollout in range(0, len(store), 4):
            store.fields(rollout)
            store.routes(*_slice(store, rollout, 2))

    def nothing(*_: Any) -> list[int]:  # a mock would keep all arrays that it is called with
        return [0]

    store.trained_on(None)
    seconds: dict[str, list[float]] = {"nothing": [], "sums": [], "sums and values": []}
    for _ in range(9):  # in turn, so that a slow moment of the machine meets all three
        with (
            mock.patch.object(PartSums, "compare", nothing),
            mock.patch.object(store_shard, "part_sums", nothing),
            mock.patch.object(store_shard, "whole_sums", nothing),
        ):
            seconds["nothing"].append(_cpu(read)[0])
        seconds["sums"].append(_cpu(read)[0])
        store.trained_on(ReadChecks(151936))
        seconds["sums and values"].append(_cpu(read)[0])
        store.trained_on(None)
    found = {name: float(np.median(times)) for name, times in seconds.items()}
    for name in ("sums", "sums and values"):
        what = f"CPU time of reading a slice, {name} compared, by nothing compared"
        yield {"what": what, "found": found[name] / found["nothing"]}


def _cpu(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    answer = run()
    return time.process_time() - begin, answer


def _first(folder: Path, into: Path) -> float:
    """CPU seconds of the first rank's start; the file `into` gets the index for other ranks."""
    seconds, store = _cpu(partial(RolloutStore, [folder]))
    more, sent = _cpu(lambda: store.groups() is not None and pickle.dumps(store.index, 5))
    into.write_bytes(sent)
    return seconds + more


def _other(sent: Path) -> float:
    """CPU seconds of another rank's start, from the index in the file `sent`."""
    data = sent.read_bytes()

    def told() -> None:
        store = RolloutStore.told(pickle.loads(data))
        store.trained_on(None)
        for name in ("reward", "policy_version", "num_tokens"):
            store.column(name)
        store.groups(), store.newest_versions(), store.index.identities()

    return _cpu(told)[0]


def _in_new_process(run: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a new process, where nothing is cached, as when a job starts."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(run, *given).result()


def startup(folder: Path, shards: int) -> Iterator[Row]:
    """CPU time of opening a store of `shards` shards, with 64 rollouts in each shard."""
    sent, times = folder / "index", 10_000 / shards
    write_store(folder / "all", shards, 3)
    first_s = min(_in_new_process(_first, folder / "all", sent) for _ in range(3))
    other_s = min(_in_new_process(_other, sent) for _ in range(3))
    for rank, seconds, limit in (("first rank", first_s, 2.0), ("other ranks", other_s, 0.05)):
        what = f"{rank}, s for 10,000 shards (x {times:g})"
        yield {"what": what, "found": times * seconds, "most": limit}


def memory(folder: Path) -> Iterator[Row]:
    """The memory of an open store with 800 tokens a rollout, divided by that with 50 tokens."""
    held = []
    for length in (50, 200, 800):
        write_store(folder / str(length), 4, length)
        tracemalloc.start()
        store = RolloutStore([folder / str(length)])
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        del store
    what = "memory with 16 times the tokens, by that without"
    yield {"what": what, "found": held[-1] / held[0], "most": 1.05}


def planning() -> Iterator[Row]:
    """CPU time of planning a micro-batch of a model of DeepSeek-V3's shape on one rank of EP64."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 256, (MODEL_LAYERS, MODEL_TOKENS, 1))
    ids_LTK = ((first + np.arange(TOPK)) % 256).astype(np.uint8)
    ranks, numbers = ExpertRanks(64, 0, 1, 0), [*range(1, MODEL_LAYERS + 1)]

    def planned() -> None:
        counts_LE = count_tokens(ids_LTK, 256)
        layer_sizes(counts_LE, by_owner(counts_LE, ranks), ranks, numbers)

    step_s = 6 * MODEL_TOKENS * ACTIVE / (PEAK * UTILISATION)
    what = "planning, of an estimated micro-batch on an H200"
    yield {"what": what, "found": min(_cpu(planned)[0] for _ in range(3)) / step_s, "most": 0.05}
    for_rank = by_owner(np.zeros((MODEL_LAYERS, 256), np.int32), ExpertRanks(256, 0, 1, 0))
    told = messages(for_rank, np.zeros(MODEL_LAYERS), known=True).nbytes / 1e6
    what = "MB that a plan's ranks tell one of them, EP256"
    yield {"what": what, "found": told, "most": 0.2, "counted": True}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """All rows of the table."""
    if args.shards < 2:
        raise ValueError(f"--shards {args.shards}: must be at least 2")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scale-", dir=args.out.parent) as folder:
        write_store(Path(folder) / "played", args.shards, TOKENS)
        yield from play(Path(folder) / "played")
        yield from reading(Path(folder) / "played")
        yield from startup(Path(folder) / "startup", args.startup)
        yield from memory(Path(folder))
    yield from planning()


def wrong(row: Row) -> str:
    """The error of a row whose count is above its limit; "" for other rows.

    A time above its limit is not wrong, because times depend on the machine.
    """
    above = row.get("counted") and row["found"] > row["most"]
    return f"found {row['found']:.4g}; the limit is {row['most']:g}" if above else ""


BENCH = Bench(
    "scale",
    __doc__,
    {"": text("what"), "found": number("found", ".4g"), "at most": number("most", "g")},
    measure,
    wrong,
    options={
        "shards": (8, "shards of the store that 1,024 ranks read"),
        "startup": (1000, "shards of the store at start-up"),
    },
    about="one process",
)


if __name__ == "__main__":
    sys.exit(BENCH.main())
