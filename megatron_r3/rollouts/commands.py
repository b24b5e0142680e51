"""The commands `megatron-r3 rollouts ...`; what they need is imported when they run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_r3.rollouts.arguments import (
    Commands,
    add_model,
    add_reward,
    add_shard_size,
    number,
)
from megatron_r3.rollouts.convert_commands import add_convert

__all__ = ["add_rollouts"]


def add_rollouts(subparsers: Commands[argparse.ArgumentParser]) -> None:
    """Register `rollouts` and its commands; each sets `run`, which takes the parsed arguments."""
    text = "collect rollouts from an engine, look at them, check and convert them"
    parser = subparsers.add_parser("rollouts", help=text, description=text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_collect(commands)
    _add_inspect(commands)
    _add_verify(commands)
    add_convert(commands)


def _add_collect(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "sample every prompt from a vLLM or SGLang server, reward and store each response once"
    parser = commands.add_parser(
        "collect",
        help=text,
        description=f"{text}. Run again after a kill, it goes on where it stopped.",
    )
    add = parser.add_argument
    add("--engine", required=True, choices=("vllm", "sglang"))
    add("--url", required=True, help="of the server: http://127.0.0.1:8000")
    add("--prompts", required=True, type=Path, metavar="FILE", help="JSON lines")
    add("--out", required=True, type=Path, metavar="DIR", help="the rollout store")
    add("--n", required=True, type=number(int, 1), help="samples of each prompt")
    add_reward(parser)
    add_model(parser)
    add("--max-tokens", type=number(int, 1), default=1024, help="of a response (default: 1024)")
    add("--temperature", type=number(float, 0), default=1.0, help="default: 1")
    add("--top-p", type=number(float, 0, 1), default=1.0, help="default: 1")
    text = "sample from so many of the likeliest tokens (default: 0, all)"
    add("--top-k", type=number(int, 0), default=0, help=text)
    text = (
        "take another temperature, top-p or top-k than the defaults all the same. What is wrong "
        "with it: the policy loss takes all log-probs at temperature 1 over the whole vocabulary, "
        "so its ratio compares two distributions, and its gradient is biased"
    )
    add("--biased-sampling", action="store_true", help=text)
    add("--seed", type=int, help="gives each sample a seed of its own (default: the engine's)")
    add_shard_size(parser)
    add("--concurrency", type=number(int, 1), default=32, help="requests at a time (default: 32)")
    add("--timeout", type=number(float, 0.001), default=600.0, help="seconds (default: 600)")
    add("--retries", type=number(int, 0), default=6, help="after no answer (default: 6)")
    add("--retry-pause", type=number(float, 0), default=0.5, help="first one (default: 0.5 s)")
    text = "after a response that cannot be used (default: 2)"
    add("--refused-retries", type=number(int, 0), default=2, help=text)
    parser.set_defaults(run=run_collect)


def _add_inspect(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "say what stores hold: rollouts, rewards, lengths, sizes, how even the experts' load is"
    parser = commands.add_parser("inspect", help=text, description=text)
    parser.add_argument("stores", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--layers", action="store_true", help="the experts' load in each layer")
    text = "compare with transformers, which runs some of the rollouts with these weights"
    parser.add_argument("--model", type=Path, metavar="DIR", help=text)
    text = "how many, spread over the store (default: 8)"
    parser.add_argument("--agreement", type=number(int, 1), default=8, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="all of it, for programs")
    parser.set_defaults(run=run_inspect)


def _add_verify(commands: Commands[argparse.ArgumentParser]) -> None:
    text = "check every byte and id of stores, and with --model that they are of its router weights"
    parser = commands.add_parser("verify", help=text, description=text)
    parser.add_argument("stores", nargs="+", type=Path, metavar="DIR")
    add_model(parser, required=False)
    parser.set_defaults(run=run_verify)


def run_collect(args: argparse.Namespace) -> int:
    """Collect, then say what the store has."""
    from megatron_r3.rollouts.signals import Interrupted, raising
    from megatron_r3.untrusted import one_line

    try:
        with raising():
            return _collect(args)
    except Interrupted as error:
        print(one_line(str(error)), file=sys.stderr)
        return 128 + error.number


def _collect(args: argparse.Namespace) -> int:
    from megatron_r3.rollouts.collect import Plan, collect
    from megatron_r3.rollouts.dialects import Sampling
    from megatron_r3.rollouts.memory import keep_freed_memory
    from megatron_r3.rollouts.model import read_model
    from megatron_r3.rollouts.prompts import read_prompts
    from megatron_r3.rollouts.reward import load_reward
    from megatron_r3.rollouts.server import Server

    keep_freed_memory()
    server = Server(
        args.engine, args.url, args.concurrency, args.timeout, args.retries, args.retry_pause
    )
    plan = Plan(
        prompts=read_prompts(args.prompts),
        n=args.n,
        sampling=Sampling(args.max_tokens, args.temperature, args.top_p, args.top_k, args.seed),
        reward=load_reward(args.reward),
        model=read_model(args.model),
        out=args.out,
        policy_version=args.policy_version,
        shard_size=args.shard_size,
        refused_retries=args.refused_retries,
        biased_sampling=args.biased_sampling,
    )
    if not plan.model.router_fingerprint:
        print(f"{args.model} has no weights: no digest of them is stored", file=sys.stderr)
    done = collect(server, plan)
    print(
        f"{args.out} has all {done.total} rollouts: {done.before} were there, {done.stored} new "
        f"({done.tokens} tokens; {done.retries} retries, {done.refused} responses refused)"
    )
    return 0


def run_inspect(args: argparse.Namespace) -> int:
    """Print a table of the stores, then how their routes are spread."""
    import json

    from megatron_r3.rollouts.inspect import inspect_store, warnings_of
    from megatron_r3.rollouts.table import histogram, table
    from megatron_r3.untrusted import one_line

    stores = [inspect_store(directory) for directory in args.stores]
    warnings = [warning for store in stores for warning in warnings_of(store)]
    warnings += _agreement(args, stores) if args.model else []
    for warning in warnings:
        print(f"warning: {one_line(warning)}", file=sys.stderr)
    if args.json:
        print(json.dumps(stores))
        return 0
    print(table(stores))
    for store in stores:
        print(f"\nrows of each expert, {one_line(store['directory'])}:")
        print(histogram(store, args.layers, sys.stdout.encoding or ""))
    return 0


def _agreement(args: argparse.Namespace, stores: list[dict[str, Any]]) -> list[str]:
    from megatron_r3.rollouts.agreement import measure_agreement, warnings_of

    warnings = []
    for directory, store in zip(args.stores, stores, strict=True):
        store["agreement"] = measure_agreement(directory, args.model, args.agreement)
        warnings += warnings_of(directory, store["agreement"], store["moe_layers"])
    return warnings


def run_verify(args: argparse.Namespace) -> int:
    """Print a line for each store that is whole."""
    from megatron_r3.rollouts.model import read_model
    from megatron_r3.rollouts.verify import verify_store
    from megatron_r3.untrusted import one_line

    model = read_model(args.model) if args.model else None
    for directory in args.stores:
        store = verify_store(directory, model)
        name = one_line(str(directory))
        what = "every byte and id"
        if model is not None:
            stamped = model.router_fingerprint and store.info.router_fingerprint
            what += f", {one_line(model.name)}'s shape"
            whole = model.policy_stamp and store.info.policy_stamp
            what += (" and weights" if whole else " and router weights") if stamped else ""
        print(f"{name}: {len(store)} rollouts in {len(store.shards)} shards, {what}")
        if model is not None and not stamped:
            print(f"{name}: router weights not compared: no fingerprint", file=sys.stderr)
    return 0
