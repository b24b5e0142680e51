"""Guest experts: which hot experts get a copy on another rank, and how many tokens go there.

The load of a rank is the number of (token, expert) pairs that its experts compute. All ranks wait
for the busiest rank. So the hottest expert of that rank gets a guest slot on the idlest rank, which
then computes some of the expert's tokens. This is repeated until no rank's load is above a limit,
and the lowest limit that the slots allow is searched for. Example: 2 ranks, 2 experts each, one
slot a rank, and 6 2 1 1 tokens. Rank 0 has 8, rank 1 has 2, the mean is 5: expert 0 sends 3 of its
6 tokens to its guest on rank 1.

All layers of a micro-batch are planned at once, because numpy takes about as long for fifty layers
as for one.

Shape suffixes (docs/glossary.md): E, L, O, R, V, X.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEAST_SKEW = 1.05  # a layer with a lower skew has no guests, because they would gain too little
LEAST_TOKENS = 1024  # a guest with fewer tokens is not worth sending the expert's weights
_CLOSE = 1.005  # a limit of this many times the mean load is as good as the mean load
_TRIED, _ROUNDS = 5, 3  # limits that are tried at once, and how often the range is narrowed


@dataclass(frozen=True)
class Moves:
    """What goes to guests. The arrays `[V]` have one entry for each guest in all layers.

    Attributes:
        layer_V: index of the layer.
        expert_V: the expert, 0 to E - 1.
        rank_V: the rank of the guest.
        tokens_V: how many of the expert's tokens the guest takes.
        load_LR: the load of each rank after the moves.
    """

    layer_V: np.ndarray
    expert_V: np.ndarray
    rank_V: np.ndarray
    tokens_V: np.ndarray
    load_LR: np.ndarray


def rank_load(load_LE: np.ndarray, num_ranks: int) -> np.ndarray:
    """The load of each rank without guests, `[L, R]`. Each rank has E / R consecutive experts."""
    return load_LE.reshape(len(load_LE), num_ranks, load_LE.shape[1] // num_ranks).sum(2)


def skew(load_LR: np.ndarray) -> np.ndarray:
    """The busiest rank's load divided by the mean, float64 `[L]`; 1 for a layer without tokens."""
    mean_L = load_LR.mean(1)
    return np.divide(load_LR.max(1), mean_L, out=np.ones(len(load_LR)), where=mean_L > 0)


def plan_moves(
    load_LE: np.ndarray,
    num_ranks: int,
    slots: int,
    *,
    domain: int | None = None,
    least_tokens: int = LEAST_TOKENS,
    least_skew: float = LEAST_SKEW,
) -> Moves:
    """The moves that give each layer the lowest maximum load that the search finds.

    Args:
        load_LE: whole numbers, how many tokens of all ranks take each expert.
        num_ranks: R, among which the E experts are shared out evenly.
        slots: guests that a rank can have at a time.
        domain: an expert and its guest are among the same `domain` neighbouring ranks, such as
            those that share NVLink. None is all R ranks.
        least_tokens: fewest tokens of a guest.
        least_skew: a layer with a lower skew has no guests.
    """
    load_LE = load_LE.astype(np.int64)
    load_LR = rank_load(load_LE, num_ranks)
    planned_L = np.flatnonzero(skew(load_LR) >= least_skew) if slots else np.zeros(0, np.int64)
    search = _Search(load_LE[planned_L], num_ranks, slots, domain or num_ranks, least_tokens)
    low_L, high_L = load_LR[planned_L].mean(1) * _CLOSE, load_LR[planned_L].max(1).astype(float)
    best = search.nothing()
    layers = np.arange(len(planned_L))
    for turn in range(_ROUNDS if len(layers) else 0):
        # The limits go from `low_L`, which only the first round tries, to below `high_L`.
        shares = (np.arange(_TRIED) + (turn > 0)) / (_TRIED + (turn > 0))
        limits = low_L + shares[:, None] * (high_L - low_L)
        found = search.spill(limits.ravel())
        kept = found.kept_X.reshape(limits.shape)
        first_L = kept.argmax(0)  # index of the lowest limit that can be kept; 0 if none can
        some_L = kept[first_L, layers]
        best.take(found, layers[some_L], (first_L * len(layers) + layers)[some_L])
        below_L = np.where(first_L > 0, limits[first_L - 1, layers], low_L)
        low_L = np.where(some_L, below_L, limits[-1])
        high_L = np.where(some_L, limits[first_L, layers], high_L)
    return best.moves(planned_L, load_LR)


