"""The verdict on a case: what its ranks saw, compared with the rollouts and the reference.

In this file T counts the rows of all rollouts.

Shape suffixes (docs/glossary.md): H, K, L, P, T.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from proof.fidelity.gradients import assemble
from proof.fidelity.observe import Observed, RankResult
from proof.fidelity.reference import Reference, Wrong
from proof.fidelity.rollouts import CONTROLS, Sampled

Pair = tuple[int, int]  # (token, expert)
CLEARLY = 1e-2  # gradients must differ from those of a wrong update by more than this


def gradient_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest difference in any gradient, relative to that gradient's largest value in `want`.

    A tiny gradient is measured against a thousandth of the largest value of all gradients, so that
    rounding does not look like an error. The result is infinite if `got` and `want` differ in a
    name or a shape.
    """
    if {n: g.shape for n, g in got.items()} != {n: g.shape for n, g in want.items()}:
        return float("inf")
    floor = 1e-3 * max(g.abs().max().item() for g in want.values())
    return max(
        (got[n] - g).abs().max().item() / max(g.abs().max().item(), floor) for n, g in want.items()
    )


class Judge:
    """Judges the trainings of one model against its rollouts and its reference.

    Args:
        controls: the names of the phases that replay wrong routes.
    """

    def __init__(
        self,
        rollouts: list[Sampled],
        reference: Reference,
        tolerance: float,
        controls: tuple[str, ...] = (*CONTROLS,),
    ) -> None:
        self.reference, self.tolerance, self.controls = reference, tolerance, controls
        self.gradients = assemble(reference.gradients)
        self.routes_LTK = reference.routes_LTK
        if self.routes_LTK is None:
            self.routes_LTK = np.concatenate([r.routes_LTK for r in rollouts], axis=1)
        self.recorded_T = np.concatenate([r.recorded_T for r in rollouts])

    def row(self, results: list[RankResult]) -> dict[str, object]:
        """The fields of a case's row in the table."""
        loss, gradient = self.errors(results, "right")
        biases = [item for r in results for item in r.biases.items()]
        return {
            "tokens": int(self.recorded_T.sum()),
            "moe_layers": len(self.reference.hidden),
            "dispatched_as_recorded": self.dispatched(results, "right"),
            "loss_matches": bool(loss <= self.tolerance),
            "grads_match": bool(gradient <= self.tolerance),
            "controls": {
                **{name: self._caught(results, name) for name in self.controls},
                **{name: self._differs(results, w) for name, w in self.reference.wrong.items()},
            },
            "tolerance": self.tolerance,
            "loss_error": loss,
            "grad_error": gradient,
            "passes": sorted({"grad" if o.grad else "no grad" for o in _seen(results, "right")}),
            "verify_dispatch": _told(results),
            **({"expert_bias_matches": self._biases_match(biases)} if biases else {}),
        }

    def _biases_match(self, biases: list[tuple[int, np.ndarray]]) -> bool:
        """Whether each rank's first update of the expert bias follows from the recorded load.

        The load must not count padding. The update is bias += rate * sign(mean load - load of the
        expert), arXiv 2408.15664, algorithm 1.
        """
        layers = sorted(self.reference.hidden)
        for layer, bias in biases:
            load = np.bincount(self.routes_LTK[layers.index(layer)].ravel(), minlength=len(bias))
            if not np.array_equal(bias, np.float32(1e-3) * np.sign(load.mean() - load)):
                return False
        return {layer for layer, _ in biases} == {*layers}

    def errors(self, results: list[RankResult], phase: str) -> tuple[float, float]:
        """Relative errors of loss and gradients.

        Advantages of both signs let most of the loss cancel out. So the error of the loss is
        relative to the sum of the absolute losses of all tokens (`Reference.loss_scale`).
        """
        loss = _same(r.losses[phase] for r in results if r.losses)
        pieces = [piece for r in results for piece in r.gradients[phase]]
        off = abs(loss - self.reference.loss) / self.reference.loss_scale
        return off, gradient_error(assemble(pieces), self.gradients)

    def _caught(self, results: list[RankResult], control: str) -> bool:
        """Whether dispatch and gradients both show that the routes of a control are wrong."""
        gradient = self.errors(results, control)[1]
        return self.dispatched(results, control) < 1.0 and gradient > self.tolerance

    def _differs(self, results: list[RankResult], wrong: Wrong) -> bool:
        """Whether the gradients differ from those of a wrong update.

        If the wrong update has wrong routes, the dispatch must differ from these routes too.
        """
        pieces = [piece for r in results for piece in r.gradients["right"]]
        if gradient_error(assemble(pieces), assemble(wrong.gradients)) <= CLEARLY:
            return False
        routes_LTK = wrong.routes_LTK
        return routes_LTK is None or self.dispatched(results, "right", routes_LTK) < 1.0

    def dispatched(
        self, results: list[RankResult], phase: str, routes_LTK: np.ndarray | None = None
    ) -> float:
        """The share of recorded pairs that reached their expert, in the worst layer and pass.

        Passes with gradients and passes without are judged apart, the latter only if a rank ran
        one. With expert tensor parallelism every shard of an expert must get the pair.

        Args:
            routes_LTK: the expected routes of all rollouts. None: the right ones.
        """
        routes_LTK = self.routes_LTK if routes_LTK is None else routes_LTK
        seen = _seen(results, phase)
        shards = {o.shard for o in seen}
        shares = [0.0 if not any(o.grad for o in seen) else 1.0]
        for layer in self.reference.hidden:
            passes = {o.grad for o in seen if o.layer == layer}
            for grad in passes | {True}:
                for shard in shards:
                    calls = [o for o in seen if (o.layer, o.grad, o.shard) == (layer, grad, shard)]
                    shares.append(self._share(layer, calls, routes_LTK))
        return min(shares)

    def _share(self, layer: int, calls: list[Observed], routes_LTK: np.ndarray) -> float:
        got: Counter[Pair] = Counter()
        for call in calls:
            tokens_P = self._recognise(layer, call.hidden_PH)
            known = (tokens_P >= 0) & self.recorded_T[tokens_P]
            got.update(zip(tokens_P[known].tolist(), call.experts_P[known].tolist(), strict=True))
        trace = sorted(self.reference.hidden).index(layer)
        want: Counter[Pair] = Counter(
            (token, expert)
            for token, route in enumerate(routes_LTK[trace].tolist())
            if self.recorded_T[token]
            for expert in route
        )
        return (want & got).total() / max(want.total(), got.total())

    def _recognise(self, layer: int, hidden_PH: np.ndarray) -> np.ndarray:
        """The token whose state in the reference is nearest to each hidden state, or -1.

        -1 means that no state is near enough. |a - b|^2 is computed as |a|^2 + |b|^2 - 2 a.b for
        all pairs at once.
        """
        want_TH = self.reference.hidden[layer].astype(np.float64)
        if not len(hidden_PH):
            return np.zeros(0, np.int64)
        distance_PT = np.sqrt(
            np.maximum(
                (hidden_PH.astype(np.float64) ** 2).sum(1)[:, None]
                + (want_TH**2).sum(1)
                - 2 * hidden_PH.astype(np.float64) @ want_TH.T,
                0.0,
            )
        )
        nearest_P = distance_PT.argmin(1)
        length_P = np.sqrt((want_TH[nearest_P] ** 2).sum(1))
        near_P = distance_PT.min(1) <= min(10 * self.tolerance, 0.1) * length_P
        return np.where(near_P, nearest_P, -1)


def _seen(results: list[RankResult], phase: str) -> list[Observed]:
    return [observed for result in results for observed in result.seen.get(phase, [])]


def _told(results: list[RankResult]) -> float:
    """The least share that the witness reports on any rank; 0 if a rank has no report."""
    return min([result.dispatched.get("right", 0.0) for result in results])


def _same(values: Iterable[float]) -> float:
    """The one value that all ranks must report."""
    reported = [*values]
    assert reported, "no rank reported a loss"
    assert len({*reported}) == 1, f"ranks disagree on the loss: {reported}"
    return reported[0]
