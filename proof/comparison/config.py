"""The config of one run, as `megatron-r3 rl run` takes it, and its prompts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from megatron_r3.cpu import CPU_ARGS
from proof.comparison.arms import Run, dtype_of
from proof.comparison.policy import MODEL, ROOT, UPDATE, StartingPolicy
from proof.comparison.task import MAX_ANSWER, write_prompts

PROMPTS, SAMPLES, MINI_STEPS = 8, 8, 2
CHECKPOINT_EVERY = 20  # collections
FIRST_PROMPT, EACH_SEED = 50_000_000, 1_000_000  # far from the problems of the first training
CONFIG = """# megatron-r3 rl run {name}.toml
[run]
directory = "{name}"
collections = {collections}
lag = {lag}
seed = {seed}
wait = 600
restarts = 0                     # a part that dies shall be looked at

[policy]
model = "{model}"
checkpoint = "{checkpoint}"
keep = {keep}

[sampler]
port = {port}
max_tokens = {max_tokens}

[prompts]
file = "prompts-{seed}.jsonl"
per_collection = {prompts}
samples = {samples}
reward = "proof.comparison.task:reward"

[trainer]
megatron = "{megatron}"
launch = ["{python}"]            # one process, without torchrun
script = "-m megatron_r3.cpu {root}/megatron_r3/train/pretrain_gpt.py"
steps = {steps}
checkpoint_every = {checkpoint_every}
arguments = [
    {arguments}
]

[trainer.environment]
OMP_NUM_THREADS = "1"

[degrade]
{degrade}
"""


def write_config(
    folder: Path, run: Run, start: StartingPolicy, python: str, port: int, collections: int
) -> Path:
    """Write the config of a run and its prompts into a folder that all arms of a regime share.

    Args:
        folder: of the regime; the config of `noise/r3-0` is `r3-0.toml` in it.
        run: the arm, with its regime and seed.
        start: the policy with which all runs begin.
        python: that runs the trainer.
        port: of the sampler, which no other run has.
        collections: how many.

    Returns:
        The path of the config. The run's directory lies beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The same prompts in every arm: what differs between two arms of a seed is the arm.
    first = FIRST_PROMPT + run.seed * EACH_SEED
    # With a lag policy 0 samples lag + 1 collections, which `rl run` wants to be different prompts.
    count = max(collections, run.regime.lag + 1) * PROMPTS
    write_prompts(folder / f"prompts-{run.seed}.jsonl", count, first)
    name = run.key.rpartition("/")[2]
    groups = (CPU_ARGS, MODEL, UPDATE, ["--seed", str(run.seed + 1)])
    texts = [shlex.join(group) for group in groups] + [run.arm.arguments]
    file = folder / f"{name}.toml"
    file.write_text(
        CONFIG.format(
            name=name,
            collections=collections,
            lag=run.regime.lag,
            seed=run.seed,
            model=start.hf(dtype_of(run)),
            checkpoint=start.checkpoint,
            keep=run.regime.lag + 1 + CHECKPOINT_EVERY,
            port=port,
            max_tokens=MAX_ANSWER,
            prompts=PROMPTS,
            samples=SAMPLES,
            megatron=start.megatron,
            python=python,
            root=ROOT,
            steps=MINI_STEPS,
            checkpoint_every=CHECKPOINT_EVERY,
            arguments=",\n    ".join(map(json.dumps, texts)),
            degrade=run.regime.degrade,
        )
    )
    return file
