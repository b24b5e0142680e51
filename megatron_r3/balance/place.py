"""Which experts should share a node, and which a rank, so that known loads are even.

ForeMoE's paper (arXiv 2606.11867) reports that the load of a training step is much like that of the
step before. So a placement that was made from one store should serve the stores after it;
`rollouts skew --placement` on a later store shows whether it does. Nodes come first: guests even
out the ranks of a node in every micro-batch (megatron_r3/guests), and cannot leave the node.

Shape suffixes (docs/glossary.md): E, L, V.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_r3.balance.skew import ratio
from megatron_r3.guests.moves import rank_load
from megatron_r3.placement import Placement
from megatron_r3.store import RolloutStore


def total_load(store: RolloutStore) -> np.ndarray:
    """How many rows of all rollouts take each expert, int64 `[L, E]`.

    A shard that an earlier megatron-r3 wrote does not have its load, so its routes are counted.

    Raises:
        ValueError: the store is empty, or a shard is damaged.
    """
    if not store.shards:
        raise ValueError(f"{store.directories[0]}: no rollouts, so no loads to share out")
    load_LE = np.zeros((len(store.info.moe_layers), store.info.num_experts), np.int64)
    for shard in store.shards:
        load_LE += shard.expert_load().sum(0)
    return load_LE


def unevenness(load_LE: np.ndarray, parts: int) -> float:
    """The busiest part's load by the mean, over all layers. A part has as many places as another.

    A part is a rank, or the ranks of a domain together.
    """
    load_LV = rank_load(load_LE, parts)
    return ratio(load_LV.max(1).sum(), load_LV.mean(1).sum())


def plan_placement(
    load_LE: np.ndarray, moe_layers: Sequence[int], ep: int, domain: int, groups: int = 1
) -> Placement:
    """Share out the experts of each layer over the domains, then over the ranks of each.

    Example: 256 experts in 8 groups, EP 32, domains of 8 ranks. A domain has 64 places, so it has 2
    groups; a rank has 8 places. First the 8 groups are shared out over the 4 domains, then the
    experts of each group over its 4 ranks.

    Args:
        load_LE: of the experts.
        moe_layers: their layers.
        ep: ranks that share the experts.
        domain: ranks of a domain.
        groups: of the router. Experts of one group stay together, in a range of places as long as
            the group.

    Raises:
        ValueError: the experts cannot be shared out so.
    """
    num_layers, experts = load_LE.shape
    for name, parts in (("--ep", ep), ("--groups", groups)):
        if experts % parts:
            raise ValueError(f"{name} {parts}: the store has {experts} experts: give a divisor")
    if ep % domain:
        raise ValueError(f"--domain {domain}: {ep} ranks are no whole number of domains")
    of_domain, of_rank, of_group = experts // ep * domain, experts // ep, experts // groups
    sizes = sorted({of_domain, of_rank, of_group} - {experts}, reverse=True)
    for size, smaller in pairwise(sizes):
        if size % smaller:
            raise ValueError(
                f"--groups {groups}: a group has {of_group} experts, a domain {of_domain} and a "
                f"rank {of_rank}: {size} is no multiple of {smaller}, so groups would be taken "
                "apart: give another --ep or --domain"
            )
    # expert_LE: which expert is at each place. A range of places is shared out over smaller ones,
    # from the domains down to the ranks.
    expert_LE = np.tile(np.arange(experts), (num_layers, 1))
    whole = experts
    for size in sizes:
        # Groups move as a whole until the places of one group are shared out.
        unit = of_group if size >= of_group and groups > 1 else 1
        for layer in range(num_layers):
            for begin in range(0, experts, whole):
                here = expert_LE[layer, begin : begin + whole].reshape(-1, unit)
                loads = load_LE[layer, here].sum(1)
                bins = shared_out(loads, whole // size)
                expert_LE[layer, begin : begin + whole] = here[np.concatenate(bins)].ravel()
        whole = size
    return Placement(tuple(moe_layers), np.argsort(expert_LE, axis=1))


def shared_out(load_V: np.ndarray, parts: int) -> list[np.ndarray]:
    """Equally many units for each part, with loads as even as exchanges of two units make them.

    The heaviest unit goes to the lightest part that has room (Graham's longest processing time
    first). Then the heaviest part exchanges a unit with another part as long as this makes the
    heavier of the two lighter, and is more than a thousandth of the mean above it.

    Returns:
        The units of each part, ascending.
    """
    room = len(load_V) // parts
    units: list[list[int]] = [[] for _ in range(parts)]
    loads = np.zeros(parts, np.int64)
    for unit in np.argsort(-load_V, kind="stable").tolist():
        open_parts = [part for part in range(parts) if len(units[part]) < room]
        part = min(open_parts, key=lambda one: loads[one])
        units[part].append(unit)
        loads[part] += load_V[unit]
    # An exchange lowers the sum of squares of whole numbers, so this ends.
    while _exchange(load_V, units, loads):
        pass
    return [np.sort(part) for part in units]


def _exchange(load_V: np.ndarray, units: list[list[int]], loads: np.ndarray) -> bool:
    """Exchange two units between the heaviest part and the part where that helps most.

    Example: parts of 10 and 6 exchange units of 5 and 3: both have 8 afterwards.

    Returns:
        Whether there was such an exchange; `units` and `loads` are changed.
    """
    heavy, enough = int(loads.argmax()), max(2, int(loads.mean()) // 1000)
    best = (int(loads[heavy]), -1, -1, -1)
    for light in range(len(units)):
        gap = int(loads[heavy] - loads[light])
        if gap < enough:
            continue
        moved = load_V[units[heavy]][:, None] - load_V[units[light]][None]
        heavier = np.where((moved > 0) & (moved < gap), np.maximum(gap - moved, moved), gap)
        at = divmod(int(heavier.argmin()), heavier.shape[1])
        best = min(best, (int(loads[light] + heavier[at]), light, *at))
    _, light, i, j = best
    if light < 0:
        return False
    less = load_V[units[heavy][i]] - load_V[units[light][j]]
    units[heavy][i], units[light][j] = units[light][j], units[heavy][i]
    loads[heavy] -= less
    loads[light] += less
    return True
