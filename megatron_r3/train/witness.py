"""Compare what reached each expert, after dispatch, with the recorded routes.

A dispatcher moves hidden states without arithmetic, so a token's hidden state is recognised at the
expert by its bytes. Neither router nor replay is asked where a token went. Two tokens with the same
bytes get the same result from an expert, so it does not matter which of them arrived.

Shape suffixes (docs/glossary.md): H, I, K, L, P, T.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.rollout import Rollout
from megatron_r3.data.store.schema import StoreError
from megatron_r3.replay.active import active_microbatch
from megatron_r3.replay.layers import local_moe_layers
from megatron_r3.replay.microbatch import MicrobatchRoutes
from megatron_r3.replay.plan import pads
from megatron_r3.replay.routes import MoEShape
from megatron_r3.replay.rows import PADDING
from megatron_r3.train.old_policy import OldPolicy
from megatron_r3.train.refuse import refuse
from megatron_r3.train.schedule import SOURCES

_ROLLOUT, _OLD_POLICY = SOURCES.index("rollout"), SOURCES.index("old-policy")


class Watched(NamedTuple):
    """The tokens of a micro-batch, and their recorded routes.

    Attributes:
        rows_T: row ids, in the router's order.
        source_T: where the routes of each token come from, an index of `SOURCES`.
        tokens: the indices of the tokens that take a recorded route of their rollout, int64.
        ids_LTK: the recorded routes of `tokens` alone, in all MoE layers of the store.
    """

    rows_T: np.ndarray
    source_T: np.ndarray
    tokens: np.ndarray
    ids_LTK: np.ndarray


class Records(Protocol):
    """What was sampled: a `RolloutStore`, or the turns of Megatron's RL loop."""

    @property
    def info(self) -> MoEShape: ...  # noqa: D102

    def locate(self, row: int) -> tuple[int, int]:
        """The index of the rollout with this row id, and the token's index in the rollout."""

    def rollout(self, index: int) -> Rollout:
        """The rollout of this index, with its routes."""


class Counter(Protocol):
    """What counts (token, expert) pairs: `StepMetrics`, or the replay of Megatron's RL loop."""

    def add_dispatched(self, matched: int, total: int) -> None:
        """Count the pairs that reached the recorded expert, and all pairs."""


def row_hashes(hidden_TH: Tensor) -> np.ndarray:
    """A 64-bit hash of each row's bytes, uint64 `[T]`.

    Each row is read as 16-bit words w0, w1, ... and hashed to w0 * a0 + w1 * a1 + ... modulo 2^64.
    The factors a are odd and drawn at random, but the same in every process.
    """
    words = hidden_TH.detach().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * 2 + 1
    # einsum, since `words * weights` would take 4.3 GB for 262,144 rows of 2,048 words
    return np.einsum("tw,w->t", words, weights)


def _pairs(hashes_P: np.ndarray, experts_P: np.ndarray) -> np.ndarray:
    return np.stack([hashes_P, experts_P.astype(np.uint64)], axis=1)


def matches(
    expected: np.ndarray, ignored: np.ndarray, received: np.ndarray, weightless: np.ndarray
) -> tuple[int, int]:
    """Compare multisets of (hash, expert) pairs, `[P, 2]`: the recorded and the arrived pairs.

    Args:
        expected: pairs of recorded tokens, as the store says.
        ignored: pairs of padding and of tokens without a recorded route, as they were sent.
        received: what the experts got.
        weightless: the pairs of `received` with weight 0: padding of a sequence, or padding of an
            expert's tokens for quantization. A weightless pair is left out if it was not recorded.

    Returns:
        How many recorded pairs arrived; and how many pairs were recorded, or how many arrived if
        more arrived. Example: expected {a, a, b}, ignored {c}, received {a, b, b, c, d}, weightless
        {d}: without c and d, {a, b, b} arrived. a and b match once each, so the result is (2, 3).
    """
    # Each pair becomes one number, hash + expert * an odd number modulo 2^64, since numbers are
    # sorted much faster than pairs. Two different pairs get the same number as rarely as two
    # different rows get the same hash.
    pairs_P2 = np.concatenate([expected, ignored, received, weightless])
    number_P = pairs_P2[:, 0] + pairs_P2[:, 1] * np.uint64(0x9E3779B97F4A7C15)
    keys, index = np.unique(number_P, return_inverse=True)
    splits = np.split(index.reshape(-1), np.cumsum([len(expected), len(ignored), len(received)]))
    expected_n, ignored_n, received_n, weightless_n = (
        np.bincount(i, minlength=len(keys)) for i in splits
    )
    arrived_n = np.maximum(received_n - ignored_n, 0)
    matched_n = np.minimum(expected_n, arrived_n)
    arrived_n -= np.minimum(weightless_n, arrived_n - matched_n)
    return int(matched_n.sum()), int(max(expected_n.sum(), arrived_n.sum()))


