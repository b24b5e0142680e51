"""Where each token goes once hot experts have guests, and which weights go to which rank.

A rank has a place for each of its own experts, and then its guest slots. Example with 2 ranks, 4
experts and one slot a rank: the places 0 1 2 of rank 0 hold the experts 0 1 and a guest, the places
3 4 5 of rank 1 the experts 2 3 and a guest. For the dispatcher each place is an expert, so only the
number of experts changes.

The home of an expert is its place on its own rank. To decide which of an expert's tokens go to a
guest, the tokens of all ranks are put in a row, those of the expert's own rank first. The home
takes the first tokens, each guest the next ones. Example: ranks 0 and 1 send 4 and 5 tokens to
expert 0 of rank 0, and the guest on rank 1 takes 3 of these 9. So 6 stay: all 4 of rank 0 and the
first 2 of rank 1. Tokens 3 to 5 of rank 1, counted from 1, go to the guest.

Shape suffixes (docs/glossary.md): E, I, L, R, T, V.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.balance.moves import Moves, plan_moves, rank_load
from megatron_r3.replay.plan import ExpertRanks, LayerSizes, check_totals, layer_sizes
from megatron_r3.replay.planner import SizesOf


@dataclass(frozen=True)
class LayerGuests:
    """The guests of one layer, as one rank needs to know them.

    Attributes:
        packed: int64, pinned if there is a GPU: all that the device needs, in one tensor. First the
            expert of each of the I places, 0 for an empty slot. Then the places with bounds: all
            slots, and the homes of the experts that have guests. Then the bounds `low` and `high`
            of each: of the tokens that this rank sends to the expert, counted from 1, the place
            gets `low` + 1 to `high`. An empty slot gets none.
        num_places: the number of places, I.
        sends: for each rank, which of this rank's own experts, counted from 0, have a guest there.
        receives: how many guests of this rank come from each rank. This rank's slots hold guests in
            the order of those ranks.
        expert_of_slot: the expert of each guest of this rank.
    """

    packed: Tensor
    num_places: int
    sends: list[list[int]]
    receives: list[int]
    expert_of_slot: list[int]

    def on_device(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The parts of `packed`, copied at once: experts `[I]`; places, low and high `[V]`."""
        packed = self.packed.to(device, non_blocking=True)
        num_bounded = (len(packed) - self.num_places) // 3
        expert_I, place_V, low_V, high_V = packed.split([self.num_places, *[num_bounded] * 3])
        return expert_I, place_V, low_V, high_V

    def to_places(self, probs_TE: Tensor, map_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and routing map of this rank's tokens by place, both `[T, I]`.

        Example: the tokens 0 2 3 take expert 1, so they are the 1st, 2nd and 3rd that this rank
        sends there. The home has the bounds 0 and 2 and takes the 1st and 2nd; the guest has the
        bounds 2 and 3 and takes the 3rd, which is token 3.
        """
        expert_I, place_V, low_V, high_V = self.on_device(map_TE.device)
        map_TI = map_TE.index_select(1, expert_I)
        nth_TV = map_TE.index_select(1, expert_I[place_V]).cumsum(0)
        map_TI[:, place_V] &= (nth_TV > low_V) & (nth_TV <= high_V)
        return probs_TE.index_select(1, expert_I) * map_TI, map_TI


def own_places(num_experts: int, num_ranks: int, slots: int) -> np.ndarray:
    """The place of each expert on its own rank, int64 `[E]`.

    Example: with 4 experts, 2 ranks and 1 slot the places are 0 1 3 4.
    """
    num_local = num_experts // num_ranks
    expert_E = np.arange(num_experts)
    return expert_E // num_local * (num_local + slots) + expert_E % num_local


def place_tokens(
    counts_RLE: np.ndarray, moves: Moves, slots: int, rank: int
) -> tuple[np.ndarray, list[LayerGuests | None]]:
    """How many tokens each rank sends to each place, and the guests of each layer.

    Args:
        counts_RLE: how many tokens each rank sends to each expert.
        moves: planned for the sum of `counts_RLE` over all ranks.
        slots: guest slots of a rank.
        rank: the rank for which the guests are returned.

    Returns:
        The counts, int64 `[R, L, I]`, the same on every rank; and for each layer its guests, or
        None if the layer has none.
    """
    num_ranks, num_layers, num_experts = counts_RLE.shape
    num_local = num_experts // num_ranks
    own_E = own_places(num_experts, num_ranks, slots)
    counts_LIR = np.zeros((num_layers, num_ranks * (num_local + slots), num_ranks), np.int64)
    counts_LIR[:, own_E] = counts_RLE.transpose(1, 2, 0)
    # Sorted by layer, then by expert: in this order the weights of a rank's guests arrive.
    order = np.lexsort((moves.rank_V, moves.expert_V, moves.layer_V))
    layer_V, expert_V, rank_V, tokens_V = (
        a[order] for a in (moves.layer_V, moves.expert_V, moves.rank_V, moves.tokens_V)
    )
    home_V = expert_V // num_local
    sent_RV = counts_RLE[:, layer_V, expert_V].astype(np.int64)
    # For each rank: how many tokens of other ranks stand before its own in the expert's row of
    # tokens (see the top of the file).
    turn_RV = (home_V + np.arange(num_ranks)[:, None]) % num_ranks
    in_turn_RV = np.take_along_axis(sent_RV, turn_RV, 0)
    before_RV = np.empty_like(sent_RV)
    np.put_along_axis(before_RV, turn_RV, in_turn_RV.cumsum(0) - in_turn_RV, 0)
    # Guests of one expert are neighbours here, and take the end of the expert's row of tokens.
    same_V = layer_V * num_experts + expert_V
    after_V = _sum_from_here(tokens_V, same_V)
    begin_V = sent_RV.sum(0) - after_V
    low_RV = np.clip(begin_V - before_RV, 0, sent_RV)
    high_RV = np.clip(begin_V + tokens_V - before_RV, 0, sent_RV)
    slot_V = _number_of_equals(layer_V * num_ranks + rank_V)
    guest_V = rank_V * (num_local + slots) + num_local + slot_V
    counts_LIR[layer_V, guest_V] = (high_RV - low_RV).T
    np.subtract.at(counts_LIR, (layer_V, own_E[expert_V]), (high_RV - low_RV).T)

    expert_I = np.zeros(num_ranks * (num_local + slots), np.int64)
    expert_I[own_E] = np.arange(num_experts)
    slots_I = np.setdiff1d(np.arange(len(expert_I)), own_E)
    guests: list[LayerGuests | None] = [None] * num_layers
    for layer in np.unique(layer_V).tolist():
        here = np.flatnonzero(layer_V == layer)
        of_layer_I = expert_I.copy()
        of_layer_I[guest_V[here]] = expert_V[here]
        homes = own_E[np.unique(expert_V[here])]
        empty = np.setdiff1d(slots_I, guest_V[here])
        none = np.zeros(len(empty), np.int64)
        parts = (
            of_layer_I,
            np.concatenate([guest_V[here], homes, empty]),
            np.concatenate([low_RV[rank, here], np.zeros(len(homes), np.int64), none]),
            np.concatenate([high_RV[rank, here], counts_LIR[layer, homes, rank], none]),
        )
        experts, ranks, from_ranks = (a[here] for a in (expert_V, rank_V, home_V))
        mine, visiting = from_ranks == rank, ranks == rank
        guests[layer] = LayerGuests(
            packed=_pinned(np.concatenate(parts)),
            num_places=len(expert_I),
            sends=[(experts[mine & (ranks == r)] % num_local).tolist() for r in range(num_ranks)],
            receives=np.bincount(from_ranks[visiting], minlength=num_ranks).tolist(),
            expert_of_slot=experts[visiting].tolist(),
        )
    return counts_LIR.transpose(2, 0, 1), guests


def sizes_with_guests(config: Any) -> SizesOf:
    """The function that plans a micro-batch with as many guest slots as the config has.

    Every rank works out the same guests from the gathered counts, without a collective.
    """
    slots = config.moe_router_replay_guest_slots
    domain, least = config.moe_router_replay_guest_domain, config.moe_router_replay_guest_tokens

    def sizes_of(
        counts_RLE: np.ndarray, ranks: ExpertRanks, layer_numbers: list[int]
    ) -> dict[int, LayerSizes]:
        load_LE, size = counts_RLE.sum(0, dtype=np.int64), len(counts_RLE)
        moves = plan_moves(load_LE, size, slots, domain=domain, least_tokens=least)
        counts_RLI, guests = place_tokens(counts_RLE, moves, slots, ranks.rank)
        check_totals(counts_RLI.sum(2), layer_numbers)
        places = counts_RLI.shape[2] // ranks.expert_size
        first = ranks.expert_rank * places
        arriving = counts_RLI[:, :, first : first + places]
        sizes = layer_sizes(counts_RLI[ranks.rank], arriving, ranks, layer_numbers)
        at_home_L = rank_load(load_LE, size)[:, ranks.rank].tolist()
        return {
            number: replace(sizes[number], guests=of_layer, load_at_home=at_home)
            for number, of_layer, at_home in zip(layer_numbers, guests, at_home_L, strict=True)
        }

    return sizes_of


def _pinned(numbers: np.ndarray) -> Tensor:
    """The numbers as a tensor; with a GPU in pinned memory, so that copying does not block."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _sum_from_here(values_V: np.ndarray, key_V: np.ndarray) -> np.ndarray:
    """For each value the sum of it and all later values with its key; equal keys are neighbours.

    Example: the values 3 2 4 with the keys 0 0 1 give 5 2 4.
    """
    sums_V = values_V[::-1].cumsum()[::-1]
    end_V = np.searchsorted(key_V, key_V, side="right")
    return sums_V - np.append(sums_V, 0)[end_V]


def _number_of_equals(key_V: np.ndarray) -> np.ndarray:
    """For each key how many equal ones stand before it. Example: 5 7 5 5 gives 0 0 1 2."""
    order = np.argsort(key_V, kind="stable")
    in_order_V = key_V[order]
    number_V = np.empty(len(key_V), np.int64)
    number_V[order] = np.arange(len(key_V)) - np.searchsorted(in_order_V, in_order_V)
    return number_V
