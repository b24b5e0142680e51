"""The commands `megatron-r3 rollouts convert ...`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_r3.rollouts.arguments import Commands, add_model, add_reward, add_shard_size

__all__ = ["add_convert"]


def add_convert(commands: Commands[argparse.ArgumentParser]) -> None:
    """Register `convert` and its three ways."""
    text = "from recorded responses to a store; between a store and parquet"
    convert = commands.add_parser("convert", help=text, description=text)
    ways = convert.add_subparsers(required=True, metavar="WAY")

    text = "write a store of recorded responses, JSON lines {request, response, reward?, group?}"
    parser = ways.add_parser("responses", help=text, description=text)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a new store")
    parser.add_argument("--engine", required=True, choices=("vllm", "sglang"))
    parser.add_argument("--engine-version", default="unknown", metavar="V")
    add_model(parser)
    add_reward(parser, required=False)
    add_shard_size(parser)
    text = "leave out what cannot be decoded, and say so"
    parser.add_argument("--skip-refused", action="store_true", help=text)
    parser.set_defaults(run=run_responses)

    text = "write all but the routes of a store as a table, a row a rollout"
    parser = ways.add_parser("to-parquet", help=text, description=text)
    parser.add_argument("store", type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    parser.set_defaults(run=run_to_parquet)

    text = "write a new store: the old one, with the rewards of a table"
    parser = ways.add_parser("from-parquet", help=text, description=text)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--store", required=True, type=Path, metavar="DIR", help="the old one")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the new one")
    parser.set_defaults(run=run_from_parquet)


def run_responses(args: argparse.Namespace) -> int:
    """Say how many rollouts the new store has, and what was left out."""
    from megatron_r3.rollouts.convert import Recording, convert_responses
    from megatron_r3.rollouts.memory import keep_freed_memory
    from megatron_r3.rollouts.model import read_model
    from megatron_r3.rollouts.reward import load_reward

    keep_freed_memory()
    recording = Recording(
        path=args.file,
        engine=args.engine,
        engine_version=args.engine_version,
        model=read_model(args.model),
        policy_version=args.policy_version,
        reward=load_reward(args.reward) if args.reward else None,
    )
    count, skipped = convert_responses(recording, args.out, args.shard_size, args.skip_refused)
    for why in skipped:
        print(f"left out: {why}", file=sys.stderr)
    left_out = f"; lines left out: {len(skipped)}" if skipped else ""
    print(f"{args.out} has {count} rollouts{left_out}")
    return 0


def run_to_parquet(args: argparse.Namespace) -> int:
    """Say how many rows the table has."""
    from megatron_r3.rollouts.parquet import to_parquet

    print(f"{args.out} has {to_parquet(args.store, args.out)} rollouts")
    return 0


def run_from_parquet(args: argparse.Namespace) -> int:
    """Say how many rewards are new."""
    from megatron_r3.rollouts.parquet import from_parquet

    changed = from_parquet(args.file, args.store, args.out)
    print(f"{args.out} has the rollouts of {args.store}; rewards that changed: {changed}")
    return 0
