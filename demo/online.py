"""The demo of the loop: a policy that learns from its own rollouts, without a framework.

    python -m demo.online --megatron TREE [--out DIR] [--seed N] [--agent]

A tiny Qwen3-MoE that sorts digits badly learns to sort them, or with --agent to call a tool that
sorts. `megatron-r3 rl run` starts a sampler, a collector and a trainer, which work in turn. Every
policy is verified before it samples.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from demo import sglang_server, task, tool_task, vllm_server
from demo.collect import ROOT
from demo.installation import ServerError
from demo.model import arguments
from demo.process import Failed
from demo.stages import WORLD_SIZE, Stages
from megatron_r3.loop.report import read_run
from megatron_r3.loop.run_directory import RunDirectory

COLLECTIONS, PROMPTS_PER_COLLECTION, SAMPLES = 28, 64, 8
MINI_STEPS = 4
EXAMINED = 8  # how many rollouts of each collection the truth test looks at
NUM_PROMPTS, FIRST_PROMPT = 4096, 20_000_000  # far from the problems of the first training
PORT = 31700
TEMPLATES = {"sglang": sglang_server.template, "vllm": vllm_server.template}
TRAINING = """
--bf16 --calculate-per-token-loss --adam-beta2 0.98
--lr 1.5e-4 --min-lr 2e-5 --lr-warmup-fraction 0.07 --lr-decay-style cosine
--moe-router-load-balancing-type none --expert-model-parallel-size 2
--moe-router-replay --moe-router-replay-verify-dispatch
--moe-router-replay-log-mismatch-interval 1
""".split()

CONFIG = """# megatron-r3 rl run {name}
[run]
directory = "run"
collections = {collections}   # how often: sample, train, publish
seed = {seed}

[policy]
model = "{start}/hf"                  # transformers: config and tokenizer of every policy
checkpoint = "{start}/checkpoint"     # Megatron: where training begins

[sampler]
{sampler}
max_tokens = {max_tokens}
examine = {examined}                  # rollouts that the truth test looks at before they are stored

[prompts]
file = "prompts.jsonl"
per_collection = {per_collection}
samples = {samples}
{reward}

[trainer]
megatron = "{megatron}"
script = "-m megatron_r3.cpu {root}/demo/pretrain.py"   # on GPUs: a script that calls pretrain()
processes = {processes}
steps = {steps}                             # optimizer steps on a collection
checkpoint_every = 10                 # collections from one checkpoint to the next
arguments = {arguments}

