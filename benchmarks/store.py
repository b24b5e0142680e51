"""`make bench-store`: routes from an engine's response to a rank's slice, and as peers move them.

    python -m benchmarks.store --out build/bench/store.json [--tokens 1000000]

Qwen3-30B-A3B-shaped routes (48 layers, 128 experts, top-8), one process, one thread. Rates are of
stored routes (384 bytes a token), whatever a way moves for them, by time and by time of a core.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine_of
from megatron_r3.engines.shape import ModelShape
from megatron_r3.engines.vllm import decode_routes
from megatron_r3.rollouts.writing import keep_freed_memory
from megatron_r3.routes import Routes
from megatron_r3.store import Rollout, RolloutStore, StoreInfo, write_shard

LAYERS, EXPERTS, TOPK = 48, 128, 8
SHAPE = ModelShape(EXPERTS, TOPK, tuple(range(LAYERS)), LAYERS)
INFO = StoreInfo.of_model(SHAPE, "made up", "1")
TOKENS = 2000  # of a rollout
SHARD = 32  # rollouts
TOKEN_BYTES = LAYERS * TOPK
STAGES, CP = 4, 2


def main(argv: list[str] | None = None) -> int:
    """Run every way in one go, print a table, write the file."""
    parser = argparse.ArgumentParser(prog="bench-store", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of all rollouts")
    args = parser.parse_args(argv)
    num_rollouts = max(1, args.tokens // TOKENS)
    keep_freed_memory()  # as collect and convert do
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=".") as folder:
        rows = [*_ours(num_rollouts, Path(folder)), *_peers(max(1, num_rollouts // 10))]
    print(f"{'':52} {'GB/s':>6} {'GB/s of a core':>14} {'bytes/token':>11}")
    for row in rows:
        moved = "" if row["bytes_per_token"] is None else f"{row['bytes_per_token']:.0f}"
        rates = f"{row['gb_per_s']:6.2f} {row['gb_per_cpu_s']:14.2f}"
        print(f"{row['what']:52} {rates} {moved:>11}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({**machine_of(), "rows": rows}, indent=1) + "\n")
    return 0


def _row(
    what: str, wall_cpu: tuple[float, float], num_tokens: int, moved: float | None
) -> dict[str, Any]:
    stored = num_tokens * TOKEN_BYTES / 1e9
    return {
        "what": what,
        "gb_per_s": stored / wall_cpu[0],
        "gb_per_cpu_s": stored / wall_cpu[1],
        "bytes_per_token": moved,
    }


def _timed(run: Callable[[], Any]) -> tuple[tuple[float, float], Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return (time.perf_counter() - wall, max(time.process_time() - cpu, 1e-9)), result


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


def _ours(num_rollouts: int, folder: Path) -> Iterator[dict[str, Any]]:
    payloads = [_payload(i) for i in range(min(num_rollouts, 64))]
    num_tokens = num_rollouts * TOKENS

    def decode(number: int) -> Routes:
        choice = {"routed_experts": payloads[number % len(payloads)]}
        return decode_routes(choice, TOKENS, SHAPE)

    spent = _copied([decode(i).ids_LTK for i in range(len(payloads))], num_rollouts)
    yield _row("numpy memcpy of the same bytes", spent, num_tokens, TOKEN_BYTES)
    spent, _ = _timed(lambda: [decode(i).num_rows for i in range(num_rollouts)])
    yield _row("decode and check (base64 .npy)", spent, num_tokens, TOKEN_BYTES * 4 / 3)

    def store() -> None:
        for start in range(0, num_rollouts, SHARD):
            numbers = range(start, min(start + SHARD, num_rollouts))
            write_shard(folder / "store", INFO, [_rollout(decode(i), i) for i in numbers])

    spent, _ = _timed(store)
    opened = RolloutStore([folder / "store"])
    size = sum(shard.path.stat().st_size for shard in opened.shards)
    yield _row("decode, check and store (fsync in it)", spent, num_tokens, size / num_tokens)
    spent, _ = _timed(opened.verify)
    yield _row("verify: every checksum and id", spent, num_tokens, TOKEN_BYTES)
    yield from _slices(folder / "store", num_tokens)
    shutil.rmtree(folder / "store")


def _copied(arrays: list[np.ndarray], count: int) -> tuple[float, float]:
    into = np.empty_like(arrays[0])
    return _timed(lambda: [np.copyto(into, arrays[i % len(arrays)]) for i in range(count)])[0]


def _slices(directory: Path, num_tokens: int) -> Iterator[dict[str, Any]]:
    """What one rank of PP4 x CP2 reads: a quarter of the layers, half of the tokens, zig-zag."""
    store = RolloutStore([directory])
    layers = range(LAYERS // STAGES)
    chunk = (TOKENS - 1) // (2 * CP)

    def read() -> int:
        wanted = 0
        for rollout in range(len(store)):
            rows = store.row_ids(rollout)
            mine = np.concatenate([rows[:chunk], rows[-chunk:]])
            wanted += len(mine)
            store.routes(mine, layers)
        return wanted * len(layers) * TOPK

    spent, wanted = _timed(read)
    got = sum(shard.bytes_read for shard in store.shards)
    share = got / wanted
    row = _row(f"slice of a PP4 x CP2 rank, {share:.3f} of its bytes read", spent, 0, None)
    rate = wanted / 1e9
    yield {**row, "gb_per_s": rate / spent[0], "gb_per_cpu_s": rate / spent[1], "read": share}
    assert share <= 1.05, f"{got} bytes read for a slice of {wanted}"


def _peers(num_rollouts: int) -> Iterator[dict[str, Any]]:
    """Move the same routes as other projects do, up to what these hand to the device."""
    num_tokens = num_rollouts * TOKENS
    rows_TLK = _routes_TLK(0)
    text = json.dumps(rows_TLK.tolist())
    spent, _ = _timed(lambda: [np.array(json.loads(text)) for _ in range(num_rollouts)])
    yield _row("nested JSON lists to int64", spent, num_tokens, len(text) / (TOKENS - 1))
    raw = base64.b64encode(rows_TLK.astype("<i4").tobytes()).decode()

    def int32() -> np.ndarray:
        flat = np.frombuffer(base64.b64decode(raw), "<i4")
        return flat.reshape(rows_TLK.shape).astype(np.int64)

    spent, _ = _timed(lambda: [int32() for _ in range(num_rollouts)])
    yield _row("base64 of int32 to int64", spent, num_tokens, len(raw) / (TOKENS - 1))
    twice = base64.b64encode(raw.encode()).decode()

    def both() -> np.ndarray:
        flat = np.frombuffer(base64.b64decode(base64.b64decode(twice)), "<i4")
        return flat.reshape(rows_TLK.shape).astype(np.int64)

    spent, _ = _timed(lambda: [both() for _ in range(num_rollouts)])
    yield _row("base64 twice of int32 to int64", spent, num_tokens, len(twice) / (TOKENS - 1))


if __name__ == "__main__":
    sys.exit(main())
