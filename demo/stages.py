"""The demo's stages, each from files to files; a finished one is not done again."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from demo import process, task
from demo.model import GRPO, MODEL, PRETRAIN, arguments
from megatron_r3.engines.conversation import Sample, read_samples, read_source
from megatron_r3.fingerprint import router_fingerprint
from megatron_r3.rollouts.convert import to_rollout
from megatron_r3.store import Rollout, StoreInfo, write_shard

ROOT = Path(__file__).parents[1]
NUM_PROMPTS, SAMPLES_PER_PROMPT, WORLD_SIZE = 64, 8, 2
FIRST_PROMPT = 10_000_000  # far from the problems of the training
SAMPLERS = {"transformers": "demo.hf_sampler", "vllm": "demo.vllm_server"}


class Stages:
    """Where everything lies, and how it is made.

    Args:
        out: `build/demo`.
        megatron: a patched tree.
        sampler: a name in SAMPLERS.
    """

    def __init__(self, out: Path, megatron: Path, sampler: str) -> None:
        self.out, self.megatron, self.sampler = out, megatron, sampler
        self.checkpoint, self.hf = out / "checkpoint", out / "hf"
        self.samples, self.rollouts = out / f"samples-{sampler}.npz", out / "rollouts"

    def pretrain(self) -> None:
        """Train on the task, so that the router is a trained one."""
        with self._once("pretrain", self.checkpoint, [MODEL, PRETRAIN]) as todo:
            if todo:
                iterations = int(PRETRAIN[PRETRAIN.index("--train-iters") + 1])
                save = ["--save", str(self.checkpoint)]
                self._megatron("pretrain", WORLD_SIZE, arguments(PRETRAIN, save), iterations)

    def export(self) -> None:
        """Write the checkpoint as a transformers directory."""
        with self._once("export", self.hf, [self._stamp("pretrain")]) as todo:
            if todo:
                more = ["--micro-batch-size", "1", "--load", str(self.checkpoint)]
                more += ["--hf-export", str(self.hf)]
                script = ROOT / "megatron_r3" / "weights" / "hf.py"
                self._megatron("export", 1, arguments(more), None, script)

    def sample(self) -> None:
        """Sample with routes and log-probs, from the engine in its own process."""
        inputs = [self._stamp("export"), self.sampler, NUM_PROMPTS, SAMPLES_PER_PROMPT]
        with self._once(f"sample-{self.sampler}", self.samples, inputs) as todo:
            if todo:
                prompts = self.out / "prompts.jsonl"
                task.write_prompts(prompts, NUM_PROMPTS, FIRST_PROMPT)
                command = [sys.executable, "-m", SAMPLERS[self.sampler], "--model", str(self.hf)]
                command += ["--prompts", str(prompts), "--n", str(SAMPLES_PER_PROMPT)]
                command += ["--seed", "1"]
                command += ["--max-new-tokens", str(task.MAX_ANSWER), "--out", str(self.samples)]
                env = {"PYTHONPATH": str(ROOT)}
                print(f"sample: {self.sampler}, log {self._log('sample')}", flush=True)
                process.run(command, self._log("sample"), env, lambda line: None)

    def store(self) -> None:
        """Reward the samples and write them as a rollout store."""
        inputs = [self._stamp(f"sample-{self.sampler}")]
        with self._once("store", self.rollouts, inputs) as todo:
            if todo:
                write_store(self.samples, self.rollouts, self.hf)

    def train(self, mode: str) -> Path:
        """GRPO on the rollouts, `live` or `replay`; the folder with its TensorBoard events."""
        events = self.out / mode
        shutil.rmtree(events, ignore_errors=True)
        more = ["--rollouts", str(self.rollouts), "--tensorboard-dir", str(events)]
        more += ["--moe-router-replay"] if mode == "replay" else []
        iterations = int(GRPO[GRPO.index("--train-iters") + 1])
        self._megatron(mode, WORLD_SIZE, self.grpo_arguments() + more, iterations)
        return events

    def grpo_arguments(self) -> list[str]:
        """What every training on the rollouts shares: a user's own command may begin so."""
        return arguments(GRPO, ["--load", str(self.checkpoint)])

    def _log(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.log"

    def _megatron(
        self,
        name: str,
        processes: int,
        script_arguments: list[str],
        iterations: int | None,
        script: Path = ROOT / "demo" / "pretrain.py",
    ) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1"]  # also where the host's name is not known
        command += ["--nproc-per-node", str(processes), "-m", "megatron_r3.cpu", str(script)]
        env = {"PYTHONPATH": f"{self.megatron}:{ROOT}"}
        with tqdm(total=iterations, desc=f"{name:10}", disable=iterations is None) as bar:

            def on_line(line: str) -> None:
                if " iteration " in line and "elapsed time" in line:
                    bar.update()

            process.run(command + script_arguments, self._log(name), env, on_line)

    def _stamp(self, stage: str) -> str:
        return (self.out / f"{stage}.done").read_text()

    def _once(self, stage: str, result: Path, inputs: list[object]) -> _Once:
        return _Once(self.out / f"{stage}.done", stage, result, inputs)


class _Once:
    """`with _Once(...) as todo`: todo is False where the result of the same inputs is there."""

    def __init__(self, stamp: Path, stage: str, result: Path, inputs: list[object]) -> None:
        self.stamp, self.stage, self.result = stamp, stage, result
        sources = [(ROOT / "demo" / name).read_text() for name in ("task.py", "pretrain.py")]
        text = json.dumps([*inputs, *sources])
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def __enter__(self) -> bool:
        if self.result.exists() and self.stamp.exists() and self.stamp.read_text() == self.digest:
            print(f"{self.stage}: {self.result} is there", flush=True)
            return False
        self.stamp.unlink(missing_ok=True)
        if self.result.is_dir():
            shutil.rmtree(self.result)
        self.result.unlink(missing_ok=True)
        self.stamp.parent.mkdir(parents=True, exist_ok=True)
        return True

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.stamp.write_text(self.digest)


def rollouts(samples: list[Sample]) -> Iterator[Rollout]:
    """Samples with their rewards, numbered inside their groups."""
    seen: Counter[int] = Counter()
    for sample in samples:
        tokens, prompt = sample.tokens_N.tolist(), sample.prompt_length
        reward = task.reward(tokens[:prompt], tokens[prompt:])
        yield to_rollout(sample, reward, sample.group, seen[sample.group], 0)
        seen[sample.group] += 1


def write_store(samples: Path, directory: Path, hf: Path) -> None:
    """One shard with every sample of a file, stamped with the policy that sampled."""
    source = read_source(samples)
    info = StoreInfo(
        num_experts=source.num_experts,
        topk=source.topk,
        moe_layers=source.moe_layers,
        engine=source.engine,
        engine_version=source.version,
        model="demo",
        router_fingerprint=router_fingerprint(hf, source.moe_layers),
    )
    write_shard(directory, info, [*rollouts(read_samples(samples))])
