"""`make bench-clients`: replay as frameworks do it, and the same through megatron_r3.

    python -m proof.benchmarks.clients --out build/bench/clients.json [--rounds 32] [--skyrl CLONE]
                                 [--only "EP2 full"]

One model, one batch and its routes, on 1 process and on EP2, without and with full recompute. Two
forward steps: that of verl 0.9.1's own engine, and one that is written by hand around Megatron's
schedule. In each of them replay is done by the framework's code, by the same code on megatron_r3,
and by `replaying`; each way is compared with the one that it would replace. A round has a step of
each way, in an order that changes from round to round. Exit status 1: some router took other routes
than those of its micro-batch, or a layer with a dispatch plan waits for something after all.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from proof.benchmarks.clients_driver import Ranks
from proof.benchmarks.clients_ranks import WAYS, Case
from proof.benchmarks.command import Command
from proof.benchmarks.interval import CONFIDENCE, enough, median_of, shown, turn
from proof.benchmarks.machine import machine_at_start, write_results
from proof.benchmarks.waits import COPIES, GATHERED, GATHERS, PLANS, WAITS
from proof.fidelity.clients.sources import SKYRL_FILES, take_from_clone
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import patched_copy, unpatched_copy

ROOT = Path(__file__).parents[2]
VERL = "verl-0.9.1"
ENGINE = "verl.workers.engine.megatron.transformer_impl"
ADAPTER = "megatron_r3.frameworks.verl"
CASES = [Case(ep, recompute) for ep in (1, 2) for recompute in (False, True)]
Seconds = dict[str, list[float]]  # of each round, by the name of a way
HEAD = (
    f"{'EP':>2} {'recompute':9} {'':22} {'waits':>5} {'copies':>6} {'metadata':>8} {'moved':>6} "
    f"{'gathered':>8} {'held':>6} {'wall':>7} {'CPU':>7} {'wall / peer':31} {'CPU / peer':31} "
    f"{'CPU / live':31}"
)


def main(argv: list[str] | None = None) -> int:
    """Measure every case."""
    command = Command(
        "clients",
        __doc__,
        "steps of each way at most, in a case",
        cases={case.name: case for case in CASES},
    )
    command.add_argument(
        "--skyrl", default="", help="a clone of NovaSky-AI/SkyRL; without it its ways are left out"
    )
    args = command.parse(argv)
    cases = [*args.cases.values()]
    clients = Path(os.environ.get("MEGATRON_R3_CLIENTS", ROOT / "build" / "clients")).resolve()
    if not (clients / VERL).is_dir():
        print(f"error: no {VERL} in {clients}: run `make bench-clients`", file=sys.stderr)
        return 1
    machine = {**machine_at_start(), "device": "cpu, gloo", "verl": VERL.partition("-")[2]}
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        if args.skyrl:
            skyrl = folder / "skyrl"
            skyrl.mkdir()
            try:
                take_from_clone("SKYRL", args.skyrl, SKYRL_FILES, skyrl)
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            cases = [replace(case, skyrl=skyrl) for case in cases]
        rows = _measure(cases, clients, folder, args.rounds, machine["load"])
    record = {**machine, "most_rounds": args.rounds, "rows": rows}
    write_results(args.out, "clients", record)
    wrong = [(row, fault) for row in rows for fault in faults(row)]
    for row, fault in wrong:
        name = Case(row["ep"], row["recompute"]).name
        print(f"error: {name}, {row['way']}: {fault}", file=sys.stderr)
    return 1 if wrong else 0


def _measure(
    cases: list[Case], clients: Path, folder: Path, rounds: int, load: float
) -> list[dict[str, Any]]:
    """The rows of these cases, printed as soon as they are there."""
    tree, tree_name = unpatched_copy(None, folder / "unpatched")
    patched = patched_copy(tree, folder / "patched")
    print("by MoE layer and pass: host waits, copies to the host, metadata collectives; by token:")
    print("bytes of routes moved to the device, gathered from ranks, and held until the backward")
    print("pass beyond live; wall and CPU time of a step, both by those of the way that it would")
    print(f"replace, and CPU time by that of live, at {CONFIDENCE:.0%}; load at start: {load}")
    print(HEAD, flush=True)
    rows = []
    with ExitStack() as stack:
        # A worker ends with the thread that started it, and these threads end with the pool.
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=16))
        starting = {
            name: pool.submit(TreeWorker, patched, modules, environment)
            for name, (modules, environment) in _workers(clients).items()
        }
        workers = {name: stack.enter_context(worker.result()) for name, worker in starting.items()}
        for case in cases:
            with Ranks(pool, workers, case, folder, 900 + 60.0 * rounds) as ranks:
                result = run_rounds(case.ways(), ranks, rounds)
            alike = {"ep": case.expert_parallel, "recompute": case.recompute, "tree": tree_name}
            for row in summarise(result):
                rows.append({**alike, **row})
                print(_line(rows[-1]), flush=True)
    return rows


def _workers(clients: Path) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """For each worker the modules that it imports before its ranks fork, and its environment."""
    path = os.pathsep.join(map(str, (clients / VERL, clients / "site", ROOT)))
    verl = {"PYTHONPATH": path, "VERL_USE_EXTERNAL_PLUGINS": "none"}
    return {
        "verl": ((ENGINE,), {**verl, "VERL_USE_EXTERNAL_MODULES": ""}),
        "verl on r3": ((ENGINE,), {**verl, "VERL_USE_EXTERNAL_MODULES": ADAPTER}),
        "upstream": (("megatron.core.models.gpt",), {}),
        "r3": (("megatron.core.models.gpt",), {}),
    }


def run_rounds(names: list[str], ranks: Any, most: int) -> dict[str, Any]:
    """Record routes, warm up, time rounds until they are enough, then count in one more.

    Args:
        names: the ways.
        ranks: a `Ranks`.
        most: so many rounds are timed at most.

    Returns:
        "wall_s" and "cpu_s": for each way the seconds of its steps, on the rank where they were
        most; "counts": for each way what `Bench.count` returned, by rank.
    """
    routes = ranks.ask("by hand, native", "record")
    for name in names:
        ranks.ask(name, "take", routes)
    wall_s: Seconds = {name: [] for name in names}
    cpu_s: Seconds = {name: [] for name in names}
    number = 0
    while True:
        for name in turn(names, number):
            walls, cpus = zip(*ranks.ask(name, "step"), strict=True)
            if number:  # round 0 warms up
                wall_s[name].append(max(walls))
                cpu_s[name].append(max(cpus))
        if number and enough(compared(wall_s) + compared(cpu_s), most):
            break
        number += 1
    counts = {name: ranks.ask(name, "count") for name in names}
    return {"wall_s": wall_s, "cpu_s": cpu_s, "counts": counts}


def compared(seconds: Seconds) -> list[list[float]]:
    """The ratios that must tell: of each way that would replace another one, by that one."""
    return [_ratios(seconds, name, peer) for name in seconds if (peer := WAYS[name].peer)]


def _ratios(seconds: Seconds, name: str, other: str) -> list[float]:
    return [mine / its for mine, its in zip(seconds[name], seconds[other], strict=True)]


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row of the table for each way.

    Args:
        result: what `run_rounds` returned.

    Returns:
        Rows whose ratios are records of `Median`; None where a way has no such ratio.
    """
    return [_row(name, result) for name in result["counts"]]


