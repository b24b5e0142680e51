"""What the ranks of the dispatch benchmark do. Megatron is imported inside the functions.

Shape suffixes: L MoE layers, T tokens, K top-k.
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
    """Train: a step of each way to warm up, `rounds` of each in turn, the last of each counted."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from demo.pretrain import datasets, forward_step

    cycles = rounds + 3  # one to warm up, one for what is prepared ahead, one counted
    steps = len(MODES) * cycles
    sys.argv = ["dispatch.py", *argv, "--moe-router-replay", "--finetune", "--no-load-optim"]
    sys.argv += ["--no-load-rng", "--micro-batch-size", str(BATCH), "--lr", "1e-30"]
    sys.argv += ["--global-batch-size", str(ROLLOUTS), "--train-iters", str(steps)]
    sys.argv += ["--moe-router-load-balancing-type", "none", "--calculate-per-token-loss"]
    sys.argv += ["--log-interval", "1000", "--moe-router-replay-log-mismatch-interval", "0"]
    args = parse_and_validate_args()
    microbatches = ROLLOUTS // BATCH // args.data_parallel_size
    planning = _alternate(microbatches)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    counted: dict[str, Counter[str]] = {}
    counts, passes = Counter[str](), Counter[str]()
    train_step, numbers = training.train_step, itertools.count()

    def step(*step_args: Any, **kwargs: Any) -> Any:
        cycle, way = divmod(next(numbers), len(MODES))
        if cycle == rounds + 1 and way == 0:
            instrument(counts)
            planning.update(plans=0)
        before = Counter(counts)
        torch.distributed.barrier()
        begin = time.perf_counter()
        result = train_step(*step_args, **kwargs)
        if 1 <= cycle <= rounds:
            seconds[MODES[way]].append(time.perf_counter() - begin)
        counted[MODES[way]] = counts - before
        return result

    training.train_step = step
    config = gpt_config_from_args(args)
    config.post_wrap_hooks.append(lambda models: _count_passes(models, passes))
    pretrain(
        pretrain_cfg_container_from_args(args, config),
        datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )
    return {
        "seconds": seconds,
        "counts": counted,
        "layer_passes": passes["experts"] / steps,
        "plan_collectives": counts[PLANS] / planning["plans"],
        "planning_s": planning["seconds"] / planning["steps"],
        "checking_s": planning["checking"] / steps,
        "tokens": ROLLOUTS // args.data_parallel_size * args.seq_length,
    }


def _count_passes(models: list[torch.nn.Module], passes: Counter[str]) -> list[torch.nn.Module]:
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def count(*_: Any) -> None:
        passes["experts"] += 1

    for layer in (module for model in models for module in model.modules()):
        if isinstance(layer, MoELayer):
            layer.experts.register_forward_pre_hook(count)
            for name in ("sort_input_by_local_experts", "restore_output_by_local_experts"):
                mark_host(getattr(layer.token_dispatcher, name))  # its permute_idx_device
    return models


def _alternate(microbatches: int) -> dict[str, float]:
    """Prepare each step's microbatches in its way; the CPU time of planning and checking, in total.

    Checking is what looks at a step before its update (megatron_r3/training/guard.py).
    """
    from megatron_r3.training.guard import StepGuard
    from megatron_r3.training.lookahead import Planner, Prepared
    from megatron_r3.training.step import RolloutStep

    prepare, plan = RolloutStep._prepare, Planner.plan
    spent = {"seconds": 0.0, "steps": 0.0, "plans": 0.0, "checking": 0.0}
    number = {"prepared": 0}

    def prepare_in_turn(self: Any, layers: Any, whole: Any, planner: Any = None) -> Prepared:
        mode = MODES[number["prepared"] // microbatches % len(MODES)]
        number["prepared"] += 1
        if mode == "live":
            return Prepared(self.batches.split(whole), [], None, None)
        return prepare(self, layers, whole, planner if mode == "plan" else None)

    def timed_plan(self: Any, routes: Any) -> Any:
        begin = time.thread_time()
        made = plan(self, routes)
        spent["seconds"] += time.thread_time() - begin
        spent["steps"] += 1 / microbatches
        spent["plans"] += 1
        return made

    def timed_check(original: Any) -> Any:
        def checked(*args: Any) -> None:
            begin = time.thread_time()
            original(*args)
            spent["checking"] += time.thread_time() - begin

        return checked

    StepGuard.add_loss = timed_check(StepGuard.add_loss)  # type: ignore[method-assign]
    StepGuard.check = timed_check(StepGuard.check)  # type: ignore[method-assign]
    RolloutStep._prepare = prepare_in_turn  # type: ignore[method-assign]
    Planner.plan = timed_plan  # type: ignore[method-assign]
    return spent
