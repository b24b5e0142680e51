"""How often live routers would choose other experts: by layer, position, turn and policy version.

The counts stay on the device until the report, and are read with one wait. They are summed over all
ranks before shares are computed, so every share is exact in every layout.

Shape suffixes (docs/glossary.md): T, V, Y.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.truth.alarms import Alarm, table_alarms
from megatron_r3.data.truth.limit import NONE, Share
from megatron_r3.data.truth.mismatch_tables import (
    MOST_POSITIONS,
    MOST_TURNS,
    Tables,
    position_bins,
    position_name,
    turn_bins,
    turn_name,
)

if TYPE_CHECKING:
    from megatron_r3.replay.microbatch import MicrobatchRoutes
    from megatron_r3.replay.tally import Tally

MOST_LAGS = 5  # bins of lags (versions behind the newest of the step): 0, 1, 2, 3, and 4 or more
_PLACES = MOST_POSITIONS + MOST_TURNS + MOST_LAGS


@dataclass(frozen=True)
class Places:
    """Where each token of a micro-batch stands, on the host, in the order of the router.

    The mismatch is counted by position, by turn and by version.

    Attributes:
        position_T: the token's position in its rollout.
        turn_T: the turn of the next token, from 0 on; -1 if the next token was not sampled.
        version_T: the policy version that sampled the next token; -1 if it was not sampled.
    """

    position_T: np.ndarray
    turn_T: np.ndarray
    version_T: np.ndarray

    @classmethod
    def of(cls, batch: dict[str, Tensor], router_order: Callable[[Tensor], Tensor]) -> Places:
        """The Places of this rank's part of a batch."""
        names = ("position_ids", "turn", "version")
        return cls(*(router_order(batch[name]).numpy() for name in names))


Measured = Sequence[tuple["MicrobatchRoutes", Places]]


