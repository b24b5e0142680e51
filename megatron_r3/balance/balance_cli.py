"""The command `megatron-r3 rollouts skew`. The parser is built without numpy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_balance(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    number: Callable[..., Callable[[str], float]],
) -> None:
    """Register `skew`.

    Args:
        commands: those of `megatron-r3 rollouts`.
        number: makes an argparse type; takes `int` or `float` and the smallest allowed number.
    """
    summary = "show how unevenly rollouts load the ranks: in store order, shuffled, and with guests"
    parser = commands.add_parser("skew", help=summary, description=summary)
    parser.set_defaults(run=run_skew)
    add = parser.add_argument
    add("stores", nargs="+", type=Path, metavar="DIR", help="rollout stores, of one model")
    add("--ep", nargs="+", type=number(int, 1), required=True, metavar="N",
        help="sizes of the expert-parallel group")  # fmt: skip
    add("--slots", nargs="+", type=number(int, 0), default=[0, 1, 2], metavar="R",
        help="guest slots of a rank (default: 0 1 2)")  # fmt: skip
    add("--micro-batch-size", type=number(int, 1), default=1, metavar="N",
        help="rollouts of a rank in one micro-batch (default: 1)")  # fmt: skip
    add("--ranks-per-rollout", type=number(int, 1), default=1, metavar="N",
        help="ranks of the group that have the same rollouts: tensor times context parallel size "
        "(default: 1)")  # fmt: skip
    add("--domain", type=number(int, 1), metavar="N",
        help="a guest is in its expert's block of N neighbouring ranks, such as those that share "
        "NVLink (default: the whole group)")  # fmt: skip
    add("--least-tokens", type=number(int, 1), default=1024, metavar="N",
        help="fewest tokens of a guest (default: 1024)")  # fmt: skip
    add("--layers", action="store_true", help="show every layer")
    add("--json", action="store_true", help="print all numbers as JSON")


def run_skew(args: argparse.Namespace) -> int:
    """Print the table, or with --json the numbers.

    Raises:
        ValueError: a store cannot be read, or as `measure_skew`.
    """
    import json

    from megatron_r3.balance.skew import SkewPlan, measure_skew
    from megatron_r3.balance.skew_text import skew_heading, skew_table
    from megatron_r3.data.store import RolloutStore

    plan = SkewPlan(
        ep=list(dict.fromkeys(args.ep)),
        slots=list(dict.fromkeys(args.slots)),
        micro_batch_size=args.micro_batch_size,
        ranks_per_rollout=args.ranks_per_rollout,
        domain=args.domain,
        least_tokens=args.least_tokens,
    )
    numbers = measure_skew(RolloutStore(args.stores, mixed_policies=True), plan)
    if args.json:
        print(json.dumps(numbers))
    else:
        print(f"{skew_heading(numbers)}\n\n{skew_table(numbers, args.layers)}")
    return 0
