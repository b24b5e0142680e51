"""What the ranks of the balance benchmark do. Megatron is imported inside the functions."""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from typing import Any

import torch

from proof.benchmarks.dispatch_ranks import Rounds, modes_of_microbatches

# without slots, as the tree is; slots that stay empty; guests
WAYS = OFF, EMPTY, GUESTS = ("off", "empty", "guests")
ROLLOUTS, BATCH = 32, 4
NEVER = 1 << 60  # no guest has so many tokens


def timed(rank: int, argv: list[str], most: int) -> dict[str, Any]:
    """Train with the ways in turn: warm up, and time rounds of steps.

    Args:
        argv: of Megatron; guest slots are on.
        most: the rounds end here, although some ratio cannot be told from 1.
    """
    from megatron.training import get_args, training

    from megatron_r3.train.launch import train
    from megatron_r3.train.step import made_of
    from proof.fidelity.script import datasets, forward_step

    rounds = Rounds(most, WAYS)
    sys.argv = ["balance.py", *argv, "--moe-router-replay", "--finetune", "--no-load-optim"]
    sys.argv += ["--no-load-rng", "--micro-batch-size", str(BATCH), "--lr", "1e-30"]
    sys.argv += ["--global-batch-size", str(ROLLOUTS), "--train-iters", str(rounds.most_steps)]
    sys.argv += ["--moe-router-load-balancing-type", "none", "--calculate-per-token-loss"]
    sys.argv += ["--log-interval", "1000", "--moe-router-replay-log-mismatch-interval", "0"]
    sys.argv += ["--moe-router-replay-guest-tokens", "1", "--rollouts-policy", "any"]
    layers: list[_Layer] = []
    spent = Spent()
    train_step = training.train_step
    layer_s: dict[str, list[float]] = {way: [] for way in WAYS}

    def step(*step_args: Any, **kwargs: Any) -> Any:
        way = rounds.mode()
        timed_round = rounds.done >= len(WAYS) and not rounds.counting
        for layer in layers:
            layer.go(way)
        torch.distributed.barrier()
        wall, cpu, in_layers = time.perf_counter(), time.process_time(), spent.layers_s
        rounds.open_step()
        result = train_step(*step_args, **kwargs)
        mine = [time.perf_counter() - wall, time.process_time() - cpu]
        busiest = torch.tensor(spent.layers_s - in_layers, dtype=torch.float64)
        torch.distributed.all_reduce(busiest, torch.distributed.ReduceOp.MAX)
        if timed_round:
            layer_s[way].append(float(busiest))
        if rounds.close_step(mine):  # the loop of Megatron's train() asks before every step
            get_args().train_iters = rounds.done
        return result

    def prepared(models: list[torch.nn.Module]) -> None:
        from megatron_r3.replay.layers import local_moe_layers

        for model in models:
            layers.extend(_Layer(layer, spent) for layer in local_moe_layers(model).values())
        spent.watch_transfers()

    training.train_step = step
    with made_of(_parts_in_turn(spent, rounds)):
        train(datasets, forward_step, prepared)
    return {
        "wall_s": rounds.wall_s,
        "cpu_s": rounds.cpu_s,
        "layer_s": layer_s,
        "load": {way: busiest / mean for way, (busiest, mean) in spent.load.items()},
        "guests": spent.guests / spent.plans[GUESTS],
        "bytes": spent.bytes / spent.plans[GUESTS],
        "waiting_s": spent.waiting_s / spent.plans[GUESTS],
        "planning_s": {way: spent.planning_s[way] / spent.plans[way] for way in WAYS},
    }


