"""The demo's stages, each of which makes files from files of earlier stages.

Each stage but the trainings on rollouts is skipped if its inputs did not change.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

from tqdm import tqdm

from demo import process, tool_task
from demo.collect import NUM_PROMPTS, ROOT, SAMPLES_PER_PROMPT
from demo.model import GRPO, MODEL, PRETRAIN, arguments

WORLD_SIZE = 2


class Stages:
    """The files of the demo, and how they are made.

    Args:
        out: the folder of all these files, such as build/demo.
        megatron: a patched tree.
        sampler: the engine, one of `demo.collect.ENGINES`.
        steps: optimizer steps of the live and of the replayed training, each on all rollouts.
        prompts: how many prompts are sampled, SAMPLES_PER_PROMPT times each.
        agent: take the task of the agent, tool_task.py.
    """

    def __init__(
        self,
        out: Path,
        megatron: Path,
        sampler: str,
        steps: int = 6,
        prompts: int = NUM_PROMPTS,
        agent: bool = False,
    ) -> None:
        self.out, self.megatron, self.sampler = out, megatron, sampler
        self.steps, self.prompts, self.agent = steps, prompts, agent
        self.checkpoint, self.hf, self.rollouts = out / "checkpoint", out / "hf", out / "rollouts"

    def pretrain(self) -> None:
        """Train the model on the task, so that its router is a trained one."""
        with self._once("pretrain", self.checkpoint, [MODEL, PRETRAIN]) as todo:
            if todo:
                iterations = int(PRETRAIN[PRETRAIN.index("--train-iters") + 1])
                save = ["--save", str(self.checkpoint)]
                if self.agent:
                    save += ["--seq-length", str(tool_task.SEQ_LENGTH)]
                self._megatron("pretrain", WORLD_SIZE, arguments(PRETRAIN, save), iterations)

    def export(self) -> None:
        """Write the checkpoint as a transformers directory."""
        with self._once("export", self.hf, [self._stamp("pretrain")]) as todo:
            if todo:
                more = ["--micro-batch-size", "1", "--load", str(self.checkpoint)]
                more += ["--hf-export", str(self.hf)]
                script = ROOT / "megatron_r3" / "weights" / "hf.py"
                self._megatron("export", 1, arguments(more), None, script)
                if self.agent:
                    tool_task.write_tokenizer(self.hf)

    def sample(self) -> None:
        """Sample rollouts of the policy with the engine, by `demo.collect` in a process."""
        inputs = [self._stamp("export"), self.sampler, self.prompts, SAMPLES_PER_PROMPT]
        with self._once("sample", self.rollouts, inputs) as todo:
            if todo:
                command = [sys.executable, "-m", "demo.collect", "--engine", self.sampler]
                command += ["--model", str(self.hf), "--out", str(self.out)]
                command += ["--prompts", str(self.prompts)]
                if self.sampler == "megatron":
                    command += ["--megatron", str(self.megatron)]
                    command += ["--checkpoint", str(self.checkpoint)]
                print(f"sample: {self.sampler}, log {self._log('sample')}", flush=True)
                env = {"PYTHONPATH": str(ROOT)}
                process.run(command, self._log("sample"), env, lambda line: None)

    def train(self, mode: str) -> Path:
        """Run GRPO on the rollouts, `live` or `replay`; return its TensorBoard folder."""
        events = self.out / mode
        shutil.rmtree(events, ignore_errors=True)
        more = ["--rollouts", str(self.rollouts), "--tensorboard-dir", str(events)]
        more += ["--moe-router-replay"] if mode == "replay" else []
        self._megatron(mode, WORLD_SIZE, self.grpo_arguments() + more, self.steps)
        return events

    def grpo_arguments(self) -> list[str]:
        """The arguments that the live and the replayed training share, as in train.args."""
        more = ["--global-batch-size", str(self.prompts * SAMPLES_PER_PROMPT)]
        more += ["--train-iters", str(self.steps), "--load", str(self.checkpoint)]
        return arguments(GRPO, more)

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
        command += ["--local-addr", "127.0.0.1"]  # the host's own name may resolve to nothing
        command += ["--nproc-per-node", str(processes), "-m", "megatron_r3.cpu", str(script)]
        env = {"PYTHONPATH": f"{self.megatron}:{ROOT}"}
        env |= {"DEMO_TASK": "demo.tool_task"} if self.agent else {}
        with tqdm(total=iterations, desc=f"{name:10}", disable=iterations is None) as bar:
            # for each iteration Megatron logs a line with the two texts below
            def on_line(line: str) -> None:
                if " iteration " in line and "elapsed time" in line:
                    bar.update()

            process.run(command + script_arguments, self._log(name), env, on_line)

    def _stamp(self, stage: str) -> str:
        return (self.out / f"{stage}.done").read_text()

    def _once(self, stage: str, result: Path, inputs: list[object]) -> _Once:
        return _Once(self.out / f"{stage}.done", stage, result, inputs)


class _Once:
    """`with _Once(...) as todo`: todo is False if the result exists and was made from these inputs.

    The digest of the inputs is written when the block ends without an error. The inputs include the
    digest of the stage before, so if the inputs of a stage changed, all later stages run again.
    """

    def __init__(self, stamp: Path, stage: str, result: Path, inputs: list[object]) -> None:
        self.stamp, self.stage, self.result = stamp, stage, result
        names = ("task.py", "tool_task.py", "pretrain.py")
        sources = [(ROOT / "demo" / name).read_text() for name in names]
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
