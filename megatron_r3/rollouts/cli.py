"""The commands `megatron-r3 rollouts ...`; what they need is imported when they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
    from megatron_r3.rollouts.prompts import read_prompts
    from megatron_r3.rollouts.requests import Sampling
    from megatron_r3.rollouts.resume import keep_freed_memory
    from megatron_r3.rollouts.reward import load_reward
    from megatron_r3.rollouts.server import Server
    from megatron_r3.rollouts.verify import read_model

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

    from megatron_r3.rollouts.inspect import histogram, inspect_store, table, warnings_of
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
    from megatron_r3.rollouts.verify import measure_agreement, warnings_of

    warnings = []
    for directory, store in zip(args.stores, stores, strict=True):
        store["agreement"] = measure_agreement(directory, args.model, args.agreement)
        warnings += warnings_of(directory, store["agreement"], store["moe_layers"])
    return warnings


def run_verify(args: argparse.Namespace) -> int:
    """Print a line for each store that is whole."""
    from megatron_r3.rollouts.verify import read_model, verify_store
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


# The commands `megatron-r3 rollouts convert ...`.


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
    from megatron_r3.rollouts.resume import keep_freed_memory
    from megatron_r3.rollouts.reward import load_reward
    from megatron_r3.rollouts.verify import read_model

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


# Arguments that several of the commands take.

Commands = argparse._SubParsersAction  # what add_parser is a method of


def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], float]:
    """An argument's type: a number of one kind inside limits."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or value == float("inf"):
            raise ValueError(text)
        return value  # type: ignore[no-any-return]

    limit = f" to {most:g}" if most != float("inf") else " up"
    parse.__name__ = f"{'number' if kind is float else 'whole number'} (from {least:g}{limit})"
    return parse


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The model that sampled."""
    text = "a transformers directory, or its config.json: then without digests of its weights"
    parser.add_argument("--model", required=required, type=Path, metavar="HF_DIR", help=text)


def add_reward(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The function that rewards, and the policy version it is stored with."""
    text = "function(sample) -> float"
    parser.add_argument("--reward", required=required, metavar="MODULE:FUNCTION", help=text)
    parser.add_argument(
        "--policy-version", type=number(int, 0, 2**63 - 1), default=0, metavar="N",
        help="of the weights that sample (default: 0)",
    )  # fmt: skip


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """How many rollouts a shard has."""
    text = "rollouts of a shard, or more: groups stay whole (default: 128)"
    parser.add_argument("--shard-size", type=number(int, 1), default=128, metavar="N", help=text)
