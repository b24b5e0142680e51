"""The commands `megatron-r3 rollouts ...`.

The parser is built without torch, numpy and aiohttp, which would make `megatron-r3 --help` slow.
Each command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_r3.balance.balance_cli import add_balance
from megatron_r3.collect.show import run_show
from megatron_r3.replay.words import one_line

if TYPE_CHECKING:
    from megatron_r3.collect.collect import MakeSampler
    from megatron_r3.collect.engine import Engine
    from megatron_r3.collect.prompt_plan import Plan
    from megatron_r3.collect.prompts import Prompt

    AgentPlan = Callable[[], tuple[MakeSampler, list[Prompt] | None]]

Commands = argparse._SubParsersAction  # the type of what `add_subparsers` returns
CONCURRENCY = {"vllm": 32, "sglang": 32, "megatron": 32, "transformers": 256}
Row = tuple[str, str, dict[str, Any]]  # an option or argument: its name, help, and settings


def add_rollouts(
    subparsers: Commands[argparse.ArgumentParser],
) -> Commands[argparse.ArgumentParser]:
    """Register `rollouts` and its commands; each command sets `args.run` to its function.

    Returns:
        The commands of `rollouts`, to which others are added.
    """
    summary = "collect rollouts from an engine, inspect, verify, show and convert them"
    parser = subparsers.add_parser("rollouts", help=summary, description=summary)
    parser.set_defaults(group=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    add_command(commands, "collect", run_collect, *COLLECT)
    add_command(commands, "inspect", run_inspect, *_INSPECT)
    add_command(commands, "verify", run_verify, *_VERIFY)
    add_command(commands, "show", run_show, *_SHOW)
    add_balance(commands, number)
    summary = "make a store from recorded responses, or a parquet table from a store and back"
    convert = commands.add_parser("convert", help=summary, description=summary)
    convert.set_defaults(group=convert)
    kinds = convert.add_subparsers(metavar="KIND")
    add_command(kinds, "responses", run_responses, *_RESPONSES)
    add_command(kinds, "to-parquet", run_to_parquet, *_TO_PARQUET)
    add_command(kinds, "from-parquet", run_from_parquet, *_FROM_PARQUET)
    return commands


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *rows: Row,
) -> None:
    """Register a command with its options."""
    parser = commands.add_parser(name, help=summary, description=summary)
    for option, text, settings in rows:
        parser.add_argument(option, help=text, **settings)
    parser.set_defaults(run=run)


def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], float]:
    """The type of an argument that is a number from `least` to `most`.

    argparse prints the function's name in its error: "invalid whole number (from 1 up) value: '0'".
    """

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or value == float("inf"):
            raise ValueError(text)
        return value  # type: ignore[no-any-return]

    limit = f" to {most:g}" if most != float("inf") else " up"
    parse.__name__ = f"{'number' if kind is float else 'whole number'} (from {least:g}{limit})"
    return parse


def run_collect(args: argparse.Namespace, agent: AgentPlan | None = None) -> int:
    """Collect, then print what the store has; after signal N the exit status is 128 + N.

    Args:
        agent: makes the sampler that runs agents, and the prompts if the agent brings its own. None
            has the engine answer each prompt of --prompts, as often as --n says.
    """
    from megatron_r3.collect.signals import Interrupted, raising

    try:
        with raising():
            return _collect(args, agent)
    except Interrupted as error:
        print(one_line(str(error)), file=sys.stderr)
        return 128 + error.number


def _collect(args: argparse.Namespace, agent: AgentPlan | None) -> int:
    from megatron_r3.collect.collect import collect
    from megatron_r3.collect.prompt_plan import Plan, Sampling, read_model, sampling_for
    from megatron_r3.collect.prompts import read_prompts
    from megatron_r3.collect.reward import load_reward
    from megatron_r3.collect.writing import keep_freed_memory

    keep_freed_memory()
    make_engine = _engine_maker(args)
    sampling = Sampling(args.max_tokens, args.temperature, args.top_p, args.top_k, args.seed)
    sampling = sampling_for(args.engine, sampling)
    make_sampler, prompts = agent() if agent is not None else (None, None)
    if prompts is None:
        prompts = read_prompts(_given(args.prompts, "--prompts FILE, the prompts as JSON lines"))
    if agent is None:
        _given(args.reward, f"--reward MODULE:FUNCTION, a {_REWARD}")
    reward = load_reward(args.reward) if args.reward else None
    model = read_model(args.model, **_shape_of(args))
    if not model.router_fingerprint:
        print(f"{args.model} has no weights: no digest of them is stored", file=sys.stderr)
    plan = Plan(
        prompts=prompts,
        n=args.n,
        sampling=sampling,
        reward=reward,
        model=model,
        out=args.out,
        policy_version=args.policy_version,
        shard_size=args.shard_size,
        refused_retries=args.refused_retries,
    )
    concurrency = args.concurrency or CONCURRENCY[args.engine]
    done = collect(make_engine(plan, concurrency), plan, concurrency, make_sampler=make_sampler)
    print(
        f"{args.out} has all {done.total} rollouts: {done.before} were there, {done.stored} new "
        f"({done.tokens} tokens; {done.retries} retries, {done.refused} responses refused)"
    )
    return 0


def _given(value: Any, missing: str) -> Any:
    if value is None:
        raise ValueError(f"collect needs {missing}")
    return value


def _shape_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `read_model` that --moe-layers, --num-experts and --topk give."""
    return {name: getattr(args, name) for name in ("moe_layers", "num_experts", "topk")}