def measure(measured: Measured, num_layers: int) -> Tables:
    """The mismatch of a step, the same on all ranks. All ranks call this function together.

    Without sequence parallelism all ranks of a tensor-parallel group count the same tokens, in
    numerator and denominator alike, so the shares stay right.

    Args:
        measured: the micro-batches of this rank's model chunks.
        num_layers: decoder layers of the whole model.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    newest = _newest(measured, device)
    counts_Y4 = torch.zeros(num_layers, 4, dtype=torch.int64, device=device)
    places_V2 = torch.zeros(_PLACES, 2, dtype=torch.int64, device=device)
    for microbatch, places in measured:
        tally = microbatch.tally
        assert tally is not None
        assert tally.watched_T is not None
        tokens = torch.stack([tally.counted_T.sum(), tally.watched_T.sum()])
        for number, mismatched in tally.mismatched.items():
            wrong = torch.stack([mismatched, tally.mismatched_watched[number]])
            counts_Y4[number - 1] += torch.cat([wrong, tokens])
        if tally.mismatches_T is not None:
            _add_places(places_V2, tally, places, newest)
    # All ranks add the same newest version, so `_tables` gets the sum divided by their number.
    flat = torch.cat([counts_Y4.flatten(), places_V2.flatten(), newest[None]])
    torch.distributed.all_reduce(flat)
    numbers = flat.cpu().numpy()
    of_layers = numbers[: 4 * num_layers].reshape(num_layers, 4)
    of_places = numbers[4 * num_layers : -1].reshape(_PLACES, 2)
    return _tables(of_layers, of_places, int(numbers[-1]) // torch.distributed.get_world_size())


def _newest(measured: Measured, device: torch.device) -> Tensor:
    """The newest policy version of the step on any rank, a scalar on the device."""
    local = max((int(places.version_T.max(initial=-1)) for _, places in measured), default=-1)
    newest = torch.tensor(local, dtype=torch.int64).to(device, non_blocking=True)
    torch.distributed.all_reduce(newest, torch.distributed.ReduceOp.MAX)
    return newest


def _add_places(places_V2: Tensor, tally: Tally, places: Places, newest: Tensor) -> None:
    """Add to `places_V2` the (token, layer) pairs of a micro-batch: those that differ, and all.

    The bins of positions come first, then the bins of turns, then the bins of lags. A token counts
    in its position alone if the next token was not sampled.
    """
    assert tally.mismatches_T is not None
    assert tally.watched_T is not None
    device = places_V2.device
    host_T = np.stack([position_bins(places.position_T), turn_bins(places.turn_T)])
    position_T, turn_T = torch.from_numpy(host_T).to(device, non_blocking=True)
    version_T = torch.from_numpy(places.version_T).to(device, non_blocking=True)
    lag_T = (newest - version_T).clamp(max=MOST_LAGS - 1)
    all_T = tally.watched_T.long() * len(tally.mismatched)
    pairs_T2 = torch.stack([tally.mismatches_T.long(), all_T], dim=1)
    is_sampled_T = (turn_T >= 0).long()[:, None]
    start = 0
    for label_T, counted_T2, size in (
        (position_T, pairs_T2, MOST_POSITIONS),
        (turn_T.clamp(min=0), pairs_T2 * is_sampled_T, MOST_TURNS),
        (lag_T, pairs_T2 * is_sampled_T, MOST_LAGS),
    ):
        places_V2[start : start + size].index_add_(0, label_T, counted_T2)
        start += size


def _tables(counts_Y4: np.ndarray, places_V2: np.ndarray, newest: int) -> Tables:
    """The counts as shares.

    Args:
        counts_Y4: for each layer how many response tokens differ, how many tokens differ, how many
            response tokens there are, and how many tokens.
        places_V2: for each bin of positions, turns and lags how many (token, layer) pairs differ,
            and how many pairs there are.
        newest: the newest policy version of the step.
    """
    num_moe = max(int((counts_Y4[:, 3] > 0).sum()), 1)
    ends = np.cumsum([MOST_POSITIONS, MOST_TURNS, MOST_LAGS])
    positions, turns, lags = (_shares(part, num_moe) for part in np.split(places_V2, ends[:-1]))
    responses_Y2 = counts_Y4[:, [0, 2]]
    prompts_Y2 = counts_Y4[:, [1, 3]] - responses_Y2
    return Tables(
        layers={index + 1: share for index, share in _shares(responses_Y2, 1).items()},
        positions=positions,
        turns=turns,
        versions={newest - lag: share for lag, share in lags.items()},
        prompts=_shares(prompts_Y2.sum(0, keepdims=True), num_moe).get(0, NONE),
        responses=_shares(responses_Y2.sum(0, keepdims=True), num_moe).get(0, NONE),
    )


def _shares(counts_V2: np.ndarray, layers: int) -> dict[int, Share]:
    """For each index of V with any count the share that differs, and how many rows of a layer."""
    return {
        index: Share(wrong / of, of / layers)
        for index, (wrong, of) in enumerate(counts_V2.tolist())
        if of
    }


def scalars_of(tables: Tables) -> dict[str, float]:
    """The values to log, by name. A share for which nothing was compared is left out."""
    if not tables.layers:
        return {}
    newest = max(tables.versions)
    lags = {newest - version: share for version, share in tables.versions.items()}
    named = {"router mismatch": tables.responses}
    named |= {f"router mismatch/layer {n}": share for n, share in tables.layers.items()}
    for number, share in tables.positions.items():
        named[f"router mismatch/position {position_name(number)}"] = share
    named["router mismatch/prompt"] = tables.prompts
    for number, share in tables.turns.items():
        named[f"router mismatch/turn {turn_name(number)}"] = share
    for lag, share in sorted(lags.items()):
        words = f"{lag} or more" if lag == MOST_LAGS - 1 else f"{lag}"
        named[f"router mismatch/lag {words}"] = share
    return {name: share.share for name, share in named.items() if share.rows}


class StepAlarms:
    """The alarms of a training's steps; an alarm that goes on is reported in its first step alone.

    `StepMetrics` gives only the first step on each collection: while the trainer learns from the
    rollouts it moves away from them, so shares grow without a fault.
    """

    def __init__(self) -> None:
        self._before: set[str] = set()

    def look(self, tables: Tables) -> tuple[int, list[Alarm]]:
        """How many alarms a step has, and the alarms that the step of the last call did not have.

        `table_alarms` decides what raises an alarm.
        """
        alarms = table_alarms(tables, model="the trainer")
        new = [alarm for alarm in alarms if alarm.cause not in self._before]
        self._before = {alarm.cause for alarm in alarms}
        return len(alarms), new
