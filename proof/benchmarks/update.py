"""`make bench-update`: what the pass of the old policy costs a collection of rollouts.

    python -m proof.benchmarks.update --out build/bench/update.json [--rounds 32] [--only "EP2 N4"]

The benchmark trains on collections of 2 and 4 mini-steps, in three ways. In the first way the
sampler is the old policy, and there is no pass. In the second way the trainer is the old policy
(`--rollouts-old-policy trainer`): a forward-only pass goes over each collection. The third way
also trains on the routes of that pass (R2). The table has the time of a collection divided by that
of the first way in the same round: wall time, and CPU time of the busiest rank. The table also has
the forward passes of a micro-batch, and the host waits of a MoE layer in a pass. Exit status 1: one
of these two counts is not as expected (`wrong`).

Shape suffixes (docs/glossary.md): B, S, T.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from proof.benchmarks.bench import (
    Bench,
    Row,
    compared_to_first,
    each,
    median_ms,
    number,
    ratio,
    text,
)
from proof.benchmarks.turns import Rounds, modes_of_microbatches, rig, train_in_turn
from proof.benchmarks.waits import WAITS

WAYS = SAMPLER, TRAINER, R2 = ("sampler", "trainer", "trainer, R2")
PASSES = "forward passes"
STEP, MICRO_BATCH = 16, 8  # rollouts of a mini-step, and of a micro-batch
ROLLOUTS = 64  # of the store: the largest collection
CASES = {f"EP{ep} N{mini_steps}": (ep, mini_steps) for ep in (1, 2) for mini_steps in (2, 4)}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of every case."""
    with rig(ROLLOUTS) as (worker, tree, argv):
        for ep, mini_steps in args.cases.values():
            argv_of_case = [*argv, "--expert-model-parallel-size", str(ep)]
            limit_s = 600 + 60 * args.rounds
            given = (argv_of_case, mini_steps, args.rounds)
            found = worker.run(timed, ep, *given, timeout_s=limit_s)
            yield from each(summarise(found[0]), ep=ep, mini_steps=mini_steps, tree=tree)


def summarise(result: dict[str, Any]) -> Iterator[Row]:
    """A row for each way, from what `timed` returned; the ratios are records of `Median`."""
    for way in result["wall_s"]:
        passes = result["counts"][way]["experts"]
        yield {
            "way": way,
            PASSES: passes / result["layers_and_microbatches"],
            WAITS: result["counts"][way][WAITS] / passes,
            "rounds": len(result["wall_s"][way]),
            "collection_wall_ms": median_ms(result["wall_s"][way]),
            "collection_cpu_ms": median_ms(result["cpu_s"][way]),
            "wall_of_sampler": compared_to_first(result["wall_s"], way),
            "cpu_of_sampler": compared_to_first(result["cpu_s"], way),
        }


def wrong(row: Row) -> str:
    """What is wrong with a row, in words; empty if nothing is.

    Expected is one forward pass, in which no layer waits. If the trainer is the old policy, there
    is a second forward pass, without a dispatch plan, in which each layer waits once: a mean of 0.5
    waits for a layer and pass.
    """
    wanted = (1, 0) if row["way"].startswith(SAMPLER) else (2, 0.5)
    if (row[PASSES], row[WAITS]) == wanted:
        return ""
    return (
        f"{row[PASSES]:g} forward passes of a micro-batch, expected {wanted[0]}; "
        f"{row[WAITS]:g} host waits of a layer and pass, expected {wanted[1]}"
    )


BENCH = Bench(
    "update",
    __doc__,
    {
        "EP": text("ep"),
        "mini-steps": text("mini_steps"),
        "old policy": text("way"),
        "passes": number(PASSES),
        "host waits": number(WAITS, ".1f"),
        "wall, ms": number("collection_wall_ms"),
        "CPU, ms": number("collection_cpu_ms"),
        "wall / sampler": ratio("wall_of_sampler"),
        "CPU / sampler": ratio("cpu_of_sampler"),
        "rounds": text("rounds"),
    },
    measure,
    wrong,
    CASES,
    "collections of each way at most",
)


# -- the ranks


def timed(rank: int, argv: list[str], mini_steps: int, most: int) -> dict[str, Any]:
    """Train; the collections, of `mini_steps` optimizer steps each, take the ways in turn."""
    rounds, layers = Rounds(most, WAYS), Counter[str]()
    options = "--rollouts-old-policy trainer --moe-router-replay-source old-policy"
    options += f" --rollouts-mini-steps {mini_steps}"

    def built(models: list[torch.nn.Module]) -> None:
        from megatron_r3.replay.layers import local_moe_layers

        layers["MoE"] = sum(len(local_moe_layers(model)) for model in models)

    result = train_in_turn(
        [*argv, *options.split()],
        rounds,
        _parts_in_turn(rounds, mini_steps),
        batch=(MICRO_BATCH, STEP),
        steps=mini_steps,
        counts=Counter(),
        built=built,
    )
    from megatron.training import get_args

    microbatches = mini_steps * STEP // MICRO_BATCH // get_args().data_parallel_size
    return {**result, "layers_and_microbatches": layers["MoE"] * microbatches}


def _parts_in_turn(rounds: Rounds, mini_steps: int) -> Any:
    """The `Parts` of a training whose collections take the ways in turn.

    The training's options are those of the third way. In the second way the pass records no routes,
    and all tokens take the routes of the rollouts. In the first way there is no pass: all tokens
    take the routes of the rollouts, and the sampler's log-probs stand for the old policy's.
    """
    from megatron_r3.train.lookahead import Prepared, Preparer
    from megatron_r3.train.old_pass import OldPass
    from megatron_r3.train.old_policy import OldPolicy
    from megatron_r3.train.schedule import SOURCES
    from megatron_r3.train.step import Parts

    ways = modes_of_microbatches(rounds, mini_steps)

    class TurnedOldPolicy(OldPolicy):
        def add_routes(self, rows_T: torch.Tensor, ids: dict[int, torch.Tensor]) -> None:
            if rounds.mode() == R2:
                super().add_routes(rows_T, ids)

    class TurnedOldPass(OldPass):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.policy = TurnedOldPolicy()

        def begin(self, models: list[Any], forward_step: Any) -> None:
            if rounds.mode() != SAMPLER:
                super().begin(models, forward_step)

        def logprobs(self, host: dict[str, torch.Tensor]) -> torch.Tensor:
            if rounds.mode() == SAMPLER:
                return host["sampled_logprobs"]
            return super().logprobs(host)

    class TurnedPreparer(Preparer):
        def prepare(self, whole: Any, with_plan: bool, for_old_pass: bool = False) -> Prepared:
            way = rounds.mode() if for_old_pass else next(ways)
            if way != R2:  # each token of the store has a recorded route
                source_BS = torch.full_like(whole["source"], SOURCES.index("rollout"))
                whole = {**whole, "source": source_BS}
            return super().prepare(whole, with_plan, for_old_pass)

    return Parts(preparer=TurnedPreparer, old_pass=TurnedOldPass)


if __name__ == "__main__":
    from proof.benchmarks import update  # the ranks import `timed` by this module's name

    sys.exit(update.BENCH.main())
