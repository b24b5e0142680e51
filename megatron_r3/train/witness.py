"""Watch what really reached each expert, after dispatch, and compare it with the record.

A dispatcher moves hidden states without arithmetic, so a token's hidden state is recognised at the
expert by its bytes. Neither the router nor the replay is asked what it did. Two tokens with the
same bytes are the same computation, so counting them as a multiset loses nothing.

Shape suffixes (docs/glossary.md): H, I, K, L, P, T.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.rollout import Rollout
from megatron_r3.data.store.schema import StoreError
from megatron_r3.replay.active import active_microbatch
from megatron_r3.replay.layers import local_moe_layers
from megatron_r3.replay.microbatch import MicrobatchRoutes
from megatron_r3.replay.routes import MoEShape
from megatron_r3.replay.rows import PADDING
from megatron_r3.train.old_policy import OldPolicy
from megatron_r3.train.refuse import refuse
from megatron_r3.train.schedule import SOURCES

_ROLLOUT, _OLD_POLICY = SOURCES.index("rollout"), SOURCES.index("old-policy")


Rows = tuple[np.ndarray, np.ndarray]  # row ids, and whose routes they take


class Records(Protocol):
    """What was sampled: a `RolloutStore`, or the turns of Megatron's RL loop."""

    @property
    def info(self) -> MoEShape: ...  # noqa: D102

    def locate(self, row: int) -> tuple[int, int]:
        """The rollout of a row, and the token."""

    def rollout(self, index: int) -> Rollout:
        """A rollout with its routes."""


class Counter(Protocol):
    """Who counts the pairs: `StepMetrics`, or the replay of Megatron's RL loop."""

    def add_dispatched(self, matched: int, total: int) -> None:
        """Count pairs: those that reached the recorded expert, and all of them."""


def row_hashes(hidden_TH: Tensor) -> np.ndarray:
    """A 64-bit hash of each row's bytes, uint64 `[T]`.

    Each row is read as 16-bit words w0, w1, ... and hashed to w0 * a0 + w1 * a1 + ... modulo 2^64.
    The factors a are odd and drawn at random, but the same in every process.
    """
    words = hidden_TH.detach().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * 2 + 1
    # not as one product: of 262,144 rows of 2,048 that would have 4.3 GB
    return np.einsum("tw,w->t", words, weights)


def _pairs(hashes_P: np.ndarray, experts_P: np.ndarray) -> np.ndarray:
    return np.stack([hashes_P, experts_P.astype(np.uint64)], axis=1)


def matches(expected: np.ndarray, ignored: np.ndarray, received: np.ndarray) -> tuple[int, int]:
    """How many recorded pairs arrived, and of how many; multisets of (hash, expert) `[P, 2]`.

    Args:
        expected: pairs of recorded tokens, as the store says.
        ignored: pairs of padding and missing tokens, as they were sent.
        received: what the experts got.

    Returns:
        Example: expected {a, a, b}, ignored {c}, received {a, b, b, c}: without c, {a, b, b}
        arrived. a and b match once each, so the result is (2, 3).
    """
    keys, index = np.unique(
        np.concatenate([expected, ignored, received]), axis=0, return_inverse=True
    )
    splits = np.split(index.reshape(-1), [len(expected), len(expected) + len(ignored)])
    expected_n, ignored_n, received_n = (np.bincount(i, minlength=len(keys)) for i in splits)
    arrived_n = np.maximum(received_n - ignored_n, 0)
    return int(np.minimum(expected_n, arrived_n).sum()), int(max(expected_n.sum(), arrived_n.sum()))


