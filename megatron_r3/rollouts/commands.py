"""The commands `megatron-r3 rollouts ...`; what they need is imported when they run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["add_rollouts"]


def add_rollouts(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `rollouts` and its commands; each sets `run`, which takes the parsed arguments."""
    text = "collect rollouts from an engine, look at them, check and convert them"
    parser = subparsers.add_parser("rollouts", help=text, description=text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_collect(commands)


def _number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], float]:
    """An argument's type: a number of one kind inside limits."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise ValueError(text)
        return value  # type: ignore[no-any-return]

    limit = f" to {most:g}" if most != float("inf") else " up"
    parse.__name__ = f"{'number' if kind is float else 'whole number'} from {least:g}{limit}:"
    return parse


def _add_collect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    add("--n", required=True, type=_number(int, 1), help="samples of each prompt")
    add("--reward", required=True, metavar="MODULE:FUNCTION", help="function(sample) -> float")
    _add_model(parser)
    add("--policy-version", type=_number(int, 0), default=0, metavar="N", help="default: 0")
    add("--max-tokens", type=_number(int, 1), default=1024, help="of a response (default: 1024)")
    add("--temperature", type=_number(float, 0), default=1.0, help="default: 1")
    add("--top-p", type=_number(float, 0, 1), default=1.0, help="default: 1")
    add("--seed", type=int, help="gives each sample a seed of its own (default: the engine's)")
    _add_shard_size(parser)
    add("--concurrency", type=_number(int, 1), default=32, help="requests at a time (default: 32)")
    add("--timeout", type=_number(float, 0.001), default=600.0, help="seconds (default: 600)")
    add("--retries", type=_number(int, 0), default=6, help="after no answer (default: 6)")
    add("--retry-pause", type=_number(float, 0), default=0.5, help="first one (default: 0.5 s)")
    text = "after a response that cannot be used (default: 2)"
    add("--refused-retries", type=_number(int, 0), default=2, help=text)
    parser.set_defaults(run=run_collect)


def _add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    text = "a transformers directory, or its config.json: then without router fingerprint"
    parser.add_argument("--model", required=required, type=Path, metavar="HF_DIR", help=text)


def _add_shard_size(parser: argparse.ArgumentParser) -> None:
    text = "rollouts of a shard (default: 128)"
    parser.add_argument("--shard-size", type=_number(int, 1), default=128, metavar="N", help=text)


def run_collect(args: argparse.Namespace) -> int:
    """Collect, then say what the store has."""
    from megatron_r3.rollouts.collect import Interrupted, Plan, collect
    from megatron_r3.rollouts.dialects import Sampling
    from megatron_r3.rollouts.model import read_model
    from megatron_r3.rollouts.prompts import read_prompts
    from megatron_r3.rollouts.reward import load_reward
    from megatron_r3.rollouts.server import Server

    server = Server(
        args.engine, args.url, args.concurrency, args.timeout, args.retries, args.retry_pause
    )
    plan = Plan(
        prompts=read_prompts(args.prompts),
        n=args.n,
        sampling=Sampling(args.max_tokens, args.temperature, args.top_p, args.seed),
        reward=load_reward(args.reward),
        model=read_model(args.model),
        out=args.out,
        policy_version=args.policy_version,
        shard_size=args.shard_size,
        refused_retries=args.refused_retries,
    )
    if not plan.model.router_fingerprint:
        print(f"{args.model} has no weights: no router fingerprint is stored", file=sys.stderr)
    try:
        done = collect(server, plan)
    except Interrupted as error:
        print(error, file=sys.stderr)
        return 128 + error.number
    except KeyboardInterrupt:  # before anything was sampled, or a second time
        print("interrupted", file=sys.stderr)
        return 130
    print(
        f"{args.out} has all {done.total} rollouts: {done.before} were there, {done.stored} new "
        f"({done.tokens} tokens; {done.retries} retries, {done.refused} responses refused)"
    )
    return 0