class Spent:
    """What this rank spent, and what its plans said.

    Attributes:
        layers_s: CPU seconds of this thread inside MoE layers, forward and backward.
        planning_s, plans: of all micro-batches of a way: CPU seconds, and their number.
        load: sums of the busiest rank's load and of the mean, over layers and micro-batches.
        guests: of this rank, in all micro-batches and layers.
        bytes: that this rank sent to guests, and of gradients home.
        waiting_s: seconds that this rank was held up by them, weights and gradients; those that
            arrive while a layer computes hold nobody up.
    """

    def __init__(self) -> None:
        self.layers_s = 0.0
        self.planning_s, self.plans = Counter[str](), Counter[str]()
        self.load = {way: [0.0, 0.0] for way in WAYS}
        self.guests = self.bytes = 0
        self.waiting_s = 0.0

    def add_plan(self, way: str, plan: Any) -> None:
        """Count a plan."""
        self.plans[way] += 1
        for sizes in plan.values():
            self.load[way][0] += float(sizes.rank_load.max())
            self.load[way][1] += float(sizes.rank_load.mean())
            if sizes.guests is not None:
                self.guests += len(sizes.guests.expert_of_slot)

    def watch_transfers(self) -> None:
        """Count what guests' collectives send from now on, and how long they hold this rank up."""
        from megatron_r3.balance.travel import Slots
        from megatron_r3.seams import guests

        def held_up(method: Any) -> Any:
            def timed_method(*given: Any) -> Any:
                begin = time.perf_counter()
                result = method(*given)
                self.waiting_s += time.perf_counter() - begin
                return result

            return timed_method

        Slots.fetch = held_up(Slots.fetch)  # type: ignore[method-assign]
        Slots.send_home = held_up(Slots.send_home)  # type: ignore[method-assign]

        exchange, shared = torch.distributed.all_to_all_single, guests._shared

        def counted(received: Any, sent: Any, *more: Any, group: Any = None, **named: Any) -> Any:
            if any(group is one.group for one in shared.values()):
                self.bytes += sent.numel() * sent.element_size()
            return exchange(received, sent, *more, group=group, **named)

        torch.distributed.all_to_all_single = counted


class _Layer:
    """A MoE layer that can be used with and without guest slots, and whose time is taken."""

    def __init__(self, layer: Any, spent: Spent) -> None:
        self.layer, self.guests, self.began = layer, layer.guests, 0.0
        places = self.guests.dispatcher
        self.plain = type(places)(
            layer.num_local_experts,
            layer.local_expert_indices,
            config=layer.config,
            pg_collection=self._groups(),
        )
        self.plain.plan_hook = places.plan_hook

        def begin(*_: Any) -> None:
            self.began = time.thread_time()

        def end(*_: Any) -> None:
            spent.layers_s += time.thread_time() - self.began

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
        layer.register_full_backward_pre_hook(begin)
        layer.register_full_backward_hook(end)

    def go(self, way: str) -> None:
        """Use the layer in this way from now on."""
        self.layer.guests = None if way == OFF else self.guests
        self.layer.token_dispatcher = self.plain if way == OFF else self.guests.dispatcher

    @staticmethod
    def _groups() -> Any:
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        return get_default_pg_collection()


def _parts_in_turn(spent: Spent, rounds: Rounds) -> Any:
    """The parts of a training whose steps go the ways in turn."""
    from megatron_r3.balance.places import sizes_with_guests
    from megatron_r3.replay.plan import layer_sizes
    from megatron_r3.replay.planner import Planner
    from megatron_r3.train.step import Parts

    ways = modes_of_microbatches(rounds)

    class TurnedPlanner(Planner):
        def __init__(self, config: Any, *given: Any) -> None:
            super().__init__(config, *given)
            never = copy.copy(config)  # there are slots, and no expert is worth one
            never.moe_router_replay_guest_tokens = NEVER
            of_guests = self._sizes_of
            self.ways = {OFF: layer_sizes, EMPTY: sizes_with_guests(never), GUESTS: of_guests}

        def plan(self, routes: Any) -> Any:
            way = next(ways)  # each micro-batch is planned once
            self._sizes_of = self.ways[way]
            begin = time.thread_time()
            plan = super().plan(routes)
            spent.planning_s[way] += time.thread_time() - begin
            spent.add_plan(way, plan)
            return plan

    return Parts(planner=TurnedPlanner)
