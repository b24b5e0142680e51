"""Rollouts from a real vLLM server, by a collection that is killed half-way and started again.

    python -m demo.collect_vllm --model DIR --out build/collected

The model is any transformers MoE directory that vLLM runs on the CPU. What is printed at the end
is what `megatron-r3 rollouts inspect` says of the store.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from demo import task
from demo.vllm_install import BUILD
from demo.vllm_server import serve
from megatron_r3.rollouts.reward import RewardSample

ROOT = Path(__file__).parents[1]
NUM_PROMPTS, SAMPLES = 64, 4


def reward(sample: RewardSample) -> float:
    """The demo's: share of the answer's positions that are right."""
    return task.reward(sample.prompt_tokens, sample.response_tokens)


def main() -> int:
    """Serve, collect, kill, collect again, verify, inspect; 0 if every rollout is there once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--build", type=Path, default=BUILD, help="where vLLM is installed")
    args = parser.parse_args()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)
    prompts, store = args.out / "prompts.jsonl", args.out / "rollouts"
    task.write_prompts(prompts, NUM_PROMPTS, 10_000_000)
    collect = [*_command("collect"), "--engine", "vllm", "--prompts", str(prompts), "--n"]
    collect += [str(SAMPLES), "--reward", "demo.collect_vllm:reward", "--model", str(args.model)]
    collect += ["--out", str(store), "--max-tokens", "32", "--seed", "1", "--shard-size", "32"]
    with serve(args.model, args.build) as url:
        collect += ["--url", url]
        with subprocess.Popen(collect, env=_environment()) as process:
            while process.poll() is None and len([*store.glob("shard-*.safetensors")]) < 4:
                time.sleep(0.01)
            process.kill()
        print(f"killed: {process.returncode}; {len([*store.glob('shard-*')])} shards", flush=True)
        subprocess.run(collect, env=_environment(), check=True)
        subprocess.run(collect, env=_environment(), check=True)
    verify = [*_command("verify"), str(store), "--model", str(args.model)]
    subprocess.run(verify, env=_environment(), check=True)
    return subprocess.run([*_command("inspect"), str(store)], env=_environment()).returncode


def _command(name: str) -> list[str]:
    return [sys.executable, "-m", "megatron_r3.cli", "rollouts", name]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    sys.exit(main())
