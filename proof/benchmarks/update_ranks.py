"""What the ranks of the update benchmark do. Megatron is imported inside the functions.

One training has all ways in turn, a collection each: so each way has the same model in the same
process, and the machine's other load is that of neighbours.

Shape suffixes (docs/glossary.md): B, S, T.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import torch

from proof.benchmarks.dispatch_ranks import Rounds
from proof.benchmarks.waits import count_passes, instrument

SAMPLER, TRAINER, R2 = WAYS = ("sampler", "trainer", "trainer, R2")
PASSES = "forward passes"
STEP, MICRO_BATCH = 16, 8  # rollouts of a mini-step, and of a micro-batch


def timed(rank: int, argv: list[str], mini_steps: int, most: int) -> dict[str, Any]:
    """Train on collections, the ways in turn: warm up, time rounds, then count in one more round.

    Args:
        argv: of Megatron.
        mini_steps: optimizer steps of a collection.
        most: the rounds end here, although some ratio cannot be told from 1.
    """
    from megatron.training import get_args, training

    from megatron_r3.train.launch import train
    from megatron_r3.train.step import made_of
    from proof.fidelity.script import datasets, forward_step

    rounds = Rounds(most, WAYS)
    sys.argv = ["update.py", *argv, "--moe-router-replay", "--finetune", "--no-load-optim"]
    sys.argv += ["--rollouts-old-policy", "trainer", "--rollouts-mini-steps", str(mini_steps)]
    sys.argv += ["--moe-router-replay-source", "old-policy"]
    sys.argv += ["--no-load-rng", "--micro-batch-size", str(MICRO_BATCH), "--lr", "1e-30"]
    sys.argv += ["--global-batch-size", str(STEP)]
    sys.argv += ["--train-iters", str(mini_steps * rounds.most_steps)]
    sys.argv += ["--moe-router-load-balancing-type", "none", "--calculate-per-token-loss"]
    sys.argv += ["--log-interval", "1000", "--moe-router-replay-log-mismatch-interval", "0"]
    counted: dict[str, Counter[str]] = {}
    counts, begun = Counter[str](), Counter[str]()
    wall = cpu = 0.0
    train_step = training.train_step

    def step(*step_args: Any, **kwargs: Any) -> Any:
        nonlocal begun, wall, cpu
        done = counts["steps"] % mini_steps
        if not done:
            if rounds.counting and not counted:
                instrument(counts)
            torch.distributed.barrier()
            begun = Counter(counts)
            wall, cpu = time.perf_counter(), time.process_time()
            rounds.open_step()
        result = train_step(*step_args, **kwargs)
        counts["steps"] += 1
        if done < mini_steps - 1:
            return result
        mine = [time.perf_counter() - wall, time.process_time() - cpu]
        if rounds.counting:
            counted[rounds.mode()] = counts - begun
        if rounds.close_step(mine):  # the loop of Megatron's train() asks before every step
            get_args().train_iters = counts["steps"]
        return result

    training.train_step = step
    layers = Counter[str]()

    def built(models: list[torch.nn.Module]) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        count_passes(models, counts)
        modules = (module for model in models for module in model.modules())
        layers["MoE"] = sum(isinstance(module, MoELayer) for module in modules)

    with made_of(_parts_in_turn(rounds, mini_steps)):
        train(datasets, forward_step, built)
    microbatches = mini_steps * STEP // MICRO_BATCH // get_args().data_parallel_size
    return {
        "wall_s": rounds.wall_s,
        "cpu_s": rounds.cpu_s,
        "counts": counted,
        "layers_and_microbatches": layers["MoE"] * microbatches,
    }


def _parts_in_turn(rounds: Rounds, mini_steps: int) -> Any:
    """The parts of a training whose collections go the ways in turn.

    The training's options are those of the third way. In the other two all tokens take the routes
    of the rollouts, and none are recorded. In the first one there is no pass, and the sampler's
    log-probs are the old ones.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from megatron_r3.train.lookahead import Prepared, Preparer
    from megatron_r3.train.old_pass import OldPass
    from megatron_r3.train.old_policy import OldPolicy
    from megatron_r3.train.schedule import SOURCES
    from megatron_r3.train.step import Parts

    class TurnedOldPolicy(OldPolicy):
        def add_routes(self, rows_T: torch.Tensor, ids: dict[int, torch.Tensor]) -> None:
            if rounds.mode() == R2:
                super().add_routes(rows_T, ids)

    class TurnedOldPass(OldPass):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.policy = TurnedOldPolicy()

        def begin(self, models: list[Any], forward_step: Any) -> None:
            if rounds.mode() != SAMPLER:
                super().begin(models, forward_step)

        def logprobs(self, host: dict[str, torch.Tensor]) -> torch.Tensor:
            if rounds.mode() == SAMPLER:
                return host["sampled_logprobs"]
            return super().logprobs(host)

    class TurnedPreparer(Preparer):
        num_prepared = 0

        def prepare(self, whole: Any, with_plan: bool, for_old_pass: bool = False) -> Prepared:
            way = rounds.mode()
            if not for_old_pass:
                # a thread runs this: it knows a collection by the number of micro-batches before
                collection = self.num_prepared // (mini_steps * get_num_microbatches())
                self.num_prepared += 1
                rounds.wait_for(collection)
                way = rounds.mode(collection)
            if way != R2:  # each token of the store has a recorded route
                source_BS = torch.full_like(whole["source"], SOURCES.index("rollout"))
                whole = {**whole, "source": source_BS}
            return super().prepare(whole, with_plan, for_old_pass)

    return Parts(preparer=TurnedPreparer, old_pass=TurnedOldPass)
