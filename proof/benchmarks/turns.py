"""Trainings whose steps take several ways in turn: one process, one model, neighbouring steps.

A round has a step of each way, in an order that changes from round to round. So all ways have the
same model and process, and the other load of the machine is alike for neighbouring steps. The first
way goes twice in each round: the ratio of its two steps is 1 but for noise, so the width of that
ratio's interval is the smallest difference that the run can tell. Megatron is imported inside the
functions.

Shape suffixes (docs/glossary.md): K, L, T.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_r3.cpu import CPU_ARGS
from megatron_r3.data.store import Rollout, StoreInfo, write_shard
from megatron_r3.replay.routes import Routes
from proof.benchmarks.bench import AGAIN, ratios_to_first
from proof.benchmarks.interval import enough, turn
from proof.benchmarks.waits import count_passes, instrument
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.trees import patched_copy, unpatched_copy

# a Qwen3-MoE; each benchmark adds layers, hidden size, width of an expert and sequence length
SHAPE = """
--num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 32
--qk-layernorm --ffn-hidden-size 256 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--disable-bias-linear --position-embedding-type rope --rotary-base 10000
--untie-embeddings-and-output-weights --num-experts 16 --moe-router-topk 4
--moe-token-dispatcher-type alltoall --attention-dropout 0 --hidden-dropout 0
--tokenizer-type NullTokenizer --vocab-size 64 --make-vocab-size-divisible-by 8
--clip-grad 1.0 --weight-decay 0 --lr-decay-style constant --eval-iters 0 --eval-interval 1000
--num-workers 0 --seed 1234 --ckpt-format torch_dist
""".split()
# With this learning rate the weights do not change, so that steps can be compared.
FROZEN = """
--moe-router-replay --finetune --no-load-optim --no-load-rng --lr 1e-30 --log-interval 1000
--moe-router-load-balancing-type none --calculate-per-token-loss
--moe-router-replay-log-mismatch-interval 0
""".split()
SMALL = """
--num-layers 4 --hidden-size 128 --moe-ffn-hidden-size 64 --seq-length 32
--max-position-embeddings 64
""".split()


# -- the driver


@contextmanager
def patched_worker() -> Iterator[tuple[TreeWorker, str, Path]]:
    """A worker on a patched copy of the default tree, the tree's name, and a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        folder = Path(scratch)
        tree, name = unpatched_copy(None, folder / "unpatched")
        patched = patched_copy(tree, folder / "patched")
        with TreeWorker(patched, preload=["megatron.training"]) as worker:
            yield worker, name, folder


@contextmanager
def rig(rollouts: int) -> Iterator[tuple[TreeWorker, str, list[str]]]:
    """A worker, the tree's name, and arguments that train a model on its live router's routes.

    Args:
        rollouts: how many rollouts the store gets.
    """
    with patched_worker() as (worker, name, folder):
        argv = [*CPU_ARGS, *SHAPE, *SMALL]
        (routes,) = worker.run(record, 1, argv, folder / "checkpoint", rollouts, timeout_s=300)
        write_store(folder / "store", routes, "recorded live")
        load = ["--load", str(folder / "checkpoint"), "--rollouts", str(folder / "store")]
        yield worker, name, [*argv, *load]


def record(rank: int, argv: list[str], checkpoint: Path, rollouts: int) -> list[np.ndarray]:
    """Build and save the model; return its live routes `[L, T, K]` for `tokens` of each rollout."""
    from megatron_r3.replay.active import recording
    from proof.fidelity.reference import build_and_save

    args, model = build_and_save([*argv, "--micro-batch-size", "1"], checkpoint)
    routes = []
    for index in range(rollouts):
        inputs = torch.from_numpy(tokens(index, args.seq_length)[None, :-1].astype(np.int64))
        with torch.no_grad(), recording() as microbatch:
            model(inputs, torch.arange(args.seq_length)[None], None)
        layers = sorted(microbatch.ids)
        routes.append(np.stack([microbatch.ids[layer].numpy() for layer in layers]))
    return routes


def tokens(index: int, sequence: int) -> np.ndarray:
    """The made-up tokens of a rollout, int32 `[sequence + 1]`."""
    return np.random.default_rng(index).integers(0, 63, sequence + 1).astype(np.int32)