class DispatchWitness:
    """Counts, in every pass of watched microbatches, the pairs that reached the recorded expert.

    Args:
        store: the record of the rollouts.
        old: the record of the old policy. None: there is none, so nothing is expected of the tokens
            that would take its routes.
    """

    def __init__(self, store: Records, old: OldPolicy | None = None) -> None:
        self.store, self.old = store, old
        self.rows: WeakKeyDictionary[MicrobatchRoutes, Rows] = WeakKeyDictionary()

    def watch(self, microbatch: MicrobatchRoutes, rows_T: np.ndarray, source_T: np.ndarray) -> None:
        """Watch this microbatch.

        Args:
            rows_T: its row ids, in the router's order.
            source_T: whose routes each token takes, an index of `SOURCES`; nothing is expected of a
                token that routes live.
        """
        self.rows[microbatch] = rows_T, source_T

    def attach(self, model: torch.nn.Module, result: Counter) -> None:
        """Put hooks before dispatch and before the experts of every MoE layer of a model chunk."""
        for number, layer in local_moe_layers(model).items():
            self._attach_layer(number, layer, result)

    def _attach_layer(self, number: int, layer: Any, result: Counter) -> None:
        dispatcher, guests = layer.token_dispatcher, getattr(layer, "guests", None)
        own = layer.local_expert_indices
        # what the last dispatch of this layer sent, until its experts have got it
        sent: dict[str, Any] = {}
        dispatch_preprocess = dispatcher.dispatch_preprocess

        def before_dispatch(hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            sent.clear()  # an exception may have ended the last pass between the two hooks
            microbatch = active_microbatch()
            if microbatch is not None and microbatch in self.rows:
                hashes_T = row_hashes(hidden_states.reshape(-1, hidden_states.shape[-1]))
                recorded = self._recorded(number, *self.rows[microbatch])
                expert_I = None if guests is None else guests.expert_I
                others = _others(recorded, hashes_T, routing_map, expert_I)
                sent["pairs"] = self._expected(recorded, hashes_T), others
            return dispatch_preprocess(hidden_states, routing_map, probs)

        def before_experts(_: Any, inputs: tuple[Any, ...]) -> None:
            if "pairs" in sent:
                received = _received(inputs[0], inputs[1], own)
                pairs = _of_experts(own, dispatcher.tp_ep_group, *sent.pop("pairs"))
                result.add_dispatched(*matches(pairs[0], pairs[1], received))

        def before_guests(hidden_PH: Tensor, counts: Tensor, experts: list[int]) -> None:
            # Some tokens of this rank's experts are computed elsewhere, some here are of others.
            if "pairs" in sent:
                pairs = (*sent.pop("pairs"), _received(hidden_PH, counts, experts))
                expected, ignored, received = _of_experts(own, dispatcher.tp_ep_group, *pairs)
                result.add_dispatched(*matches(expected, ignored, received))

        dispatcher.dispatch_preprocess = before_dispatch
        if guests is None:
            layer.experts.register_forward_pre_hook(before_experts)
        else:
            guests.watchers.append(before_guests)

    def _expected(self, recorded: dict[int, np.ndarray], hashes_T: np.ndarray) -> np.ndarray:
        """The pairs of this rank's recorded tokens."""
        tokens = np.repeat(list(recorded), self.store.info.topk).astype(np.int64)
        experts = np.concatenate([*recorded.values(), np.zeros(0, np.uint8)])
        return _pairs(hashes_T[tokens], experts)

    def _recorded(
        self, number: int, rows_T: np.ndarray, source_T: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Each recorded token's route `[K]`.

        The routes of the store are read rollout by rollout. Replay reads them in another way, so a
        fault in its way shows here.
        """
        routes = self._in_store(number, np.where(source_T == _ROLLOUT, rows_T, PADDING))
        old = np.flatnonzero((source_T == _OLD_POLICY) & (rows_T != PADDING))
        if self.old is not None and len(old):
            routes |= zip(old.tolist(), self.old.routes(number, rows_T[old]), strict=True)
        return routes

    def _in_store(self, number: int, rows_T: np.ndarray) -> dict[int, np.ndarray]:
        trace = self.store.info.moe_layers.index(number - 1)
        rollouts: dict[int, Any] = {}
        routes: dict[int, np.ndarray] = {}
        for token, row in enumerate(rows_T.tolist()):
            if row == PADDING:
                continue
            rollout, at = self.store.locate(row)
            if rollout not in rollouts:
                try:
                    rollouts[rollout] = self.store.rollout(rollout).routes
                except StoreError as error:
                    # a recompute calls this in the backward pass, where nothing catches an error
                    refuse(str(error))
            if rollouts[rollout].recorded_T[at]:
                routes[token] = rollouts[rollout].ids_LTK[trace, at]
        return routes


def _others(
    recorded: dict[int, np.ndarray],
    hashes_T: np.ndarray,
    routing_map: Tensor,
    expert_I: np.ndarray | None,
) -> np.ndarray:
    """The pairs of this rank's other tokens, as the map sends them.

    Args:
        expert_I: the expert of each column; None where a column is an expert.
    """
    token_P, column_P = np.nonzero(routing_map.detach().cpu().numpy())
    other_P = ~np.isin(token_P, list(recorded))
    expert_P = column_P if expert_I is None else expert_I[column_P]
    return _pairs(hashes_T[token_P[other_P]], expert_P[other_P])


def _received(hidden_PH: Tensor, tokens_per_expert: Tensor, experts: list[int]) -> np.ndarray:
    counts = torch.as_tensor(tokens_per_expert).cpu().numpy()
    return _pairs(row_hashes(hidden_PH[: int(counts.sum())]), np.repeat(experts, counts))


def _of_experts(experts: list[int], group: Any, *pairs: np.ndarray) -> list[np.ndarray]:
    """The pairs of these experts alone, those of all ranks of the group together."""
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, pairs, group=group)
    of_all = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    return [pairs_P2[np.isin(pairs_P2[:, 1], experts)] for pairs_P2 in of_all]
