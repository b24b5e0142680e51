"""The command `megatron-r3 rollouts record`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from megatron_r3.collect.rollouts_cli import COLLECT, number, run_collect

if TYPE_CHECKING:
    from megatron_r3.collect.prompt_plan import Model, Sampling
    from megatron_r3.collect.reward import RewardFunction
    from megatron_r3.collect.server import Server


# options that mean what they mean for `collect`
_AS_COLLECT = (
    *("--policy-version", "--model", "--max-tokens", "--temperature", "--top-p", "--top-k"),
    *("--moe-layers", "--num-experts", "--topk", "--concurrency", "--timeout", "--retries"),
)
_SESSION_TIMEOUT: dict[str, Any] = {"type": number(float, 0.1), "default": 3600.0, "metavar": "S"}


def add_record(commands: Any) -> None:
    """Register `rollouts record`; `commands` are those of `rollouts`."""
    _add_agents(commands.choices["collect"])
    rows = {name: (text, given) for name, text, given in COLLECT[1:]}
    summary = (
        "serve the OpenAI API in front of an engine, and record what agents ask and get: each "
        "session becomes rollouts with routes once it is rewarded"
    )
    parser = commands.add_parser("record", help=summary, description=summary)
    parser.set_defaults(run=run_record)
    add = parser.add_argument
    add("--engine", required=True, choices=("vllm", "sglang", "megatron"),
        help="the kind of server at --url")  # fmt: skip
    add("--url", required=True, help=rows["--url"][0])
    add("--out", help=rows["--out"][0], **rows["--out"][1])
    add("--host", default="127.0.0.1", help="address to serve at (default: 127.0.0.1)")
    add("--port", type=number(int, 0, 65535), default=8100, metavar="P",
        help="port to serve at; 0 takes a free one (default: 8100)")  # fmt: skip
    add("--reward", metavar="MODULE:FUNCTION",
        help="function that rewards a rollout of a session that ends without a reward; it takes a "
        "RewardSample; its fields have all messages")  # fmt: skip
    add("--sessions", type=number(int, 1), default=256, metavar="N",
        help="sessions that may be open at a time (default: 256)")  # fmt: skip
    add("--session-timeout", **_SESSION_TIMEOUT,
        help="seconds after which a session without a request ends: --reward rewards it, or it is "
        "named and left out (default: 3600)")  # fmt: skip
    add("--train-shared", choices=("once", "all"), default="once",
        help="whether what several branches of a session share is trained in the first branch or "
        "in all of them (default: once)")  # fmt: skip
    for option in _AS_COLLECT:
        add(option, help=rows[option][0], **rows[option][1])


def _add_agents(collect: argparse.ArgumentParser) -> None:
    """Give `rollouts collect` the options that run agents."""
    collect.set_defaults(run=_run_collect)
    collect.add_argument("--agent", metavar="MODULE:FUNCTION",
        help="async function that takes an AsyncOpenAI client and the prompt's line, talks to the "
        "model, and returns the reward")  # fmt: skip
    collect.add_argument("--environment", metavar="verifiers:NAME",
        help="run the rollouts of this environment of the library verifiers; its dataset takes the "
        "place of --prompts")  # fmt: skip
    collect.add_argument("--session-timeout", **_SESSION_TIMEOUT,
        help="seconds without a request after which an agent is cancelled; its sample is named and "
        "left out (default: 3600)")  # fmt: skip


def _run_collect(args: argparse.Namespace) -> int:
    if not args.agent and not args.environment:
        return run_collect(args)
    if args.engine == "transformers":
        raise ValueError("agents ask a server: give --engine vllm, sglang or megatron")
    if args.agent and args.environment:
        raise ValueError("--agent and --environment: give one of the two")
    if args.environment and args.prompts:
        raise ValueError("--environment has prompts of its own: leave --prompts out")

    def plan() -> Any:
        from megatron_r3.collect.reward import load_reward
        from megatron_r3.record.agent_sampler import sampler_of
        from megatron_r3.record.chat_template import ChatTemplate
        from megatron_r3.record.environment import load_environment

        prompts = None
        if args.environment:
            agent, prompts = load_environment(args.environment)
        else:
            agent = load_reward(args.agent, option="--agent")
        template = ChatTemplate(args.model)
        return sampler_of(agent, template, idle_s=args.session_timeout), prompts

    return run_collect(args, plan)


def run_record(args: argparse.Namespace) -> int:
    """Record until a signal comes, then say how many rollouts were stored."""
    from megatron_r3.collect.client import Client
    from megatron_r3.collect.prompt_plan import Sampling, read_model, sampling_for
    from megatron_r3.collect.reward import load_reward
    from megatron_r3.collect.server import Server

    sampling = Sampling(args.max_tokens, args.temperature, args.top_p, args.top_k)
    sampling = sampling_for(args.engine, sampling)
    reward = load_reward(args.reward) if args.reward else None
    model = read_model(
        args.model, moe_layers=args.moe_layers, num_experts=args.num_experts, topk=args.topk
    )
    concurrency = args.concurrency or args.sessions
    client = Client(args.url, concurrency, args.timeout, args.retries, 0.5)
    engine = Server(args.engine, client, model.shape, sampling)
    return asyncio.run(_record(args, engine, model, sampling, reward))


async def _record(
    args: argparse.Namespace,
    engine: Server,
    model: Model,
    sampling: Sampling,
    reward: RewardFunction | None,
) -> int:
    from megatron_r3.collect.signals import Interrupted, noting
    from megatron_r3.record.chat_template import ChatTemplate
    from megatron_r3.record.record_server import make_app, open_port, serve_app
    from megatron_r3.record.recorder import recording

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    listening = open_port(args.host, args.port)
    with noting() as stop:
        async with recording(
            engine=engine,
            template=ChatTemplate(args.model),
            model=model,
            sampling=sampling,
            out=args.out,
            policy_version=args.policy_version,
            reward=reward,
            most_sessions=args.sessions,
            idle_s=args.session_timeout,
            all_turns=args.train_shared == "all",
            say=say,
        ) as recorder:
            host, port = listening.getsockname()[:2]
            print(f"recording at http://{host}:{port}/v1 into {args.out}", flush=True)
            app = make_app(recorder, sampling, args.engine, model.name)
            gc.freeze()  # what was imported stays: the collector need not go through it again
            with suppress(Interrupted):
                await stop.first(serve_app(recorder, app, listening))
    print(f"{args.out}: {recorder.stored} new rollouts")
    return 0
