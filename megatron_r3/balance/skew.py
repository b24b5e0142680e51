"""How unevenly the rollouts of stores load the ranks: in their order, shuffled, and with guests.

Nothing is trained: the rows of each rollout that take each expert are counted. The time on a GPU is
not estimated.

Shape suffixes (docs/glossary.md): E, L, M, R, V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_r3.balance.moves import LEAST_TOKENS, plan_moves, rank_load
from megatron_r3.data.store import RolloutStore
from megatron_r3.data.store.expert_load import expert_load
from megatron_r3.train.schedule import Schedule

ORDERS = ("store", "shuffled")
SEED = 1  # of the shuffle, which is that of --rollouts-shuffle over one batch of all rollouts


@dataclass(frozen=True)
class SkewPlan:
    """What `measure_skew` works out.

    Attributes:
        ep: sizes of the expert-parallel group.
        slots: numbers of guest slots of a rank; 0 is without guests.
        micro_batch_size: rollouts of a rank in one micro-batch.
        ranks_per_rollout: how many ranks have the same rollouts, because tensor or context
            parallelism shares out the tokens of a rollout.
        domain: a guest is in its expert's block of so many neighbouring ranks; None for no blocks.
        least_tokens: fewest tokens of a guest.
    """

    ep: Sequence[int]
    slots: Sequence[int] = (0, 1, 2)
    micro_batch_size: int = 1
    ranks_per_rollout: int = 1
    domain: int | None = None
    least_tokens: int = LEAST_TOKENS


def measure_skew(store: RolloutStore, plan: SkewPlan) -> dict[str, Any]:
    """The busiest rank's load divided by the mean, for each size, order and number of slots.

    In a micro-batch a group of R ranks takes the next R * `micro_batch_size` /
    `ranks_per_rollout` rollouts, as Megatron's data samplers deal them out. Rollouts that do not
    fill a micro-batch are left out.

    Returns:
        Numbers for JSON: the plan, facts of the store, and `sizes`, which has an entry for each
        size. An entry has the numbers of micro-batches and of rollouts that are left out. By order
        and slots it also has `all`: the busiest ranks' loads, summed over layers and micro-batches,
        divided by the sum of the mean loads (the factor by which the experts take longer than with
        equal loads); `layers` and `micro_batches`: this quotient for each layer, and for each
        micro-batch; `guests`: the mean number of guests of a rank in a layer.

    Raises:
        ValueError: a size or another number of the plan does not fit the store.
    """
    _check(store, plan)
    load_MLE, rollouts = _loads(store), len(store)
    orders = {
        "store": np.arange(rollouts),
        "shuffled": np.array([*map(Schedule(rollouts, seed=SEED).mixed, range(rollouts))]),
    }
    return {
        "directories": [str(directory) for directory in store.directories],
        "rollouts": rollouts,
        "num_experts": store.info.num_experts,
        "topk": store.info.topk,
        "moe_layers": list(store.info.moe_layers),
        "micro_batch_size": plan.micro_batch_size,
        "ranks_per_rollout": plan.ranks_per_rollout,
        "domain": plan.domain,
        "least_tokens": plan.least_tokens,
        "sizes": [_of_size(load_MLE, orders, ep, plan) for ep in plan.ep],
    }


def _check(store: RolloutStore, plan: SkewPlan) -> None:
    experts = store.info.num_experts
    stores_have = " and ".join(map(str, store.directories))
    stores_have += " has" if len(store.directories) == 1 else " have"
    for ep in plan.ep:
        if experts % ep:
            raise ValueError(
                f"--ep {ep}: the {experts} experts of {store.directories[0]} cannot be shared out "
                f"among {ep} ranks: give a divisor of {experts}"
            )
        if plan.domain is not None and ep > plan.domain and ep % plan.domain:
            raise ValueError(
                f"--domain {plan.domain}: {ep} ranks cannot be divided into domains of that "
                f"size: give a divisor of {ep}"
            )
        if ep % plan.ranks_per_rollout:
            raise ValueError(
                f"--ranks-per-rollout {plan.ranks_per_rollout}: {ep} ranks cannot be divided into "
                f"groups of that size: give a divisor of {ep}"
            )
        needed = _together(ep, plan)
        if needed > len(store):
            raise ValueError(
                f"--ep {ep}: a micro-batch of {ep} ranks has {needed} rollouts; "
                f"{stores_have} {len(store)}: give a smaller --ep or a larger store"
            )


def _together(ep: int, plan: SkewPlan) -> int:
    """How many rollouts the ranks of a group have in one micro-batch."""
    return ep // plan.ranks_per_rollout * plan.micro_batch_size


def _loads(store: RolloutStore) -> np.ndarray:
    """The load of each rollout `[M, L, E]`, in the smallest integer type that can hold it.

    Example: 100,000 rollouts of 48 layers with 128 experts are 4.9 GB in 64 bits, 1.2 GB in 16.
    """
    dtype = np.min_scalar_type(int(store.column("num_tokens").max()) * store.info.topk)
    load_MLE = np.empty((len(store), len(store.info.moe_layers), store.info.num_experts), dtype)
    for rollout in range(len(store)):
        load_MLE[rollout] = expert_load(store, rollout)
    return load_MLE


def _of_size(
    load_MLE: np.ndarray, orders: dict[str, np.ndarray], ep: int, plan: SkewPlan
) -> dict[str, Any]:
    each = _together(ep, plan)
    number = len(load_MLE) // each
    found: dict[str, Any] = {
        "ep": ep,
        "micro_batches": number,
        "rollouts_left_out": len(load_MLE) - number * each,
    }
    for name, order_M in orders.items():
        batches = order_M[: number * each].reshape(number, each)
        loads = [load_MLE[rollouts].sum(0, dtype=np.int64) for rollouts in batches]
        found[name] = {str(slots): _with_slots(loads, ep, slots, plan) for slots in plan.slots}
    return found


def _with_slots(loads: Sequence[np.ndarray], ep: int, slots: int, plan: SkewPlan) -> dict[str, Any]:
    num_layers = len(loads[0])
    busiest, mean = np.zeros((len(loads), num_layers)), np.zeros((len(loads), num_layers))
    guests = 0
    for batch, load_LE in enumerate(loads):
        load_LR = rank_load(load_LE, ep)
        if slots:
            moves = plan_moves(
                load_LE, ep, slots, domain=plan.domain, least_tokens=plan.least_tokens
            )
            load_LR, guests = moves.load_LR, guests + len(moves.rank_V)
        busiest[batch], mean[batch] = load_LR.max(1), load_LR.mean(1)
    return {
        "all": ratio(busiest.sum(), mean.sum()),
        "layers": [ratio(*sums) for sums in zip(busiest.sum(0), mean.sum(0), strict=True)],
        "micro_batches": [ratio(*sums) for sums in zip(busiest.sum(1), mean.sum(1), strict=True)],
        "guests": guests / (len(loads) * num_layers * ep),
    }


def ratio(busiest: float, mean: float) -> float:
    """The busiest load divided by the mean; 1 if nothing was recorded, as with equal loads."""
    return float(busiest / mean) if mean else 1.0