def layers(text: str) -> tuple[int, ...]:
    """Hidden layers, counted from 0. Example: "1-3,7" is (1, 2, 3, 7)."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    if any(len(pair) > 2 or pair != sorted(pair) or pair[-1] >= 10_000 for pair in ends):
        raise ValueError(text)
    return tuple(sorted({number for a, *b in ends for number in range(a, (b or [a])[0] + 1)}))


layers.__name__ = 'list of layers, as in "1-3,7",'  # argparse prints it: invalid ... value


def _engine_maker(args: argparse.Namespace) -> Callable[[Plan, int], Engine]:
    """A function that makes the engine named by --engine, from a plan and a concurrency.

    A missing option or package is an error here, before prompts are read or weights digested.
    """
    if args.engine == "transformers":
        if args.url is not None:
            raise ValueError("--engine transformers samples in this process: leave --url out")
        from megatron_r3.collect.generate import Transformers

        return lambda plan, _: Transformers(args.model, plan.model.shape, plan.sampling)
    if args.url is None:
        raise ValueError(f"--engine {args.engine} asks a server: give its address as --url")
    from megatron_r3.collect.client import Client
    from megatron_r3.collect.server import Server

    def server(plan: Plan, concurrency: int) -> Server:
        client = Client(args.url, concurrency, args.timeout, args.retries, args.retry_pause)
        return Server(args.engine, client, plan.model.shape, plan.sampling)

    return server


def run_inspect(args: argparse.Namespace) -> int:
    """Print tables of the stores or, with --json, their numbers; --model adds the truth test.

    The exit status is 1 where --fail-on-alarm is given and there is an alarm.
    """
    import json

    from megatron_r3.collect.inspect import inspect_store, store_warnings, text_of

    for option, value in vars(args).items():
        if option in ("fail_on_alarm", "model_before") and value and not args.model:
            raise ValueError(
                f"--{option.replace('_', '-')} needs --model HF_DIR: without it there are no alarms"
            )
    stores = [inspect_store(directory) for directory in args.stores]
    warnings = [warning for store in stores for warning in store_warnings(store)]
    alarms, more, truths = _compare_with_model(args, stores) if args.model else ([], [], [])
    for warning in (*warnings, *more, *alarms):
        print(f"warning: {one_line(warning)}", file=sys.stderr)
    status = 1 if alarms and args.fail_on_alarm else 0
    if args.json:
        print(json.dumps(stores))
        return status
    print(text_of(stores))
    for truth in truths:
        print(f"\n{truth}")
    return status


def _compare_with_model(
    args: argparse.Namespace, stores: list[dict[str, Any]]
) -> tuple[list[str], list[str], list[str]]:
    """Add `agreement` and `truth` to each store's numbers; returns alarms, warnings, and texts."""
    from megatron_r3.collect.engine_agreement import compare_store
    from megatron_r3.data.store import RolloutStore
    from megatron_r3.data.truth import examine
    from megatron_r3.data.truth.mismatch_tables import mismatch_text

    alarms, warnings, texts = [], [], []
    for directory, numbers in zip(args.stores, stores, strict=True):
        store = RolloutStore([directory], mixed_policies=True)
        agreement = compare_store(store, args.model, args.agreement, args.model_before)
        report = examine(agreement.compared, store.info.moe_layers, model=str(args.model))
        numbers["agreement"] = agreement.numbers(report)
        numbers["truth"] = report.to_json()
        warnings += [f"{directory}: {agreement.note}"] if agreement.note else []
        alarms += [f"{directory}: {alarm}" for alarm in report.alarms]
        title = one_line(f"routes that differ from those of {args.model}, {directory}:")
        texts.append(f"{title}\n{mismatch_text(report.tables)}")
    return alarms, warnings, texts


