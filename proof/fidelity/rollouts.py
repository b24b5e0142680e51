"""The rollouts of a case, and the controls: routes of another token, layer or rollout.

The rollouts are made up, so nothing in them comes from Megatron. Their routes are random, far from
what a router would choose, so a layer that ignores its routes gives other results. Every rollout
begins with a token of its own. So no two tokens have the same prefix, and a token is recognised by
its hidden state.

Shape suffixes (docs/glossary.md): L, T, K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_r3.data.store import Rollout, SamplingSettings, StoreInfo, write_shard
from megatron_r3.replay.routes import Routes
from proof.fidelity.models import EXPERTS, SEQ_LENGTH, TOPK, VOCAB_SIZE, Model

NUM_ROLLOUTS = 12


@dataclass(frozen=True)
class Sampled:
    """One rollout, as arrays. The last token has no routes."""

    tokens: np.ndarray
    response: np.ndarray
    logprobs: np.ndarray
    reward: float
    group: int
    routes_LTK: np.ndarray
    recorded_T: np.ndarray


def make_rollouts(model: Model, seed: int = 0) -> list[Sampled]:
    """Twelve rollouts in three groups, of different lengths."""
    rng = np.random.default_rng(seed)
    return [_rollout(model, index, rng) for index in range(NUM_ROLLOUTS)]


def _rollout(model: Model, index: int, rng: np.random.Generator) -> Sampled:
    inputs = int(rng.integers(8, SEQ_LENGTH + 1)) if index else SEQ_LENGTH
    inputs = -(-inputs // model.multiple) * model.multiple
    tokens = rng.integers(0, VOCAB_SIZE, inputs + 1)
    tokens[0] = index + 1  # padding is 0
    response = np.arange(inputs + 1) >= rng.integers(2, 6)
    scores = rng.random((len(model.moe_layers), inputs, EXPERTS))
    scores[..., : model.hot] += 0.5  # another expert then beats a hot one in 1 of 8 cases
    return Sampled(
        tokens=tokens.astype(np.int32),
        response=response,
        logprobs=np.where(response, rng.normal(-np.log(VOCAB_SIZE), 0.3, inputs + 1), 0.0),
        reward=float(rng.integers(0, 2)) + 0.1 * index,
        group=index // 4,
        routes_LTK=np.argsort(scores, axis=-1)[..., :TOPK],
        recorded_T=rng.random(inputs) >= model.holes,
    )


def write_stores(model: Model, rollouts: list[Sampled], folder: Path) -> dict[str, Path]:
    """Write a store of these rollouts, `right`, and a store with each control's wrong routes.

    Returns:
        The folder of each store by its name.
    """
    changes: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
        "right": lambda routes: routes,
        **CONTROLS,
    }
    temperature = model.update.temperature
    processed = SamplingSettings(temperature, logprobs_of="processed")
    info = StoreInfo(
        engine="made up",
        engine_version="0",
        model="",
        num_experts=EXPERTS,
        topk=TOPK,
        moe_layers=model.moe_layers,
        sampling=SamplingSettings() if temperature == 1 else processed,
    )
    stores = {}
    for name, change in changes.items():
        routes = change([r.routes_LTK for r in rollouts])
        numbered = enumerate(zip(rollouts, routes, strict=True))
        stored = [_stored(r, ids, number) for number, (r, ids) in numbered]
        write_shard(folder / name, info, stored)
        stores[name] = folder / name
    return stores


def _stored(sampled: Sampled, ids_LTK: np.ndarray, number: int) -> Rollout:
    return Rollout(
        sampled.tokens,
        sampled.response,
        sampled.logprobs.astype(np.float32),
        sampled.reward,
        sampled.group,
        0,
        Routes.from_array(ids_LTK, EXPERTS, sampled.recorded_T),
        number,
    )


def shift_token(routes: list[np.ndarray]) -> list[np.ndarray]:
    """Give each token the routes of the token before. `routes` has `[L, T, K]` for each rollout."""
    return [np.roll(ids_LTK, 1, axis=1) for ids_LTK in routes]


def swap_layers(routes: list[np.ndarray]) -> list[np.ndarray]:
    """Exchange the routes of the first two MoE layers."""
    return [ids_LTK[[1, 0, *range(2, len(ids_LTK))]] for ids_LTK in routes]


def swap_rollouts(routes: list[np.ndarray]) -> list[np.ndarray]:
    """Give each rollout the routes of another rollout, cut or repeated to the right length."""
    half = len(routes) // 2
    others = routes[half:] + routes[:half]
    return [
        np.resize(other.transpose(1, 0, 2), (own.shape[1], *other.shape[::2])).transpose(1, 0, 2)
        for own, other in zip(routes, others, strict=True)
    ]


CONTROLS: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "shift_token": shift_token,
    "swap_layers": swap_layers,
    "swap_rollouts": swap_rollouts,
}
