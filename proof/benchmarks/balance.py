"""`make bench-balance`: what guest experts do to the load, to the busiest rank, and to a step.

    python -m proof.benchmarks.balance --out build/bench/balance.json [--rounds 32] [--only EP2]

The benchmark trains on made-up routes with a given share of the load on the first rank, in three
ways: without guest slots, with slots that stay empty, and with guests. The table has the load of
the busiest rank divided by the mean load, and what planning and sending cost for a micro-batch and
rank. The table also has the wall time of a step, the longest CPU time of a rank, and the longest
CPU time of a rank inside its MoE layers. These three are divided by the same time of the steps
without slots in the same round. The mean over the ranks of the CPU time inside MoE layers without
slots is the least that the slowest rank would need if tokens were spread evenly and guests cost
nothing. Exit status 1: the load with guests is above the limit of the case.

Shape suffixes (docs/glossary.md): L, R.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_r3.cpu import CPU_ARGS
from proof.benchmarks.bench import (
    AGAIN,
    Bench,
    Row,
    compared_to_first,
    each,
    median_ms,
    number,
    ratio,
    text,
)
from proof.benchmarks.turns import (
    SHAPE,
    Rounds,
    modes_of_microbatches,
    patched_worker,
    train_in_turn,
    write_store,
)

# without guest slots; with slots that stay empty; with guests
WAYS = OFF, EMPTY, GUESTS = ("off", "empty", "guests")
ROLLOUTS, BATCH = 32, 4
NEVER = 1 << 60  # if a guest needs so many tokens, no expert gets a guest


class Case(NamedTuple):
    """How many ranks share the experts, how many slots a rank has, and how uneven the load is.

    Attributes:
        share: the first rank's share of the load; 1 / ep is even.
        limit: the most that the busiest rank's load with guests, divided by the mean load, may be.
        sequence: tokens of a rollout; a micro-batch has four rollouts.
    """

    ep: int
    slots: int
    share: float
    limit: float
    sequence: int = 128


CASES = {
    "EP2, 75 %, 2 slots": Case(2, 2, 0.75, 1.02),
    "EP2, 75 %, 4 times the tokens, 2 slots": Case(2, 2, 0.75, 1.02, sequence=512),
    "EP4, 55 %, 1 slot": Case(4, 1, 0.55, 1.05),
    "EP2, even, 2 slots": Case(2, 2, 0.5, 1.02),
}
LAYERS, EXPERTS, TOPK = 2, 16, 4
# wide experts, because guests move only the time of experts to other ranks
WIDE = f"""
--num-layers {LAYERS} --hidden-size 256 --moe-ffn-hidden-size 512
--moe-router-replay-guest-tokens 1 --rollouts-policy any
""".split()


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of every case."""
    with patched_worker() as (worker, tree, folder):
        for name, case in args.cases.items():
            store = folder / name
            routes_of(case, store)
            more = ["--expert-model-parallel-size", str(case.ep), "--rollouts", str(store)]
            more += ["--moe-router-replay-guest-slots", str(case.slots)]
            more += ["--seq-length", str(case.sequence)]
            more += ["--max-position-embeddings", str(case.sequence)]
            argv, limit_s = [*CPU_ARGS, *SHAPE, *WIDE, *more], 600 + 60 * args.rounds
            found = worker.run(timed, case.ep, argv, args.rounds, timeout_s=limit_s)
            yield from each(summarise(found), case=name, **case._asdict(), tree=tree)


def routes_of(case: Case, store: Path) -> None:
    """Write rollouts whose routes give the first rank its share of the load.

    The other ranks share the rest of the load evenly. The experts of one rank differ: the hottest
    expert has several times the load of the coldest.
    """
    rng = np.random.default_rng(0)
    log_weights = _with_shares(rng.standard_normal((LAYERS, 1, EXPERTS)), case, rng)
    routes = [_drawn(log_weights, case.sequence, rng) for _ in range(ROLLOUTS)]
    write_store(store, routes, "made up")