@dataclass
class _Found:
    """Moves for each of the X cases that were tried, in the order in which they were found.

    Attributes:
        kept_X: whether the case's limit was kept.
        load_XR: the load afterwards.
        expert_XV, rank_XV, tokens_XV: the moves of each case. After the last move tokens are 0.
    """

    kept_X: np.ndarray
    load_XR: np.ndarray
    expert_XV: np.ndarray
    rank_XV: np.ndarray
    tokens_XV: np.ndarray

    def take(self, other: _Found, here_L: np.ndarray, there_L: np.ndarray) -> None:
        """Replace the cases `here_L` of this object by the cases `there_L` of `other`."""
        for name in ("load_XR", "expert_XV", "rank_XV", "tokens_XV"):
            getattr(self, name)[here_L] = getattr(other, name)[there_L]

    def moves(self, planned_L: np.ndarray, load_LR: np.ndarray) -> Moves:
        """The moves of all cases, one case after the other. Each case is a planned layer.

        Args:
            planned_L: indices of the layers that were planned, in the order of the cases.
            load_LR: the load of all layers without guests.
        """
        cases, places = np.nonzero(self.tokens_XV)
        load_LR = load_LR.copy()
        load_LR[planned_L] = self.load_XR
        found = self.expert_XV, self.rank_XV, self.tokens_XV
        expert_V, rank_V, tokens_V = (moved_XV[cases, places] for moved_XV in found)
        return Moves(planned_L[cases], expert_V, rank_V, tokens_V, load_LR)


@dataclass(frozen=True)
class _Search:
    """Tries limits on the ranks' load in some layers. The arguments are those of `plan_moves`."""

    load_LE: np.ndarray
    num_ranks: int
    slots: int
    domain: int
    least_tokens: int

    def nothing(self) -> _Found:
        """For each layer a case without moves."""
        num_layers, load_LR = len(self.load_LE), rank_load(self.load_LE, self.num_ranks)
        return _Found(np.ones(num_layers, bool), load_LR, *self._no_moves(num_layers))

    def _no_moves(self, num_cases: int) -> list[np.ndarray]:
        return [np.zeros((num_cases, self.num_ranks * self.slots), np.int64) for _ in range(3)]

    def spill(self, limit_X: np.ndarray) -> _Found:
        """In each case move tokens from the busiest rank until no rank is above the limit.

        No rank gets two guests of one expert. A guest takes tokens until the guest's rank is full,
        or the expert has no tokens left, or the expert's own rank is down to the limit. In none of
        these cases does the same rank get more tokens of this expert: a rank that was brought down
        to the limit stays there, because guests on a rank never raise its load above the limit.

        Args:
            limit_X: several limits for each layer: of L layers, case x is a limit of layer x % L.
        """
        least = max(self.least_tokens, 1)
        num_tried = len(limit_X) // len(self.load_LE)
        by_rank = self.load_LE.reshape(len(self.load_LE), self.num_ranks, -1)
        left_XRO = np.tile(by_rank, (num_tried, 1, 1))
        load_XR, num_local = left_XRO.sum(2), left_XRO.shape[2]
        free_XR = np.full(load_XR.shape, self.slots)
        domain_R = np.arange(self.num_ranks) // self.domain
        expert_XV, rank_XV, tokens_XV = self._no_moves(len(limit_X))
        kept_X = np.zeros(len(limit_X), bool)
        cases = np.arange(len(limit_X))  # the cases whose limit is neither kept nor given up
        for number in range(self.num_ranks * self.slots + 1):
            home = load_XR[cases].argmax(1)
            excess = load_XR[cases, home] - limit_X[cases]
            kept_X[cases[excess < 1]] = True
            cases, home, excess = (a[excess >= 1] for a in (cases, home, excess))
            if not len(cases) or number == self.num_ranks * self.slots:
                break
            local = left_XRO[cases, home].argmax(1)  # the hottest expert of the busiest rank
            open_XR = (free_XR[cases] > 0) & (domain_R == domain_R[home][:, None])
            guest = np.where(open_XR, load_XR[cases], np.iinfo(np.int64).max).argmin(1)
            room = np.floor(limit_X[cases]) - load_XR[cases, guest]
            # A guest needs `least` tokens, so for a small excess more tokens move than the excess.
            tokens = np.maximum(np.ceil(excess), least)
            tokens = np.minimum(tokens, left_XRO[cases, home, local])
            tokens = np.where(open_XR.any(1), np.minimum(tokens, room), 0).astype(np.int64)
            enough = tokens >= least
            chosen = (cases, home, local, guest, tokens)
            cases, home, local, guest, tokens = (a[enough] for a in chosen)
            left_XRO[cases, home, local] -= tokens
            load_XR[cases, home] -= tokens
            load_XR[cases, guest] += tokens
            free_XR[cases, guest] -= 1
            expert_XV[cases, number] = home * num_local + local
            rank_XV[cases, number] = guest
            tokens_XV[cases, number] = tokens
        return _Found(kept_X, load_XR, expert_XV, rank_XV, tokens_XV)
