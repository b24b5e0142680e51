"""`make bench-store`: routes from an engine's response to a rank's slice, and as peers move them.

    python -m proof.benchmarks.store --out build/bench/store.json [--rounds 32] [--tokens 100000]

Qwen3-30B-A3B-shaped routes (48 layers, 128 experts, top-8), one process, one thread. A round moves
routes in every way, in an order that changes from round to round. Rates are medians, of stored
routes (384 bytes a token), whatever a way moves for them, by time and by time of a core. Some ways
are compared with "decode and check": how long they take for the same routes, round by round. The
rounds end when every such ratio's interval is narrower than its difference from 1, or at --rounds;
a ratio that cannot be told from 1 is not shown.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_r3.collect.writing import keep_freed_memory
from megatron_r3.data.engines.shape import ModelShape
from megatron_r3.data.engines.vllm import decode_routes
from megatron_r3.data.store import Rollout, RolloutStore, StoreInfo, write_shard
from megatron_r3.data.store.verify_shard import verify_shard
from megatron_r3.replay.routes import Routes
from proof.benchmarks.command import Command
from proof.benchmarks.interval import CONFIDENCE, enough, median_of, shown, turn
from proof.benchmarks.machine import machine_at_start, write_results

LAYERS, EXPERTS, TOPK = 48, 128, 8
SHAPE = ModelShape(EXPERTS, TOPK, tuple(range(LAYERS)), LAYERS)
INFO = StoreInfo.of_model(SHAPE, "made up", "1")
TOKENS = 2000  # of a rollout
SHARD = 32  # rollouts
TOKEN_BYTES = LAYERS * TOPK
STAGES, CP = 4, 2
BASE = "decode and check (base64 .npy)"
Seconds = tuple[float, float]  # by the wall, and of a core


def main(argv: list[str] | None = None) -> int:
    """Run every way in rounds, print a table, write the file."""
    command = Command("store", __doc__, "of every way, at most")
    command.add_argument("--tokens", type=int, default=100_000, help="of a round (default 100000)")
    args = command.parse(argv)
    if args.tokens < 1:
        command.error(f"--tokens {args.tokens}: at least 1")
    machine = machine_at_start()
    num_rollouts = max(1, args.tokens // TOKENS)
    keep_freed_memory()  # as collect and convert do
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=".") as folder:
        ways = [*_ours(num_rollouts, Path(folder)), *_peers(max(1, num_rollouts // 10))]
        rows = summarise(ways, run_rounds(ways, args.rounds))
    print(f"ratios: of the time that {BASE!r} takes, at {CONFIDENCE:.0%}; load: {machine['load']}")
    print(f"{'':40} {'GB/s':>6} {'of a core':>9} {'bytes/token':>11}  {'wall':28} {'CPU':28}")
    for row in rows:
        print(_line(row))
    record = {**machine, "most_rounds": args.rounds, "tokens": num_rollouts * TOKENS, "rows": rows}
    write_results(args.out, "store", record)
    return 0


@dataclass(frozen=True)
class Way:
    """One way to move routes.

    Attributes:
        what: its name in the table.
        run: moves the routes of one round.
        num_bytes: how many bytes of stored routes that are.
        bytes_per_token: what it moves or stores for one token; None where that says nothing.
        compared: whether the time it takes is set beside that of `BASE`.
        before: called before each run, outside of what is timed.
    """

    what: str
    run: Callable[[], Any]
    num_bytes: float
    bytes_per_token: float | None
    compared: bool = False
    before: Callable[[], Any] = lambda: None


def _timed(run: Callable[[], Any]) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, max(time.process_time() - cpu, 1e-9)


def run_rounds(
    ways: Sequence[Way], most: int, timed: Callable[[Callable[[], Any]], Seconds] = _timed
) -> dict[str, list[Seconds]]:
    """Seconds per byte of stored routes, of each way in each round; a first round warms up.

    Args:
        ways: what to run; one of them is `BASE`.
        most: rounds at most.
        timed: runs a function and returns what it took.
    """
    taken: dict[str, list[Seconds]] = {way.what: [] for way in ways}
    for number in range(most + 1):
        for way in turn(ways, number):
            way.before()
            wall, cpu = timed(way.run)
            if number:
                taken[way.what].append((wall / way.num_bytes, cpu / way.num_bytes))
        if number and enough(_all_ratios(ways, taken), most):
            break
    return taken


def _all_ratios(ways: Sequence[Way], taken: dict[str, list[Seconds]]) -> list[list[float]]:
    return [_ratios(taken, way, clock) for way in ways if way.compared for clock in (0, 1)]


def _ratios(taken: dict[str, list[Seconds]], way: Way, clock: int) -> list[float]:
    pairs = zip(taken[way.what], taken[BASE], strict=True)
    return [mine[clock] / base[clock] for mine, base in pairs]


def summarise(ways: Sequence[Way], taken: dict[str, list[Seconds]]) -> list[dict[str, Any]]:
    """A row for each way; `wall_of_base` and `cpu_of_base` are None where nothing is compared."""
    rows = []
    for way in ways:
        wall, cpu = (
            statistics.median(round_[clock] for round_ in taken[way.what]) for clock in (0, 1)
        )
        row: dict[str, Any] = {
            "what": way.what,
            "rounds": len(taken[way.what]),
            "gb_per_s": 1e-9 / wall,
            "gb_per_cpu_s": 1e-9 / cpu,
            "bytes_per_token": way.bytes_per_token,
        }
        for clock, name in enumerate(("wall_of_base", "cpu_of_base")):
            ratios = _ratios(taken, way, clock)
            row[name] = median_of(ratios).record() if way.compared else None
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> str:
    moved = "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.0f}"
    wall, cpu = (shown(row[name]) if row[name] else "" for name in ("wall_of_base", "cpu_of_base"))
    rates = f"{row['gb_per_s']:6.3f} {row['gb_per_cpu_s']:9.3f}"
    return f"{row['what']:40} {rates} {moved:>11}  {wall:28} {cpu:28}".rstrip()


def _routes_TLK(number: int) -> np.ndarray:
    """Distinct ids, as an engine holds them: `[T, L, K]`, for all tokens but the last."""
    rng = np.random.default_rng(number)
    known = np.argsort(rng.random((4096, EXPERTS)), axis=-1)[:, :TOPK].astype(np.uint8)
    return known[rng.integers(0, len(known), (TOKENS - 1, LAYERS))]


def _payload(number: int) -> str:
    """What vLLM sends: base64 of a .npy."""
    buffer = io.BytesIO()
    np.save(buffer, _routes_TLK(number))
    return base64.b64encode(buffer.getvalue()).decode()


RESPONSE = np.arange(TOKENS) >= TOKENS // 4
LOGPROBS = np.where(RESPONSE, -0.5, 0).astype(np.float32)
IDS = np.arange(TOKENS, dtype=np.int32)
TURNS = np.array([[TOKENS // 4, TOKENS]], np.int32)


def _rollout(routes: Routes, number: int) -> Rollout:
    return Rollout(IDS, RESPONSE, LOGPROBS, 1.0, number // 8, 0, routes, number % 8, TURNS)


def _ours(num_rollouts: int, folder: Path) -> list[Way]:
    payloads = [_payload(i) for i in range(min(num_rollouts, 64))]
    stored = num_rollouts * TOKENS * TOKEN_BYTES

    def decode(number: int) -> Routes:
        choice = {"routed_experts": payloads[number % len(payloads)]}
        return decode_routes(choice, TOKENS, SHAPE)

    def write(into: Path) -> None:
        for start in range(0, num_rollouts, SHARD):
            numbers = range(start, min(start + SHARD, num_rollouts))
            write_shard(into, INFO, [_rollout(decode(i), i) for i in numbers])

    write(folder / "store")
    opened = RolloutStore([folder / "store"])
    size = sum(shard.path.stat().st_size for shard in opened.shards)
    arrays = [decode(i).ids_LTK for i in range(len(payloads))]
    into = np.empty_like(arrays[0])
    return [
        Way(
            "numpy memcpy of the same bytes",
            lambda: [np.copyto(into, arrays[i % len(arrays)]) for i in range(num_rollouts)],
            stored,
            TOKEN_BYTES,
            compared=True,
        ),
        Way(
            BASE,
            lambda: [decode(i).num_rows for i in range(num_rollouts)],
            stored,
            TOKEN_BYTES * 4 / 3,
        ),
        Way(
            "decode, check and store (fsync in it)",
            lambda: write(folder / "written"),
            stored,
            size / (num_rollouts * TOKENS),
            compared=True,
            before=lambda: shutil.rmtree(folder / "written", ignore_errors=True),
        ),
        Way(
            "verify: every checksum and id",
            lambda: [verify_shard(shard, thorough=False) for shard in opened.shards],
            stored,
            TOKEN_BYTES,
        ),
        Way("the same, with the load and parts", opened.verify, stored, TOKEN_BYTES),
        _slice(folder / "store"),
    ]


def _slice(directory: Path) -> Way:
    """What one rank of PP4 x CP2 reads: a quarter of the layers, half of the tokens, zig-zag."""
    layers = range(LAYERS // STAGES)
    chunk = (TOKENS - 1) // (2 * CP)
    store = RolloutStore([directory])
    wanted = len(store) * 2 * chunk * len(layers) * TOPK

    def reopen() -> None:
        nonlocal store
        store = RolloutStore([directory])

    def read() -> None:
        for rollout in range(len(store)):
            rows = store.row_ids(rollout)
            store.routes(np.concatenate([rows[:chunk], rows[-chunk:]]), layers)
        got = sum(shard.bytes_read for shard in store.shards)
        assert got <= 1.05 * wanted, f"{got} bytes read for a slice of {wanted}"

    return Way("slice of a PP4 x CP2 rank", read, wanted, None, before=reopen)


def _peers(num_rollouts: int) -> list[Way]:
    """Move the same routes as other projects do, up to what these hand to the device."""
    rows_TLK = _routes_TLK(0)
    text = json.dumps(rows_TLK.tolist())
    raw = base64.b64encode(rows_TLK.astype("<i4").tobytes()).decode()
    twice = base64.b64encode(raw.encode()).decode()

    def int64(data: bytes) -> np.ndarray:
        return np.frombuffer(data, "<i4").reshape(rows_TLK.shape).astype(np.int64)

    moves: list[tuple[str, Callable[[], np.ndarray], str]] = [
        ("nested JSON lists to int64", lambda: np.array(json.loads(text)), text),
        ("base64 of int32 to int64", lambda: int64(base64.b64decode(raw)), raw),
        (
            "base64 twice of int32 to int64",
            lambda: int64(base64.b64decode(base64.b64decode(twice))),
            twice,
        ),
    ]
    return [
        Way(
            what,
            lambda move=move: [move() for _ in range(num_rollouts)],  # type: ignore[misc]
            num_rollouts * TOKENS * TOKEN_BYTES,
            len(sent) / (TOKENS - 1),
            compared=True,
        )
        for what, move, sent in moves
    ]


if __name__ == "__main__":
    sys.exit(main())