[trainer.environment]
OMP_NUM_THREADS = "1"
"""


class Places(NamedTuple):
    """The paths that a config names, as the config spells them.

    Attributes:
        start: the folder that has the policy of the start: hf/ and checkpoint/.
        megatron: a patched tree.
        root: the folder that has demo/.
    """

    start: str
    megatron: str
    root: str


def write_config(
    file: Path, places: Places, sampler: str, seed: int, collections: int, agent: bool = False
) -> None:
    """Write the config of a run, whole or not at all, and prompts.jsonl beside it."""
    out = file.parent
    out.mkdir(parents=True, exist_ok=True)
    of_task, reward, prompts = task, 'reward = "demo.task:reward"', PROMPTS_PER_COLLECTION
    if agent:
        of_task, reward = tool_task, '\n[collector]\nagent = "demo.tool_task:solve"'
        prompts //= 2  # of as many tokens in all
    of_task.write_prompts(out / "prompts.jsonl", NUM_PROMPTS, FIRST_PROMPT + seed * NUM_PROMPTS)
    size = prompts * SAMPLES // MINI_STEPS
    batch = ["--global-batch-size", str(size), "--rollouts-mini-steps", str(MINI_STEPS)]
    batch += ["--micro-batch-size", str(size // WORLD_SIZE)]
    batch += ["--seed", str(seed + 1), "--seq-length", str(of_task.SEQ_LENGTH)]
    written = file.with_name(f".{file.name}")
    written.write_text(
        CONFIG.format(
            name=file.name,
            collections=collections,
            seed=seed,
            start=places.start,
            sampler=sampler,
            max_tokens=of_task.MAX_ANSWER,
            examined=EXAMINED,
            per_collection=prompts,
            samples=SAMPLES,
            reward=reward,
            megatron=places.megatron,
            root=places.root,
            processes=WORLD_SIZE,
            steps=MINI_STEPS,
            arguments=json.dumps([shlex.join(arguments(TRAINING, batch))]),
        )
    )
    written.rename(file)


def sampler_fields(sampler: str, model: Path) -> str:
    """The fields of [sampler] that say which engine samples, and how it is started."""
    if sampler == "transformers":
        return f"port = {PORT}"
    in_place = sampler == "sglang"  # on a CPU, vLLM loads new weights wrongly in place
    command, environment = TEMPLATES[sampler](model, in_place=in_place)
    pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in environment.items())
    return (
        f'engine = "{sampler}"\nport = {PORT}\nin_place = {json.dumps(in_place)}\n'
        f"command = {json.dumps(command)}\nenvironment = {{ {pairs} }}\nconcurrency = 32"
    )


def make_way(config: Path, page: Path) -> None:
    """Remove an older page, and the run beside the config if it is not a run of this config.

    A run of this config goes on, also if the config has more collections than the run had.
    """
    page.unlink(missing_ok=True)
    run = RunDirectory(config.parent / "run")
    try:
        run.keep_config(config)
    except ValueError:
        what = "which is a run of another config (seed, sampler, ...)"
        print(f"removing {run.path}, {what}", flush=True)
        shutil.rmtree(run.path)


def measured(run: Path) -> dict[str, Any]:
    """What a run measured: lists with a value for each collection, push or step."""
    events = [
        json.loads(line) for line in (run / "events/collector.jsonl").read_text().splitlines()
    ]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    pushed = [event for event in events if event["event"] == "pushed"]
    collected = [event for event in events if event["event"] == "collected"]
    return {
        "reward": [event["reward"] for event in collected],
        "length_cut": [event["length_cut"] for event in collected],
        "turns": [event["turns"] for event in collected],
        "verified": sorted({event["version"] for event in pushed if event["verified"]}),
        "pushes": [event["abs_dlogp"] for event in pushed],
        "mismatch": [event["mismatch"] for event in events if event["event"] == "examined"],
        "dispatched": [step["routes dispatched as recorded"] for step in steps],
        "k3_kl": [step["update/sampler k3 kl"] for step in steps],
    }


def thirds(values: list[float]) -> list[float]:
    """The means of the first, the middle and the last third of some values."""
    third = len(values) // 3
    middle = values[third:-third]
    return [float(np.mean(part)) for part in (values[:third], middle, values[-third:])]


ROWS = {
    "reward": "reward",
    "length_cut": "responses cut off",
    "turns": "turns of a rollout",
    "pushes": "|dlogp| of the push",
    "mismatch": "router mismatch, truth test",
    "k3_kl": "k3 KL, sampler to trainer",
}


def table(numbers: dict[str, Any]) -> str:
    """The table of the means over the first, the second and the last third of the run."""
    lines = [f"{'':28} {'first third':>12} {'second':>12} {'last third':>12}"]
    for name, words in ROWS.items():
        means = "".join(f" {value:12.4f}" for value in thirds(numbers[name]))
        lines.append(f"{words:28}{means}")
    return "\n".join(lines)


def failures(numbers: dict[str, Any], collections: int) -> list[str]:
    """What is wrong with a run whose parts all ended with status 0, a line for each fault."""
    found = []
    if numbers["verified"] != [*range(collections)]:
        found.append(f"of policies 0 to {collections - 1} only {numbers['verified']} were verified")
    if len(numbers["mismatch"]) < collections:
        found.append(f"{len(numbers['mismatch'])} collections were examined, not {collections}")
    if (least := min(numbers["dispatched"])) < 1:
        found.append(f"only {least:.4f} of a step's routes were dispatched as recorded")
    return found


def run(args: argparse.Namespace) -> int:
    """Run the loop; return 0, the status of a command that failed, or 1 for any other fault."""
    out = args.out.resolve()
    # the starting policy is that of `make demo`, made once for both; an agent has another task
    name = "demo-agent" if args.agent else "demo"
    start = Stages(out.parent / name, args.megatron.resolve(), "transformers", agent=args.agent)
    try:
        start.pretrain()
        start.export()
        fields = sampler_fields(args.sampler, start.hf)
    except (Failed, ServerError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    config, page = out / "online.toml", out / "report.html"
    places = Places(str(start.out), str(start.megatron), str(ROOT))
    write_config(config, places, fields, args.seed, args.collections, args.agent)
    make_way(config, page)
    rl = [sys.executable, "-m", "megatron_r3.cli", "rl"]
    if status := subprocess.run([*rl, "run", str(config)], check=False, cwd=ROOT).returncode:
        return status
    times = [event["time"] for event in read_run(out / "run", "run").events]
    # if the run was stopped and continued, the seconds include the pause
    numbers = {**measured(out / "run"), "seconds": round(max(times) - min(times))}
    (out / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n")
    report = [*rl, "report", str(out / "run"), "--out", str(page)]
    if status := subprocess.run(report, check=False, cwd=ROOT).returncode:
        return status
    print(f"\n{table(numbers)}\n\ntime: {numbers['seconds']} s; config: {config}; page: {page}")
    wrong = failures(numbers, args.collections)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    """Run the demo; return the status of `run`, or 130 if a signal stops it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", type=Path, required=True, help="a patched tree")
    parser.add_argument("--out", type=Path, default=Path("build/online"))
    parser.add_argument("--sampler", choices=("transformers", *TEMPLATES), default="transformers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--collections", type=int, default=COLLECTIONS)
    parser.add_argument("--agent", action="store_true", help="the policy may call a tool")
    args = parser.parse_args()
    if args.collections < 3:
        parser.error("--collections must be 3 or more: the thirds of a run are compared")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop as on ctrl-C
    try:
        return run(args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
