"""Watch what really reached each expert, after dispatch, and compare it with the record.

A dispatcher moves hidden states without arithmetic, so a token's hidden state is recognised at the
expert by its bytes. Neither the router nor the replay is asked what it did. Two tokens with the
same bytes are the same computation, so counting them as a multiset loses nothing.

Shape suffixes (docs/glossary.md): H, K, L, P, T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from megatron_r3.integrations.layers import local_moe_layers
from megatron_r3.microbatch import MicrobatchRoutes
from megatron_r3.replay import active_microbatch
from megatron_r3.rows import PADDING
from megatron_r3.store.reader import RolloutStore
from megatron_r3.store.schema import StoreError
from megatron_r3.training.old_policy import OldPolicy
from megatron_r3.training.refuse import refuse
from megatron_r3.training.schedule import SOURCES

if TYPE_CHECKING:
    from megatron_r3.training.metrics import StepMetrics

_ROLLOUT, _OLD_POLICY = SOURCES.index("rollout"), SOURCES.index("old-policy")


Rows = tuple[np.ndarray, np.ndarray]  # row ids, and whose routes they take


def row_hashes(hidden_TH: Tensor) -> np.ndarray:
    """A 64-bit hash of each row's bytes, uint64 `[T]`.

    Each row is read as 16-bit words w0, w1, ... and hashed to w0 * a0 + w1 * a1 + ... modulo 2^64.
    The factors a are odd and drawn at random, but the same in every process.
    """
    words = hidden_TH.detach().contiguous().view(torch.int16).cpu().numpy().astype(np.uint64)
    weights = np.random.default_rng(0).integers(1, 2**63, words.shape[1], np.uint64) * 2 + 1
    return (words * weights).sum(1, dtype=np.uint64)


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

    def __init__(self, store: RolloutStore, old: OldPolicy | None = None) -> None:
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

    def attach(self, model: torch.nn.Module, result: StepMetrics) -> None:
        """Put hooks before dispatch and before the experts of every MoE layer of a model chunk."""
        for number, layer in local_moe_layers(model).items():
            self._attach_layer(number, layer, result)

    def _attach_layer(self, number: int, layer: Any, result: StepMetrics) -> None:
        dispatcher = layer.token_dispatcher
        # what the last dispatch of this layer sent, until its experts have got it
        sent: dict[str, Any] = {}
        dispatch_preprocess = dispatcher.dispatch_preprocess

        def before_dispatch(hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
            sent.clear()  # an exception may have ended the last pass between the two hooks
            microbatch = active_microbatch()
            if microbatch is not None and microbatch in self.rows:
                hashes_T = row_hashes(hidden_states.reshape(-1, hidden_states.shape[-1]))
                recorded = self._recorded(number, *self.rows[microbatch])
                sent["pairs"] = self._sent(recorded, hashes_T, routing_map)
            return dispatch_preprocess(hidden_states, routing_map, probs)

        def before_experts(_: Any, inputs: tuple[Any, ...]) -> None:
            if "pairs" not in sent:
                return
            received = _received(inputs[0], inputs[1], layer.local_expert_indices)
            expected, ignored = _at_these_experts(
                sent.pop("pairs"), layer.local_expert_indices, dispatcher.tp_ep_group
            )
            result.add_dispatched(*matches(expected, ignored, received))

        dispatcher.dispatch_preprocess = before_dispatch
        layer.experts.register_forward_pre_hook(before_experts)

    def _sent(
        self, recorded: dict[int, np.ndarray], hashes_T: np.ndarray, routing_map: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """(expected, ignored) pairs of this rank's tokens."""
        tokens = np.repeat(list(recorded), self.store.info.topk).astype(np.int64)
        experts = np.concatenate([*recorded.values(), np.zeros(0, np.uint8)])
        other_P2 = np.argwhere(routing_map.detach().cpu().numpy())
        other_P2 = other_P2[~np.isin(other_P2[:, 0], list(recorded))]
        return _pairs(hashes_T[tokens], experts), _pairs(hashes_T[other_P2[:, 0]], other_P2[:, 1])

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


def _received(hidden_PH: Tensor, tokens_per_expert: Tensor, experts: list[int]) -> np.ndarray:
    counts = torch.as_tensor(tokens_per_expert).cpu().numpy()
    return _pairs(row_hashes(hidden_PH[: int(counts.sum())]), np.repeat(experts, counts))


def _at_these_experts(
    pairs: tuple[np.ndarray, np.ndarray], experts: list[int], group: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What all ranks of the group sent to this rank's experts."""
    gathered: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(gathered, pairs, group=group)
    expected, ignored = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    return tuple(p[np.isin(p[:, 1], experts)] for p in (expected, ignored))  # type: ignore[return-value]
