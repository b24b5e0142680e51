"""The commands `megatron-r3 rollouts skew` and `place`. The parsers are built without numpy.

Shape suffixes (docs/glossary.md): E, L.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_balance(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    number: Callable[..., Callable[[str], float]],
) -> None:
    """Register `skew` and `place`.

    Args:
        number: makes the type of an argument that is a number of a kind, from one value on.
    """
    summary = "show how unevenly rollouts load the ranks: as they lie, shuffled, and with guests"
    _skew_arguments(_command(commands, "skew", summary, run_skew), number)
    summary = "write a placement: which experts share a node and a rank, so that loads are even"
    _place_arguments(_command(commands, "place", summary, run_place), number)


def _command(commands: Any, name: str, summary: str, run: Callable[..., int]) -> Callable[..., Any]:
    """A command on stores; what adds its arguments."""
    parser = commands.add_parser(name, help=summary, description=summary)
    parser.add_argument(
        "stores", nargs="+", type=Path, metavar="DIR", help="rollout stores, of one model"
    )
    parser.set_defaults(run=run)
    add: Callable[..., Any] = parser.add_argument
    return add


def _skew_arguments(add: Callable[..., Any], number: Callable[..., Any]) -> None:
    add("--ep", nargs="+", type=number(int, 1), required=True, metavar="N",
        help="sizes of the expert-parallel group")  # fmt: skip
    add("--slots", nargs="+", type=number(int, 0), default=[0, 1, 2], metavar="R",
        help="guest slots of a rank (default: 0 1 2)")  # fmt: skip
    add("--micro-batch-size", type=number(int, 1), default=1, metavar="N",
        help="rollouts of a rank in one micro-batch (default: 1)")  # fmt: skip
    add("--ranks-per-rollout", type=number(int, 1), default=1, metavar="N",
        help="ranks of the group that have the same rollouts: tensor times context parallel size "
        "(default: 1)")  # fmt: skip
    add("--global-batch-size", type=number(int, 1), metavar="N",
        help="rollouts that are shuffled among themselves (default: all)")  # fmt: skip
    add("--seed", type=number(int, 0), default=1, help="of the shuffle (default: 1)")
    add("--domain", type=number(int, 1), metavar="N",
        help="guests are among so many neighbouring ranks, such as those that share NVLink "
        "(default: the whole group)")  # fmt: skip
    add("--least-tokens", type=number(int, 1), default=1024, metavar="N",
        help="no guest has fewer tokens (default: 1024)")  # fmt: skip
    add("--placement", type=Path, metavar="FILE",
        help="the experts are where this file of `rollouts place` says")  # fmt: skip
    add("--layers", action="store_true", help="show every layer")
    add("--plot", type=Path, metavar="FILE", help="draw the table as PNG, SVG or PDF")
    add("--json", action="store_true", help="print all numbers as JSON")


def run_skew(args: argparse.Namespace) -> int:
    """Print the table, or the numbers as JSON, and draw them where that is asked for."""
    import json

    from megatron_r3.balance.skew import SkewPlan, measure_skew
    from megatron_r3.balance.skew_text import draw_skew, skew_heading, skew_table
    from megatron_r3.store import RolloutStore

    plan = SkewPlan(
        ep=list(dict.fromkeys(args.ep)),
        slots=list(dict.fromkeys(args.slots)),
        micro_batch_size=args.micro_batch_size,
        ranks_per_rollout=args.ranks_per_rollout,
        global_batch_size=args.global_batch_size,
        seed=args.seed,
        domain=args.domain,
        least_tokens=args.least_tokens,
        placement=args.placement,
    )
    numbers = measure_skew(RolloutStore(args.stores, mixed_policies=True), plan)
    if args.plot is not None:
        draw_skew(numbers, args.plot)
    if args.json:
        print(json.dumps(numbers))
    else:
        print(f"{skew_heading(numbers)}\n\n{skew_table(numbers, args.layers)}")
    return 0


def _place_arguments(add: Callable[..., Any], number: Callable[..., Any]) -> None:
    add("--ep", type=number(int, 1), required=True, metavar="N",
        help="size of the expert-parallel group")  # fmt: skip
    add("--domain", type=number(int, 1), metavar="N",
        help="neighbouring ranks that share a node, whose loads are made even first "
        "(default: the whole group)")  # fmt: skip
    add("--groups", type=number(int, 1), default=1, metavar="N",
        help="groups of the router, n_group of config.json: they stay together "
        "(default: 1)")  # fmt: skip
    add("--output", "-o", type=Path, required=True, metavar="FILE",
        help="where the placement goes; the file must not be there")  # fmt: skip


def run_place(args: argparse.Namespace) -> int:
    """Write the placement, and print how even the loads were and are."""
    from megatron_r3.balance.place import plan_placement, total_load, unevenness
    from megatron_r3.store import RolloutStore

    if args.output.exists():
        raise ValueError(f"--output {args.output}: it is there already: choose another name")
    if not args.output.absolute().parent.is_dir():
        raise ValueError(f"--output {args.output}: there is no such folder; make it first")
    store = RolloutStore(args.stores, mixed_policies=True)
    load_LE = total_load(store)
    domain = args.ep if args.domain is None else min(args.domain, args.ep)
    placement = plan_placement(load_LE, store.info.moe_layers, args.ep, domain, args.groups)
    placement.write(args.output)
    for name, parts in (("domains", args.ep // domain), ("ranks", args.ep)):
        if parts > 1:
            before = unevenness(load_LE, parts)
            after = unevenness(placement.loads(load_LE), parts)
            print(f"{parts} {name}, busiest by mean: {before:.3f} as they are, {after:.3f} placed")
    print(f"{args.output}: import the weights with --hf-placement {args.output}")
    return 0