def run_verify(args: argparse.Namespace) -> int:
    """Check the stores, and print a line for each; a ValueError ends the command."""
    from megatron_r3.collect.verify_store import read_policies, verify_store

    policies = read_policies(args.model, **_shape_of(args)) if args.model else None
    for directory in args.stores:
        text, warnings = verify_store(directory, policies)
        print(f"{one_line(str(directory))}: {text}")
        for warning in warnings:
            print(f"{one_line(str(directory))}: {warning}", file=sys.stderr)
    return 0


def run_responses(args: argparse.Namespace) -> int:
    """Convert responses; print how many rollouts the new store has, and what was left out."""
    from megatron_r3.collect.convert import Recording, convert_responses
    from megatron_r3.collect.prompt_plan import read_model
    from megatron_r3.collect.reward import load_reward
    from megatron_r3.collect.writing import keep_freed_memory

    keep_freed_memory()
    recording = Recording(
        path=args.file,
        engine=args.engine,
        engine_version=args.engine_version,
        model=read_model(args.model, **_shape_of(args)),
        policy_version=args.policy_version,
        reward=load_reward(args.reward) if args.reward else None,
    )
    done = convert_responses(recording, args.out, args.shard_size, args.skip_refused)
    count, skipped, notes = done
    for line in (*(f"left out: {reason}" for reason in skipped), *notes):
        print(line, file=sys.stderr)
    left_out = f"; lines left out: {len(skipped)}" if skipped else ""
    print(f"{args.out} has {count} rollouts{left_out}")
    return 0


def run_to_parquet(args: argparse.Namespace) -> int:
    """Write the table, and print how many rollouts it has."""
    from megatron_r3.collect.parquet import to_parquet

    print(f"{args.out} has {to_parquet(args.store, args.out)} rollouts")
    return 0


def run_from_parquet(args: argparse.Namespace) -> int:
    """Write the new store, and print how many rewards changed."""
    from megatron_r3.collect.parquet import from_parquet

    changed = from_parquet(args.file, args.store, args.out)
    print(f"{args.out} has the rollouts of {args.store}; rewards that changed: {changed}")
    return 0


_DIR: dict[str, Any] = {"type": Path, "metavar": "DIR"}
_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_HF_DIR: dict[str, Any] = {"type": Path, "metavar": "HF_DIR"}
_MUST = {"required": True}
_STORES: Row = ("stores", "rollout stores", {"nargs": "+", **_DIR})
_MODEL: Row = (
    "--model",
    "transformers directory of the model that sampled. For a server a config.json alone will do; "
    "then no digests of the weights are stored or compared",
    _MUST | _HF_DIR,
)
_SHAPE: tuple[Row, ...] = (
    ("--moe-layers",
     "the MoE layers of a model of an unknown type, counted from 0, for example 1-3,7",
     {"type": layers, "metavar": "LAYERS"}),
    ("--num-experts", "experts of each MoE layer, if the model's config.json does not say",
     {"type": number(int, 1), "metavar": "N"}),
    ("--topk", "experts of each token, if the model's config.json does not say",
     {"type": number(int, 1), "metavar": "N"}),
)  # fmt: skip
_REWARD = "function that takes a RewardSample and returns its reward, a number"
_VERSION = "version of the weights that sample (default: {})"
_SHARD_SIZE: Row = (
    "--shard-size",
    "rollouts of a shard; a few more if a group would be cut (default: 128)",
    {"type": number(int, 1), "default": 128, "metavar": "N"},
)
_WHOLE: dict[str, Any] = {"type": number(int, 0, 2**63 - 1), "metavar": "N"}