def _drawn(log_weights: np.ndarray, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Routes `[layers, tokens, top-k]`: experts drawn without replacement by Gumbel top-k."""
    noisy = log_weights + rng.gumbel(size=(LAYERS, tokens, EXPERTS))
    return noisy.argsort(axis=2)[..., -TOPK:]


def _with_shares(log_weights: np.ndarray, case: Case, rng: np.random.Generator) -> np.ndarray:
    """The log-weights, changed in 30 steps until each rank has its share of the load."""
    rest = (1 - case.share) / (case.ep - 1)
    wanted_R = np.array([case.share] + [rest] * (case.ep - 1))
    for _ in range(30):
        drawn = _drawn(log_weights, 4096, rng)
        rank = drawn.reshape(LAYERS, -1) * case.ep // EXPERTS
        found_LR = np.stack([np.bincount(r, minlength=case.ep) / len(r) for r in rank])
        change_LR = np.log(wanted_R / found_LR)
        log_weights = log_weights + np.repeat(change_LR, EXPERTS // case.ep, axis=1)[:, None]
    return log_weights


def summarise(results: list[dict[str, Any]]) -> Iterator[Row]:
    """A row for each way, from what `timed` returned on each rank; times are the slowest rank's."""
    first = results[0]
    for way in first["wall_s"]:
        mode = way.removesuffix(AGAIN)
        # for each rank its load in each layer and micro-batch
        load_R = np.array([result["load"][mode] for result in results])
        row: Row = {
            "way": way,
            "load": load_R.max(0).sum() / load_R.mean(0).sum(),
            "rounds": len(first["wall_s"][way]),
            "planning_ms": 1e3 * max(result["planning_s"][mode] for result in results),
        }
        for name in ("wall", "cpu", "layer"):
            row[f"{name}_ms"] = median_ms(first[f"{name}_s"][way])
            row[f"{name}_of_off"] = compared_to_first(first[f"{name}_s"], way)
        if way == OFF:
            row["even_of_off"] = median_ms(first["even_s"]) / row["layer_ms"]
        if way == GUESTS:
            row["guests"] = sum(result["guests"] for result in results) / len(results)
            row["bytes"] = sum(result["bytes"] for result in results) / len(results)
        yield row


def wrong(row: Row) -> str:
    """The error of a row with guests whose load is above its case's limit; "" for other rows."""
    if row["way"] != GUESTS or row["load"] <= row["limit"]:
        return ""
    return (
        f"the busiest rank has {row['load']:.3f} times the mean load; the limit is {row['limit']}"
    )


BENCH = Bench(
    "balance",
    __doc__,
    {
        "case": text("case"),
        "slots": text("way"),
        "max/mean": number("load", ".3f"),
        "wall, ms": number("wall_ms"),
        "CPU, ms": number("cpu_ms"),
        "wall / off": ratio("wall_of_off"),
        "CPU / off": ratio("cpu_of_off"),
        "CPU in MoE layers / off": ratio("layer_of_off"),
        "mean of ranks / off": number("even_of_off", ".3f"),
        "planning, ms": number("planning_ms", ".2f"),
        "guests": number("guests", ".1f"),
        "sent, MB": number("bytes", ".2f", 1e-6),
        "rounds": text("rounds"),
    },
    measure,
    wrong,
    CASES,
    "steps of each way at most",
)


# -- the ranks


def timed(rank: int, argv: list[str], most: int) -> dict[str, Any]:
    """Train a model with guest slots; the steps take the ways in turn."""
    rounds, spent, layers = Rounds(most, WAYS), Spent(), list[_Layer]()
    layer_s: dict[str, list[float]] = {way: [] for way in rounds.ways}
    even_s: list[float] = []
    before = 0.0

    def built(models: list[torch.nn.Module]) -> None:
        from megatron_r3.replay.layers import local_moe_layers

        for model in models:
            layers.extend(_Layer(layer, spent) for layer in local_moe_layers(model).values())
        spent.watch_transfers()

    def begin() -> None:
        nonlocal before
        before = spent.layers_s
        for layer in layers:
            layer.go(rounds.mode())

    def end() -> None:
        busiest = torch.tensor(spent.layers_s - before, dtype=torch.float64)
        total = busiest.clone()
        torch.distributed.all_reduce(busiest, torch.distributed.ReduceOp.MAX)
        torch.distributed.all_reduce(total)
        if rounds.timing:
            layer_s[rounds.way()].append(float(busiest))
            if rounds.way() == OFF:
                even_s.append(float(total) / torch.distributed.get_world_size())

    result = train_in_turn(
        argv,
        rounds,
        _parts_in_turn(spent, rounds),
        batch=(BATCH, ROLLOUTS),
        built=built,
        begin=begin,
        end=end,
    )
    return {
        **result,
        "layer_s": layer_s,
        "even_s": even_s,
        "load": spent.load,
        "guests": spent.guests / spent.plans[GUESTS],
        "bytes": spent.bytes / spent.plans[GUESTS],
        "planning_s": {way: spent.planning_s[way] / spent.plans[way] for way in WAYS},
    }


class Spent:
    """The CPU time of this rank, the load in its dispatch plans, and its guests.

    Attributes:
        layers_s: CPU seconds of this thread inside MoE layers, forward and backward.
        planning_s: by way, the CPU seconds of planning.
        plans: by way, how many micro-batches were planned.
        load: by way, how many tokens this rank's experts and guests got, for each layer of each
            micro-batch.
        guests: how many guests this rank had, summed over all micro-batches and layers.
        bytes: how many bytes this rank sent: the weights of its experts to their guests, and the
            gradients of its guests to the ranks that own the experts.
    """

    def __init__(self) -> None:
        self.layers_s = 0.0
        self.planning_s, self.plans = Counter[str](), Counter[str]()
        self.load: dict[str, list[int]] = {way: [] for way in WAYS}
        self.guests = self.bytes = 0

    def add_plan(self, way: str, plan: Any) -> None:
        """Count a plan, with its load and its guests."""
        self.plans[way] += 1
        for sizes in plan.values():
            self.load[way].append(int(sizes.tokens_per_expert.sum()))
            if sizes.guests is not None:
                self.guests += len(sizes.guests.expert_of_slot)

    def watch_transfers(self) -> None:
        """Count from now on the bytes that the collectives of guests send."""
        from megatron_r3.seams import guests

        exchange, shared = torch.distributed.all_to_all_single, guests._shared

        def counted(received: Any, sent: Any, *more: Any, group: Any = None, **named: Any) -> Any:
            if any(group is one.group for one in shared.values()):
                self.bytes += sent.numel() * sent.element_size()
            return exchange(received, sent, *more, group=group, **named)

        torch.distributed.all_to_all_single = counted


class _Layer:
    """A MoE layer that can switch its guest slots on and off, and measures its own CPU time."""

    def __init__(self, layer: Any, spent: Spent) -> None:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        self.layer, self.guests, self.began = layer, layer.guests, 0.0
        places = self.guests.dispatcher
        self.plain = type(places)(
            layer.num_local_experts,
            layer.local_expert_indices,
            config=layer.config,
            pg_collection=get_default_pg_collection(),
        )
        self.plain.plan_hook = places.plan_hook

        def begin(*_: Any) -> None:
            self.began = time.thread_time()

        def end(*_: Any) -> None:
            spent.layers_s += time.thread_time() - self.began

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
        layer.register_full_backward_pre_hook(begin)
        layer.register_full_backward_hook(end)

    def go(self, way: str) -> None:
        """Switch the layer to this way."""
        self.layer.guests = None if way == OFF else self.guests
        self.layer.token_dispatcher = self.plain if way == OFF else self.guests.dispatcher


def _parts_in_turn(spent: Spent, rounds: Rounds) -> Any:
    """The `Parts` of a training whose steps take the ways in turn."""
    from megatron_r3.balance.places import sizes_with_guests
    from megatron_r3.replay.planner import Planner
    from megatron_r3.train.step import Parts

    ways = modes_of_microbatches(rounds)

    class TurnedPlanner(Planner):
        def __init__(self, config: Any, *given: Any) -> None:
            super().__init__(config, *given)
            never = copy.copy(config)  # no expert has enough tokens for a slot
            never.moe_router_replay_guest_tokens = NEVER
            of_guests = self._other_sizes
            self.ways = {OFF: None, EMPTY: sizes_with_guests(never), GUESTS: of_guests}

        def plan(self, routes: Any) -> Any:
            way = next(ways)  # each micro-batch is planned once
            self._other_sizes = self.ways[way]
            begin = time.thread_time()
            plan = super().plan(routes)
            spent.planning_s[way] += time.thread_time() - begin
            spent.add_plan(way, plan)
            return plan

    return Parts(planner=TurnedPlanner)


if __name__ == "__main__":
    from proof.benchmarks import balance  # the ranks import `timed` by this module's name

    sys.exit(balance.BENCH.main())