def write_store(folder: Path, routes: list[np.ndarray], engine: str, experts: int = 16) -> None:
    """Write a made-up rollout for each array `[L, T, K]` of `routes`."""
    layers, sequence, topk = routes[0].shape
    info = StoreInfo(
        engine=engine,
        engine_version="0",
        num_experts=experts,
        topk=topk,
        moe_layers=tuple(range(layers)),
    )
    response = np.arange(sequence + 1) >= 2
    logprobs = np.where(response, -3.0, 0.0).astype(np.float32)
    rollouts = [
        Rollout(
            *(tokens(index, sequence), response, logprobs, float(index % 2), index // 4, 0),
            *(Routes.from_array(ids_LTK, experts), index % 4),
        )
        for index, ids_LTK in enumerate(routes)
    ]
    write_shard(folder, info, rollouts)


# -- the ranks


class Rounds:
    """Says which way each step takes, notes the step's seconds, and decides when to stop.

    Round 0 warms up. Then rounds are timed until every ratio can be told from 1, or `most` are
    done. In one more round the waits are counted. All ranks decide alike.

    Args:
        most: the largest number of timed rounds.
        modes: the ways; each later way is compared with the first one.

    Attributes:
        ways: the first way, the first way again, and the later ways.
        wall_s: for each of `ways` the wall seconds of each timed step on the slowest rank.
        cpu_s: for each of `ways` the largest CPU seconds of a rank, all its threads together, in
            each timed step.
        done: how many steps are over; step number `done` runs or is next.
        counting: whether the waits of step `done` are counted.
    """

    def __init__(self, most: int, modes: tuple[str, ...]) -> None:
        first, *others = modes
        self.most, self.ways = most, (first, first + AGAIN, *others)
        self.most_steps = len(self.ways) * (most + 2)
        self.wall_s: dict[str, list[float]] = {way: [] for way in self.ways}
        self.cpu_s: dict[str, list[float]] = {way: [] for way in self.ways}
        self.done, self.counting = 0, False
        self._opened = threading.Condition()
        self._open = -1  # the last step that has begun

    @property
    def timing(self) -> bool:
        """Whether step `done` is timed."""
        return self.done >= len(self.ways) and not self.counting

    def way(self, step: int | None = None) -> str:
        """Which of `ways` a step takes; None stands for step `done`."""
        number, place = divmod(self.done if step is None else step, len(self.ways))
        return turn(self.ways, number)[place]

    def mode(self, step: int | None = None) -> str:
        """The way of a step, without " again"."""
        return self.way(step).removesuffix(AGAIN)

    def open_step(self) -> None:
        """Let the thread that prepares micro-batches begin with those of step `done`."""
        with self._opened:
            self._open = self.done
            self._opened.notify_all()

    def wait_for(self, step: int) -> None:
        """Return when this step has begun.

        A training prepares up to three micro-batches ahead. A step here may have only two: all
        reading of their routes, and planning, would fall into steps of other ways. So the thread
        that prepares micro-batches waits here for their step. A real training hides more of that
        work.
        """
        with self._opened:
            self._opened.wait_for(lambda: self._open >= step)

    def close_step(self, mine_s: list[float]) -> bool:
        """Note the seconds of a step; return whether the step was the last one.

        Args:
            mine_s: wall and CPU seconds of this rank.
        """
        way, (number, place) = self.way(), divmod(self.done, len(self.ways))
        most = torch.tensor(mine_s, dtype=torch.float64)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        if self.timing:
            self.wall_s[way].append(float(most[0]))
            self.cpu_s[way].append(float(most[1]))
        self.done += 1
        if place < len(self.ways) - 1:
            return False
        if self.counting:
            return True
        # rank 0 decides for all: if ranks disagreed, they would wait for each other for ever
        decided = torch.tensor([number > 0 and enough(self.ratios(), self.most)])
        torch.distributed.broadcast(decided, 0)
        self.counting = bool(decided[0])
        return False

    def ratios(self) -> list[list[float]]:
        """For each later way, the ratios of its wall and of its CPU seconds to the first way's."""
        return [ratios_to_first(s, way) for s in (self.wall_s, self.cpu_s) for way in self.ways[2:]]


def modes_of_microbatches(rounds: Rounds) -> Iterator[str]:
    """Yields the mode of each micro-batch in order, once the micro-batch's step has begun.

    A thread prepares micro-batches ahead of the steps. So the number of a micro-batch, and not the
    time, says to which step the micro-batch belongs.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    for number in count():
        turn_number = number // get_num_microbatches()
        rounds.wait_for(turn_number)
        yield rounds.mode(turn_number)


def train_in_turn(
    argv: list[str],
    rounds: Rounds,
    parts: Any,
    *,
    batch: tuple[int, int],
    counts: Counter[str] | None = None,
    built: Callable[[list[torch.nn.Module]], None] = lambda models: None,
    begin: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train with the ways in turn: warm up, time rounds, then count the waits in one more round.

    Args:
        argv: Megatron's arguments.
        parts: the `Parts` of the training, made for these rounds.
        batch: how many rollouts a micro-batch has, and a step.
        counts: gets the waits, and the passes of experts; None: nothing is counted.
        built: called with the models.
        begin, end: called before and after each step of `rounds`, and not timed.

    Returns:
        "wall_s", "cpu_s": those of `rounds`; "counts": for each way, what was counted in the last
        round.
    """
    from megatron.training import get_args, training

    from megatron_r3.train.launch import train
    from proof.fidelity.observe import made_of
    from proof.fidelity.script import datasets, forward_step

    sizes = {"micro-batch-size": batch[0], "global-batch-size": batch[1]}
    sizes["train-iters"] = rounds.most_steps
    options = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    sys.argv = ["train.py", *argv, *FROZEN, *options]
    counted: dict[str, Counter[str]] = {}
    train_step = training.train_step

    def step(*given: Any, **named: Any) -> Any:
        if counts is not None and rounds.counting and not counted:
            instrument(counts)
        before = Counter(counts)
        begin()
        torch.distributed.barrier()
        began = time.perf_counter(), time.process_time()
        rounds.open_step()
        result = train_step(*given, **named)
        mine = [time.perf_counter() - began[0], time.process_time() - began[1]]
        end()
        if counts is not None and rounds.counting:
            counted[rounds.way()] = counts - before
        if rounds.close_step(mine):  # Megatron's train() compares train_iters before every step
            get_args().train_iters = rounds.done
        return result

    def on_models(models: list[torch.nn.Module]) -> None:
        if counts is not None:
            count_passes(models, counts)
        built(models)

    training.train_step = step
    with made_of(parts):
        train(datasets, forward_step, on_models)
    return {"wall_s": rounds.wall_s, "cpu_s": rounds.cpu_s, "counts": counted}
