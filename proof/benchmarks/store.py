"""`make bench-store`: the speed of routes, from an engine's response to the slice of a rank.

    python -m proof.benchmarks.store --out build/bench/store.json [--rounds 32] [--tokens 100000]

The routes have the shape of Qwen3-30B-A3B (48 layers, 128 experts, top-8). One thread runs all
ways to move routes, also the ways of other projects, in an order that changes from round to round.
A rate is a median: the bytes of the routes in a store (384 a token), divided by wall or CPU time. A
way may move more bytes for the same routes. Some ways are compared with "decode and check" in the
same round, for the same bytes in a store.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
from proof.benchmarks.bench import Bench, Row, compared, number, ratio, ratios, text
from proof.benchmarks.interval import enough, turn

LAYERS, EXPERTS, TOPK = 48, 128, 8
SHAPE = ModelShape(EXPERTS, TOPK, tuple(range(LAYERS)), LAYERS)
INFO = StoreInfo.of_model(SHAPE, "made up", "1")
TOKENS = 2000  # in a rollout
SHARD = 32  # rollouts in a shard
TOKEN_BYTES = LAYERS * TOPK
STAGES, CP = 4, 2
BASE = "decode and check (base64 .npy)"
Taken = dict[str, list[float]]  # seconds per byte in each round, by the name of a way


@dataclass(frozen=True)
class Way:
    """One way to move routes.

    Attributes:
        what: the name of the way in the table.
        run: moves the routes of one round.
        num_bytes: how many bytes the routes of one round have in a store.
        bytes_per_token: what the way moves or stores for one token; None for a slice.
        compared: whether the table has the time of this way divided by that of `BASE`.
        before: called before each run, and not timed.
    """

    what: str
    run: Callable[[], Any]
    num_bytes: float
    bytes_per_token: float | None
    compared: bool = False
    before: Callable[[], Any] = lambda: None


def _timed(run: Callable[[], Any]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, max(time.process_time() - cpu, 1e-9)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Run every way in rounds; yield a row for each way."""
    num_rollouts = max(1, args.tokens // TOKENS)
    keep_freed_memory()  # `rollouts collect` and `rollouts convert` call it too
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=".") as folder:
        ways = [*_ours(num_rollouts, Path(folder)), *_peers(max(1, num_rollouts // 10))]
        yield from summarise(ways, run_rounds(ways, args.rounds))


def run_rounds(
    ways: Sequence[Way],
    most: int,
    timed: Callable[[Callable[[], Any]], tuple[float, float]] = _timed,
) -> list[Taken]:
    """Wall and CPU seconds per byte of stored routes, by way; the first round only warms up.

    Args:
        ways: what to run; one of them is `BASE`.
        most: the largest number of rounds.
        timed: runs a function and returns its wall and CPU seconds.
    """
    taken: list[Taken] = [{way.what: [] for way in ways} for _ in ("wall", "CPU")]
    for done in range(most + 1):
        for way in turn(ways, done):
            way.before()
            for of_clock, seconds in zip(taken, timed(way.run), strict=True):
                of_clock[way.what] += [seconds / way.num_bytes] if done else []
        told = [ratios(of_clock, w.what, BASE) for of_clock in taken for w in ways if w.compared]
        if done and enough(told, most):
            break
    return taken


def summarise(ways: Sequence[Way], taken: list[Taken]) -> Iterator[Row]:
    """A row for each way; the ratios to `BASE` are None for a way without `compared`."""
    for way in ways:
        wall, cpu = (statistics.median(of_clock[way.what]) for of_clock in taken)
        base = BASE if way.compared else None
        yield {
            "what": way.what,
            "rounds": len(taken[0][way.what]),
            "gb_per_s": 1e-9 / wall,
            "gb_per_cpu_s": 1e-9 / cpu,
            "bytes_per_token": way.bytes_per_token,
            "wall_of_base": compared(taken[0], way.what, base),
            "cpu_of_base": compared(taken[1], way.what, base),
        }


BENCH = Bench(
    "store",
    __doc__,
    {
        "": text("what"),
        "GB/s": number("gb_per_s", ".3f"),
        "GB/s of a core": number("gb_per_cpu_s", ".3f"),
        "bytes/token": number("bytes_per_token"),
        "wall / decode": ratio("wall_of_base"),
        "CPU / decode": ratio("cpu_of_base"),
        "rounds": text("rounds"),
    },
    measure,
    rounds="the most runs of every way",
    options={"tokens": (100_000, "tokens whose routes a round moves")},
    about="{tokens} tokens a round",
    facts=lambda args: {"tokens": max(1, args.tokens // TOKENS) * TOKENS},
)


def _routes_TLK(number: int) -> np.ndarray:
    """Random distinct ids `[T, L, K]`, as an engine returns them: the last token has no row."""
    rng = np.random.default_rng(number)
    known = np.argsort(rng.random((4096, EXPERTS)), axis=-1)[:, :TOPK].astype(np.uint8)
    return known[rng.integers(0, len(known), (TOKENS - 1, LAYERS))]


def _payload(number: int) -> str:
    """The routes as vLLM sends them: a .npy file in base64."""
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
        Way("the same, with the sums of parts", opened.verify, stored, TOKEN_BYTES),
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
        assert got <= 1.05 * wanted, (
            f"{got} bytes read for a slice of {wanted} bytes; the limit is 1.05 times the slice"
        )

    return Way("slice of a PP4 x CP2 rank", read, wanted, None, before=reopen)


def _peers(num_rollouts: int) -> list[Way]:
    """The ways of other projects, up to the array that such a project copies to the device."""
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
    sys.exit(BENCH.main())