def _row(name: str, result: dict[str, Any]) -> dict[str, Any]:
    way, ranks = WAYS[name], result["counts"][name]
    live = result["counts"][way.live]
    of_ranks = _worst(ranks)
    wall_s, cpu_s = result["wall_s"], result["cpu_s"]

    def ratio(seconds: Seconds, other: str | None) -> dict[str, Any] | None:
        return None if other in (None, name) else median_of(_ratios(seconds, name, other)).record()

    return {
        "way": name,
        "peer": way.peer,
        **{
            key: of_ranks(lambda c, key=key: c.get(key, 0) / c["layer passes"])
            for key in (WAITS, COPIES, GATHERS)
        },
        PLANS: of_ranks(lambda c: c.get(PLANS, 0)),
        "moved_per_token": of_ranks(lambda c: c["moved"] / c["tokens"]),
        "gathered_per_token": of_ranks(lambda c: c.get(GATHERED, 0) / c["tokens"]),
        "held_per_token": of_ranks(lambda c: c["held"]) - _worst(live)(lambda c: c["held"]),
        "wrong_passes": sum(count["wrong"] for count in ranks),
        "rounds": len(wall_s[name]),
        "step_wall_ms": 1e3 * statistics.median(wall_s[name]),
        "step_cpu_ms": 1e3 * statistics.median(cpu_s[name]),
        "wall_of_peer": ratio(wall_s, way.peer),
        "cpu_of_peer": ratio(cpu_s, way.peer),
        "wall_of_live": ratio(wall_s, way.live),
        "cpu_of_live": ratio(cpu_s, way.live),
    }


def _worst(ranks: list[Mapping[str, float]]) -> Callable[[Callable[[Any], float]], float]:
    return lambda number: max(map(number, ranks))


def faults(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a row, in words: other routes, or a layer with a plan that waits.

    The routes are none that the live router would choose, so live ways must take other ones in all
    of their passes: without that the check of the other ways could not fail.
    """
    way, found = WAYS[row["way"]], []
    is_live = row["way"] == way.live
    if is_live and not row["wrong_passes"]:
        found.append("the live router takes the routes of the batch, so that nothing is checked")
    if not is_live and row["wrong_passes"]:
        found.append(f"{row['wrong_passes']} passes took other routes than their micro-batch has")
    in_layers = sum(row[name] for name in (WAITS, COPIES, GATHERS))
    if way.plan and in_layers:
        found.append(f"{in_layers:g} waits, copies and collectives in a layer that has a plan")
    if not way.plan and not in_layers:
        found.append("no wait in a layer without a plan, so that waits are not counted")
    return found


def _line(row: dict[str, Any]) -> str:
    ratios = (row["wall_of_peer"], row["cpu_of_peer"], row["cpu_of_live"])
    cells = (shown(ratio) if ratio else "" for ratio in ratios)
    return (
        f"{row['ep']:>2} {'full' if row['recompute'] else 'none':9} {row['way']:22} "
        f"{row[WAITS]:>5.2f} {row[COPIES]:>6.2f} {row[GATHERS]:>8.2f} "
        f"{row['moved_per_token']:>6.1f} {row['gathered_per_token']:>8.2f} "
        f"{row['held_per_token']:>6.1f} {row['step_wall_ms']:>4.0f} ms {row['step_cpu_ms']:>4.0f} "
        f"ms {' '.join(f'{cell:31}' for cell in cells)}"
    ).rstrip()


if __name__ == "__main__":
    from proof.benchmarks import clients  # the ranks import by name

    sys.exit(clients.main())
