"""What the ranks of the dispatch benchmark do. Megatron is imported inside the functions.

Shape suffixes (docs/glossary.md): L, T, K.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proof.benchmarks.interval import enough, turn
from proof.benchmarks.waits import PLANS, count_passes, instrument

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
    from megatron_r3.replay.active import recording
    from proof.fidelity.reference import build_and_save

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


def timed(rank: int, argv: list[str], most: int) -> dict[str, Any]:
    """Train with the ways in turn: warm up, time rounds of steps, then count in one more round.

    Args:
        argv: of Megatron.
        most: the rounds end here, although some ratio to live cannot be told from 1.
    """
    from megatron.training import get_args, training

    from megatron_r3.train.launch import train
    from megatron_r3.train.step import made_of
    from proof.fidelity.script import datasets, forward_step

    rounds = Rounds(most)
    sys.argv = ["dispatch.py", *argv, "--moe-router-replay", "--finetune", "--no-load-optim"]
    sys.argv += ["--no-load-rng", "--micro-batch-size", str(BATCH), "--lr", "1e-30"]
    sys.argv += ["--global-batch-size", str(ROLLOUTS), "--train-iters", str(rounds.most_steps)]
    sys.argv += ["--moe-router-load-balancing-type", "none", "--calculate-per-token-loss"]
    sys.argv += ["--log-interval", "1000", "--moe-router-replay-log-mismatch-interval", "0"]
    spent = Spent()
    counted: dict[str, Counter[str]] = {}
    counts, passes = Counter[str](), Counter[str]()
    train_step = training.train_step

    def step(*step_args: Any, **kwargs: Any) -> Any:
        if rounds.counting and not counted:
            instrument(counts)
            spent.plans = 0
        before = Counter(counts)
        mode = rounds.mode()
        torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        rounds.open_step()
        result = train_step(*step_args, **kwargs)
        mine = [time.perf_counter() - wall, time.process_time() - cpu]
        if rounds.counting:
            counted[mode] = counts - before
        if rounds.close_step(mine):  # the loop of Megatron's train() asks before every step
            get_args().train_iters = rounds.done
        return result

    training.train_step = step
    with made_of(_parts_in_turn(spent, rounds)):
        train(datasets, forward_step, lambda models: count_passes(models, passes))
    args = get_args()
    microbatches = ROLLOUTS // BATCH // args.data_parallel_size
    return {
        "wall_s": rounds.wall_s,
        "cpu_s": rounds.cpu_s,
        "counts": counted,
        "layer_passes": passes["experts"] / rounds.done,
        "plan_collectives": counts[PLANS] / spent.plans,
        "planning_s": spent.planning_s / (spent.all_plans / microbatches),
        "checking_s": spent.checking_s / rounds.done,
        "tokens": ROLLOUTS // args.data_parallel_size * args.seq_length,
    }


class Rounds:
    """Which way each step goes, what it took, and when the steps end: alike on all ranks.

    Round 0 warms up. The rounds after it are timed until they are enough. One more is counted.

    Args:
        most: so many rounds are timed at most.
        modes: the ways; all others are compared with the first one.

    Attributes:
        wall_s, cpu_s: for each way the seconds of its steps, on the rank where they were most. CPU
            time is that of all threads of the rank's process.
        done: how many steps are over.
        counting: whether the round that is counted has begun.
    """

    def __init__(self, most: int, modes: tuple[str, ...] = MODES) -> None:
        self.most, self.modes = most, modes
        self.most_steps = len(modes) * (most + 2)
        self.wall_s: dict[str, list[float]] = {mode: [] for mode in modes}
        self.cpu_s: dict[str, list[float]] = {mode: [] for mode in modes}
        self.done, self.counting = 0, False
        self._opened = threading.Condition()
        self._open = -1  # the last step that has begun

    def mode(self, step: int | None = None) -> str:
        """The way that a step goes; None: the step that is next."""
        number, place = divmod(self.done if step is None else step, len(self.modes))
        return turn(self.modes, number)[place]

    def open_step(self) -> None:
        """Let the thread that prepares micro-batches go on with those of this step."""
        with self._opened:
            self._open = self.done
            self._opened.notify_all()

    def wait_for(self, step: int) -> None:
        """Return when this step has begun.

        Micro-batches are prepared up to three ahead of their use. At EP 4 a step has two, so that
        all of its preparation, reading of routes and planning too, would be paid by the steps
        before it, which go other ways. So nothing of a step is prepared before it begins. A real
        training hides more of that work than a step here does.
        """
        with self._opened:
            self._opened.wait_for(lambda: self._open >= step)

    def close_step(self, mine_s: list[float]) -> bool:
        """Note what a step took; return whether it was the last one.

        Args:
            mine_s: wall and CPU seconds of this rank.
        """
        mode, (number, place) = self.mode(), divmod(self.done, len(self.modes))
        self.done += 1
        most = torch.tensor(mine_s, dtype=torch.float64)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if number and not self.counting:
            self.wall_s[mode].append(float(most[0]))
            self.cpu_s[mode].append(float(most[1]))
        if place < len(self.modes) - 1:
            return False
        if self.counting:
            return True
        # rank 0 decides for all: ranks that disagreed would wait for each other for ever
        decided = torch.tensor([number > 0 and enough(self.ratios(), self.most)])
        torch.distributed.broadcast(decided, 0)
        self.counting = bool(decided[0])
        return False

    def ratios(self) -> list[list[float]]:
        """What must tell: of each way but the first, wall and CPU seconds by those of the first."""
        first, *others = self.modes
        return [ratios(taken, mode, first) for taken in self.taken for mode in others]

    @property
    def taken(self) -> tuple[dict[str, list[float]], ...]:
        """Wall seconds and CPU seconds, by way."""
        return self.wall_s, self.cpu_s


def ratios(seconds: dict[str, list[float]], mode: str, first: str) -> list[float]:
    """The seconds of each step of a way by those of another way in the same round."""
    return [mine / theirs for mine, theirs in zip(seconds[mode], seconds[first], strict=True)]


@dataclass
class Spent:
    """CPU time of this rank's threads, and how often it planned.

    Attributes:
        planning_s, all_plans: of all micro-batches that were planned.
        plans: those since counting began.
        checking_s: what looks at a step before its update (megatron_r3/train/guard.py).
    """

    planning_s: float = 0.0
    all_plans: int = 0
    plans: int = 0
    checking_s: float = 0.0


def modes_of_microbatches(rounds: Rounds) -> Iterator[str]:
    """The mode of each micro-batch that is prepared, once its step may be.

    A thread prepares micro-batches ahead of their steps, so it knows a step by the number of
    micro-batches before it.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    for number in count():
        step = number // get_num_microbatches()
        rounds.wait_for(step)
        yield rounds.mode(step)


def _parts_in_turn(spent: Spent, rounds: Rounds) -> Any:
    """The parts of a training whose steps are live, replayed, and replayed with a plan in turn."""
    from megatron_r3.replay.planner import Planner
    from megatron_r3.train.dataset import SEQUENCE_FIELDS
    from megatron_r3.train.guard import StepGuard
    from megatron_r3.train.lookahead import Prepared, Preparer
    from megatron_r3.train.step import Parts

    modes = modes_of_microbatches(rounds)

    class TurnedPreparer(Preparer):
        def prepare(self, whole: Any, with_plan: bool) -> Prepared:
            mode = next(modes)
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