# The summary of each command, then its options.
COLLECT: tuple[Any, ...] = (
    "have an engine answer every prompt, reward each response, and store it exactly once; the same "
    "command goes on where a killed one stopped",
    ("--engine",
     "a vLLM, SGLang or Megatron server at --url, or transformers, which runs --model in this "
     "process", {"required": True, "choices": tuple(CONCURRENCY)}),
    ("--url", "address of the server, for example http://127.0.0.1:8000", {}),
    ("--prompts", "the prompts, JSON lines", _FILE),
    ("--out", "directory of the rollout store", _MUST | _DIR),
    ("--n", "samples of each prompt", _MUST | {"type": number(int, 1)}),
    ("--reward", _REWARD, {"metavar": "MODULE:FUNCTION"}),
    ("--policy-version", _VERSION.format(0), {"default": 0, **_WHOLE}),
    _MODEL,
    *_SHAPE,
    _SHARD_SIZE,
    ("--max-tokens", "the largest number of tokens of a response (default: 1024)",
     {"type": number(int, 1), "default": 1024}),
    ("--temperature",
     "divide the logits by this; for a server other values than 1 need --top-k (default: 1)",
     {"type": number(float, 0), "default": 1.0}),
    ("--top-p",
     "sample from the likeliest tokens that together have this probability, and store which they "
     "were; at a server only with --top-k (default: 1, all tokens)",
     {"type": number(float, 0, 1), "default": 1.0}),
    ("--top-k",
     "sample from so many of the likeliest tokens, and store which they were (default: 0, all)",
     {"type": number(int, 0), "default": 0}),
    ("--seed", "make each sample's seed from this (default: the engine chooses)", {"type": int}),
    ("--concurrency",
     "samples under way at a time (default: 32; transformers: 256, which run in batches)",
     {"type": number(int, 1)}),
    ("--timeout", "seconds that a request to a server may take (default: 600)",
     {"type": number(float, 0.001), "default": 600.0}),
    ("--retries",
     "how often a request is repeated after a connection error, a timeout, 429 or 5xx (default: 6)",
     {"type": number(int, 0), "default": 6}),
    ("--retry-pause",
     "seconds before the first repetition; the pause doubles each time (default: 0.5)",
     {"type": number(float, 0), "default": 0.5}),
    ("--refused-retries",
     "how often a sample is asked for again after a response that cannot be used (default: 2)",
     {"type": number(int, 0), "default": 2}),
)  # fmt: skip
_INSPECT: tuple[Any, ...] = (
    "show what stores hold: rollouts, rewards, lengths, sizes and the experts' load",
    _STORES,
    ("--model",
     "a transformers directory: run some rollouts through this model, and compare the routes",
     _HF_DIR),
    ("--agreement", "how many rollouts --model runs, spread over the store (default: 8)",
     {"type": number(int, 1), "default": 8, "metavar": "N"}),
    ("--model-before",
     "a transformers directory of the weights before the last update, to find rows that the engine "
     "computed with these weights", _HF_DIR),
    ("--fail-on-alarm", "exit with status 1 where --model raises an alarm",
     {"action": "store_true"}),
    ("--json", "print all numbers as JSON, with those of each layer", {"action": "store_true"}),
)  # fmt: skip
_SHOW: tuple[Any, ...] = (
    "show rollouts: prompt, response, reward, policy version, and missing routes",
    ("store", "the rollout store", _DIR),
    ("rollouts", "number of a rollout in the store, from 0 on (default: 0)",
     {"nargs": "*", "type": int, "default": [0], "metavar": "ROLLOUT"}),
    ("--model", "show the text, by this model's tokenizer", _HF_DIR),
)  # fmt: skip
_VERIFY: tuple[Any, ...] = (
    "check every byte and id of stores; with --model, also that this model sampled them",
    _STORES,
    ("--model",
     "transformers directory of the model that sampled, or a folder of published policies "
     "(v000000, v000001, ...): each rollout is checked with its own version", _HF_DIR),
    *_SHAPE,
)  # fmt: skip
_RESPONSES: tuple[Any, ...] = (
    "make a store from recorded responses: JSON lines {request, response, reward?, group?}",
    ("file", "the recorded responses", _FILE),
    ("--out", "the new store", _MUST | _DIR),
    ("--engine", "the engine that sampled the responses",
     {"required": True, "choices": ("vllm", "sglang", "megatron")}),
    ("--engine-version", "version of that engine", {"default": "unknown", "metavar": "V"}),
    _MODEL,
    *_SHAPE,
    ("--reward", _REWARD, {"metavar": "MODULE:FUNCTION"}),
    ("--policy-version",
     _VERSION.format("what the responses say, if it is a number; else 0"), _WHOLE),
    _SHARD_SIZE,
    ("--skip-refused",
     "leave out lines with a request or response that is refused, and print why",
     {"action": "store_true"}),
)  # fmt: skip
_TO_PARQUET: tuple[Any, ...] = (
    "write a store as a table without routes, a row for each rollout",
    ("store", "the store", _DIR),
    ("--out", "the new table", _MUST | _FILE),
)
_FROM_PARQUET: tuple[Any, ...] = (
    "write a new store: the old one with the rewards of a table",
    ("file", "the table", _FILE),
    ("--store", "the old store", _MUST | _DIR),
    ("--out", "the new store", _MUST | _DIR),
)
