"""What the ranks of the dispatch benchmark do. Megatron is imported inside the functions.

Shape suffixes (docs/glossary.md): L, T, K.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.waits import PLANS, instrument, mark_host

MODES = ("live", "replay", "plan")
ROLLOUTS, BATCH = 64, 8


@dataclass(frozen=True)
class Recorded:
    """Made-up tokens, and the routes `[L, T, K]` that the live router takes for them."""

    tokens: list[np.ndarray]
    routes: list[np.ndarray]
    num_experts: int

    def rollouts(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
        """tokens, response, log-probs, routes of each."""
        for tokens, ids_LTK in zip(self.tokens, self.routes, strict=True):
            response = np.arange(len(tokens)) >= 2
            logprobs = np.where(response, -3.0, 0.0).astype(np.float32)
            yield tokens, response, logprobs, ids_LTK


def record(rank: int, argv: list[str], checkpoint: Path) -> Recorded:
    """Build the model, save it, and record what its routers choose."""
    from fidelity.reference import build_and_save
    from megatron_r3.replay import recording

    args, model = build_and_save([*argv, "--micro-batch-size", "1"], checkpoint)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, args.vocab_size, args.seq_length + 1) for _ in range(ROLLOUTS)]
    routes = []
    for ids in tokens:
        inputs = torch.from_numpy(ids[None, :-1])
        with torch.no_grad(), recording() as microbatch:
            model(inputs, torch.arange(args.seq_length)[None], None)
        layers = sorted(microbatch.ids)
        routes.append(np.stack([microbatch.ids[layer].numpy() for layer in layers]))
    return Recorded([ids.astype(np.int32) for ids in tokens], routes, args.num_experts)


def timed(rank: int, argv: list[str], rounds: int) -> dict[str, Any]:
    """Train with the ways in turn: warm up, time `rounds` steps of each, then count in one more."""
    from megatron.training import get_args, training

    from fidelity.script import datasets, forward_step
    from megatron_r3.launch import train
    from megatron_r3.training.step import made_of

    cycles = rounds + 3  # one to warm up, one for what is prepared ahead, one counted
    steps = len(MODES) * cycles
    sys.argv = ["dispatch.py", *argv, "--moe-router-replay", "--finetune", "--no-load-optim"]
    sys.argv += ["--no-load-rng", "--micro-batch-size", str(BATCH), "--lr", "1e-30"]
    sys.argv += ["--global-batch-size", str(ROLLOUTS), "--train-iters", str(steps)]
    sys.argv += ["--moe-router-load-balancing-type", "none", "--calculate-per-token-loss"]
    sys.argv += ["--log-interval", "1000", "--moe-router-replay-log-mismatch-interval", "0"]
    spent = Spent()
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    counted: dict[str, Counter[str]] = {}
    counts, passes = Counter[str](), Counter[str]()
    train_step, numbers = training.train_step, itertools.count()

    def step(*step_args: Any, **kwargs: Any) -> Any:
        cycle, way = divmod(next(numbers), len(MODES))
        if cycle == rounds + 1 and way == 0:
            instrument(counts)
            spent.plans = 0
        before = Counter(counts)
        torch.distributed.barrier()
        begin = time.perf_counter()
        result = train_step(*step_args, **kwargs)
        if 1 <= cycle <= rounds:
            seconds[MODES[way]].append(time.perf_counter() - begin)
        counted[MODES[way]] = counts - before
        return result

    training.train_step = step
    with made_of(_parts_in_turn(spent)):
        train(datasets, forward_step, lambda models: _count_passes(models, passes))
    args = get_args()
    microbatches = ROLLOUTS // BATCH // args.data_parallel_size
    return {
        "seconds": seconds,
        "counts": counted,
        "layer_passes": passes["experts"] / steps,
        "plan_collectives": counts[PLANS] / spent.plans,
        "planning_s": spent.planning_s / (spent.all_plans / microbatches),
        "checking_s": spent.checking_s / steps,
        "tokens": ROLLOUTS // args.data_parallel_size * args.seq_length,
    }


def _count_passes(models: list[torch.nn.Module], passes: Counter[str]) -> None:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def count(*_: Any) -> None:
        passes["experts"] += 1

    for layer in (module for model in models for module in model.modules()):
        if isinstance(layer, MoELayer):
            layer.experts.register_forward_pre_hook(count)
            for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
                mark_host(getattr(layer.token_dispatcher, name))  # its permute_idx_device


@dataclass
class Spent:
    """CPU time of this rank's threads, and how often it planned.

    Attributes:
        planning_s, all_plans: of all micro-batches that were planned.
        plans: those since counting began.
        checking_s: what looks at a step before its update (megatron_r3/training/guard.py).
    """

    planning_s: float = 0.0
    all_plans: int = 0
    plans: int = 0
    checking_s: float = 0.0


def _parts_in_turn(spent: Spent) -> Any:
    """The parts of a training whose steps are live, replayed, and replayed with a plan in turn."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from megatron_r3.integrations.planner import Planner
    from megatron_r3.training.dataset import SEQUENCE_FIELDS
    from megatron_r3.training.guard import StepGuard
    from megatron_r3.training.lookahead import Prepared, Preparer
    from megatron_r3.training.step import Parts

    class TurnedPreparer(Preparer):
        num_prepared = 0

        def prepare(self, whole: Any, with_plan: bool) -> Prepared:
            # micro-batches are prepared ahead of their step, so a step is known by their number
            mode = MODES[self.num_prepared // get_num_microbatches() % len(MODES)]
            self.num_prepared += 1
            if mode == "live":
                return Prepared(self.layout.split(whole, SEQUENCE_FIELDS), [], None, None)
            return super().prepare(whole, with_plan and mode == "plan")

    class TimedPlanner(Planner):
        def plan(self, routes: Any) -> Any:
            begin = time.thread_time()
            plan = super().plan(routes)
            spent.planning_s += time.thread_time() - begin
            spent.all_plans += 1
            spent.plans += 1
            return plan

    class TimedGuard(StepGuard):
        def add_loss(self, *args: Any) -> None:
            begin = time.thread_time()
            super().add_loss(*args)
            spent.checking_s += time.thread_time() - begin

        def check(self, *args: Any) -> None:
            begin = time.thread_time()
            super().check(*args)
            spent.checking_s += time.thread_time() - begin

    return Parts(preparer=TurnedPreparer, planner=TimedPlanner, guard=TimedGuard)
