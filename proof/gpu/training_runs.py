"""Start the trainings of a case, each in a process of its own with its own time limit.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from demo.model import GRPO, MODEL
from megatron_r3.cpu import CPU_ARGS
from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.replay.routes import Routes
from proof.fidelity.rollouts import shift_token
from proof.gpu.training_rank import Order, Seen, Step

ROOT = Path(__file__).parents[2]
TAIL = 3000  # how many characters of a log an error has
# These options switch off what needs apex, and what would be compiled: compiled code depends on the
# number of tokens of an expert, and would change the last bit between two runs.
GPU_ARGS = """
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
""".split()
TE_ARGS = ["--transformer-impl", "transformer_engine", "--moe-grouped-gemm"]
LOCAL_ARGS = ["--transformer-impl", "local"]
# With this learning rate the weights do not change, so that steps and runs can be compared.
FROZEN = ["--lr", "1e-30", "--min-lr", "0"]
# Attention is not compared, so it is Transformer Engine's unfused attention, which every machine
# has. The environment variables are those that Megatron's deterministic mode asks for.
DETERMINISTIC = ["--deterministic-mode", "--attention-backend", "unfused"]
DETERMINISTIC_ENV = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
}


class RunFailed(RuntimeError):
    """A training ended in failure, or took too long; the message has the end of its log."""


class Scale(NamedTuple):
    """How much a case does: each step has the same rollouts, in several micro-batches."""

    rollouts: int  # of a step
    micro_batch: int  # rollouts of a micro-batch
    pairs: int  # timed rounds: one step of each way
    jobs: int  # how many trainings that are not timed run side by side
    limit_s: float = 150.0  # how long one training may take


ON_GPU = Scale(rollouts=128, micro_batch=32, pairs=16, jobs=4)
REHEARSAL = Scale(rollouts=16, micro_batch=4, pairs=2, jobs=2)


@dataclass(frozen=True)
class Place:
    """Where the files are, and with which layers and on which device trainings run.

    Attributes:
        tree: a patched Megatron tree of 0.19.
        script: a training script.
        checkpoint: the demo's model, saved with local layers.
        stores: `right`, a part of the demo's store with whole groups, and `shifted`, in which each
            token has the route of the token before it, far from what a live router chooses.
        folder: gets orders, results and logs.
        te: whether layers are Transformer Engine's.
        cpu: whether this is a rehearsal.
    """

    tree: Path
    script: Path
    checkpoint: Path
    stores: Mapping[str, Path]
    folder: Path
    te: bool
    cpu: bool
    scale: Scale

    def arguments(self, store: str = "right", *more: str, steps: int = 1) -> list[str]:
        """The demo's GRPO training on one rank; later words override earlier ones."""
        spec = CPU_ARGS if self.cpu else [*GPU_ARGS, *(TE_ARGS if self.te else LOCAL_ARGS)]
        argv = [*spec, *MODEL, *GRPO, "--expert-model-parallel-size", "1", *FROZEN]
        argv += ["--load", str(self.checkpoint), "--rollouts", str(self.stores[store])]
        argv += ["--micro-batch-size", str(self.scale.micro_batch)]
        argv += ["--global-batch-size", str(self.scale.rollouts), "--train-iters", str(steps)]
        return [*argv, *more]

    def order(self, store: str = "right", *more: str, steps: int = 1, **order: Any) -> Order:
        """A training with replay on."""
        argv = self.arguments(store, "--moe-router-replay", *more, steps=steps)
        return Order(str(self.script), argv, cpu=self.cpu, **order)

    def run_all(self, orders: Mapping[str, Order]) -> dict[str, Seen | RunFailed]:
        """Run trainings side by side; return, by name, what each showed or why it failed."""
        with ThreadPoolExecutor(self.scale.jobs) as pool:
            futures = {name: pool.submit(self._tried, name, o) for name, o in orders.items()}
            return {name: future.result() for name, future in futures.items()}

    def _tried(self, name: str, order: Order) -> Seen | RunFailed:
        try:
            return self.run(name, order)
        except RunFailed as error:
            return error

    def run(self, name: str, order: Order) -> Seen:
        """Run one training.

        Raises:
            RunFailed: the training did not exit with status 0 in time.
        """
        stem = name.replace(" ", "-").replace("/", "-")
        paths = [self.folder / f"{stem}.{kind}" for kind in ("json", "pt", "log")]
        ordered, result, log = paths
        result.unlink(missing_ok=True)
        ordered.write_text(json.dumps(asdict(order)))
        command = [sys.executable, "-m", "proof.gpu.training_rank", str(ordered), str(result)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=self._environment(order),
                cwd=self.folder,  # a folder with nothing that Python could import
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own: all of it can be stopped
                text=True,
            )
            try:
                status: int | None = process.wait(self.scale.limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status or not result.exists():
            end = f"took more than {self.scale.limit_s:.0f} s" if status is None else "failed"
            tail = log.read_text(errors="replace")[-TAIL:].strip()
            raise RunFailed(f"{name} {end}; the end of {log.name}:\n{tail}")
        read = torch.load(result, weights_only=True)
        return replace(Seen(**read), steps=[Step(**step) for step in read["steps"]])

    def _environment(self, order: Order) -> dict[str, str]:
        """The environment, without what would choose attention or algorithms for the training."""
        taken = {*DETERMINISTIC_ENV, "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"}
        env = {name: value for name, value in os.environ.items() if name not in taken}
        path = [str(self.tree), str(ROOT), env.get("PYTHONPATH", "")]
        env |= {"PYTHONPATH": os.pathsep.join(part for part in path if part)}
        if self.cpu:
            env |= {"OMP_NUM_THREADS": "1"}
        if "--deterministic-mode" in order.arguments:
            env |= DETERMINISTIC_ENV
        return env | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}


def write_stores(source: Path, folder: Path, count: int) -> dict[str, Path]:
    """Write the stores of `Place.stores`, with the first `count` rollouts in order of their groups.

    Raises:
        ValueError: the store has fewer rollouts.
    """
    store = RolloutStore([source])
    if len(store) < count:
        raise ValueError(
            f"--store {source}: it has {len(store)} rollouts, {count} are needed: give the store "
            "that make demo wrote"
        )
    rollouts = [store.rollout(index) for index in range(len(store))]
    rollouts = sorted(rollouts, key=lambda rollout: rollout.group)[:count]
    routes: dict[str, list[np.ndarray]] = {"right": [r.routes.ids_LTK for r in rollouts]}
    routes["shifted"] = shift_token(routes["right"])
    for name, ids in routes.items():
        pairs = zip(rollouts, ids, strict=True)
        experts = store.info.num_experts
        write_shard(
            folder / name,
            store.info,
            [
                replace(r, routes=Routes.from_array(i, experts, r.routes.recorded_T))
                for r, i in pairs
            ],
        )
    return {name: folder / name for name in routes}