class DispatchWitness:
    """Counts, in every pass of watched microbatches, the pairs that reached the recorded expert.

    Args:
        store: the record of the rollouts.
        old: the record of the old policy. None if there is none: tokens that take the old policy's
            routes are then not compared.
    """

    def __init__(self, store: Records, old: OldPolicy | None = None) -> None:
        self.store, self.old = store, old
        self.watched: WeakKeyDictionary[MicrobatchRoutes, Watched] = WeakKeyDictionary()

    def watch(self, microbatch: MicrobatchRoutes, rows_T: np.ndarray, source_T: np.ndarray) -> None:
        """Watch this microbatch.

        The routes are read rollout by rollout, by other code than the code of replay, so that a
        fault in replay's reading shows here.

        Args:
            rows_T, source_T: see `Watched`. Tokens that route live are not compared.
        """
        places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for token in np.flatnonzero((source_T == _ROLLOUT) & (rows_T != PADDING)).tolist():
            rollout, at = self.store.locate(int(rows_T[token]))
            places[rollout].append((token, at))
        tokens, ids = [np.zeros(0, np.int64)], []
        for rollout, pairs in places.items():
            try:
                routes = self.store.rollout(rollout).routes
            except StoreError as error:
                refuse(str(error))
            here, at_T = np.array(pairs).T
            recorded_T = routes.recorded_T[at_T]
            tokens.append(here[recorded_T])
            ids.append(routes.ids_LTK[:, at_T[recorded_T]])
        info = self.store.info
        none_LTK = np.zeros((len(info.moe_layers), 0, info.topk), np.uint8)
        ids_LTK = np.concatenate(ids, axis=1) if ids else none_LTK
        self.watched[microbatch] = Watched(rows_T, source_T, np.concatenate(tokens), ids_LTK)

    def attach(self, model: torch.nn.Module, result: Counter) -> None:
        """Put hooks before dispatch and before the experts of every MoE layer of a model chunk.

        Args:
            result: gets the counts of each pass.
        """
        for number, layer in local_moe_layers(model).items():
            self._attach_layer(number, layer, result)

    def _attach_layer(self, number: int, layer: Any, result: Counter) -> None:
        dispatcher, guests = layer.token_dispatcher, getattr(layer, "guests", None)
        own = layer.local_expert_indices
        # a flex dispatcher may pad in its kernels, without the option
        padded = pads(layer.config) or layer.config.moe_token_dispatcher_type == "flex"
        # what the last dispatch of this layer sent, until the experts have received it
        sent: dict[str, Any] = {}
        dispatch_preprocess = dispatcher.dispatch_preprocess

        def before_dispatch(hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            sent.clear()  # an exception may have ended the last pass between the two hooks
            microbatch = active_microbatch()
            if microbatch is not None and microbatch in self.watched:
                hashes_T = row_hashes(hidden_states.reshape(-1, hidden_states.shape[-1]))
                tokens, ids_TK = self._recorded(number, self.watched[microbatch])
                expert_I = None if guests is None else guests.expert_I
                others = _others(tokens, hashes_T, routing_map, expert_I)
                expected = _pairs(hashes_T[tokens.repeat(ids_TK.shape[1])], ids_TK.ravel())
                sent["pairs"] = expected, others
            return dispatch_preprocess(hidden_states, routing_map, probs)

        def before_experts(_: Any, inputs: tuple[Any, ...]) -> None:
            if "pairs" in sent:
                received = _received(inputs[0], inputs[1], own)
                weightless_P = (inputs[2][: len(received)] == 0).cpu().numpy() & padded
                expected, ignored = _of_experts(own, dispatcher.tp_ep_group, *sent.pop("pairs"))
                result.add_dispatched(*matches(expected, ignored, received, received[weightless_P]))

        def before_guests(hidden_PH: Tensor, counts: Tensor, experts: list[int]) -> None:
            # Tokens of this rank's experts may be computed by guests on other ranks, so the pairs
            # that were received are gathered as well.
            if "pairs" in sent:
                pairs = (*sent.pop("pairs"), _received(hidden_PH, counts, experts))
                expected, ignored, received = _of_experts(own, dispatcher.tp_ep_group, *pairs)
                result.add_dispatched(*matches(expected, ignored, received, received[:0]))

        dispatcher.dispatch_preprocess = before_dispatch
        if guests is None:
            layer.experts.register_forward_pre_hook(before_experts)
        else:
            guests.watchers.append(before_guests)

    def _recorded(self, number: int, watched: Watched) -> tuple[np.ndarray, np.ndarray]:
        """The tokens with known routes, and these routes in one layer.

        The tokens that take the old policy's routes come last.

        Args:
            number: of the layer.
        """
        trace = self.store.info.moe_layers.index(number - 1)
        tokens, ids_TK = watched.tokens, watched.ids_LTK[trace]
        rows_T = watched.rows_T
        old = np.flatnonzero((watched.source_T == _OLD_POLICY) & (rows_T != PADDING))
        if self.old is None or not len(old):
            return tokens, ids_TK
        of_old_TK = self.old.routes(number, rows_T[old])
        return np.append(tokens, old), np.concatenate([ids_TK, of_old_TK])


def _others(
    recorded: np.ndarray,
    hashes_T: np.ndarray,
    routing_map: Tensor,
    expert_I: np.ndarray | None,
) -> np.ndarray:
    """The pairs of this rank's tokens without a recorded route, as the routing map sends them.

    Args:
        recorded: the tokens with a recorded route, which are left out.
        expert_I: with guests the expert that each column of the map stands for; None if column i is
            expert i.
    """
    token_P, column_P = np.nonzero(routing_map.detach().cpu().numpy())
    other_P = ~np.isin(token_P, recorded)
    expert_P = column_P if expert_I is None else expert_I[column_P]
    return _pairs(hashes_T[token_P[other_P]], expert_P[other_P])


def _received(hidden_PH: Tensor, tokens_per_expert: Tensor, experts: list[int]) -> np.ndarray:
    counts = torch.as_tensor(tokens_per_expert).cpu().numpy()
    return _pairs(row_hashes(hidden_PH[: int(counts.sum())]), np.repeat(experts, counts))


def _of_experts(experts: list[int], group: Any, *pairs: np.ndarray) -> list[np.ndarray]:
    """Gather the pairs of all ranks of the group, and keep the pairs of these experts."""
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, pairs, group=group)
    of_all = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    return [pairs_P2[np.isin(pairs_P2[:, 1], experts)] for pairs_P2 in of_all]
