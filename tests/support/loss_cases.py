"""Responses to try a policy loss on, and the batch that a trainer would make of them.

Shape suffixes (docs/glossary.md): B, G, S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_r3.train.losses.correction import CorrectionOptions
from megatron_r3.train.losses.loss import LossOptions
from megatron_r3.train.losses.policy_loss import Clip
from megatron_r3.train.losses.terms import LossTerms, Sequences
from proof.fidelity.policy_loss import Response

ADVANTAGES = (-1.7, 0.0, 0.4, 2.0)
# With clip ranges that some of the ratios of `responses` leave, also those of whole sequences.
LOSSES = {
    "grpo": LossOptions("grpo", Clip(0.2, 0.28, 2.0)),
    "gspo": LossOptions("gspo", Clip(0.05, 0.04)),
    "cispo": LossOptions("cispo", Clip(0.5, 0.2)),
}
CORRECTIONS = {
    "none": CorrectionOptions(),
    **{
        f"{name} {level}": CorrectionOptions(name, level, *bounds)
        for name, bounds in {"tis": (0.0, 1.1), "icepop": (0.7, 1.6), "mask": (0.7, 1.5)}.items()
        for level in ("token", "sequence")
    },
}


def responses(
    rng: np.random.Generator, lengths: Sequence[int], moved: float = 0.4, off: float = 0.3
) -> list[Response]:
    """A response of each length.

    Args:
        moved: standard deviation of log(pi / old).
        off: standard deviation of log(old / mu).
    """
    made = []
    for length in lengths:
        sampler_G = -rng.exponential(1.0, length)
        old_G = sampler_G + rng.normal(0.0, off, length)
        trainer_G = old_G + rng.normal(0.0, moved, length)
        advantage, reference_G = float(rng.choice(ADVANTAGES)), old_G + rng.normal(0.0, off, length)
        made.append(Response(trainer_G, old_G, sampler_G, advantage, reference_G))
    return made


@dataclass(frozen=True)
class LaidOut:
    """Responses as one micro-batch.

    Attributes:
        terms: float64; the trainer's log-probs are a leaf with gradient.
        places: of each response's tokens in the flattened batch.
    """

    terms: LossTerms
    places: list[np.ndarray]


def lay_out(given: Sequence[Response], rng: np.random.Generator, packed: bool = False) -> LaidOut:
    """Place the responses among prompt tokens, later turns of a user, and padding.

    What lies there is far from any log-prob, so a loss that reads it shows.

    Args:
        packed: all in one row, else a row for each.
    """
    # Example: a response of 3 tokens may lie at the positions 2, 3 and 6 of a rollout of 8.
    sizes = [len(response.trainer) + int(rng.integers(1, 6)) for response in given]
    own = [
        np.sort(rng.choice(size, len(response.trainer), replace=False))
        for size, response in zip(sizes, given, strict=True)
    ]
    width = sum(sizes) + 2 if packed else max(sizes) + 2
    starts = np.cumsum([0, *sizes])[:-1] if packed else np.arange(len(given)) * width
    shape = (1 if packed else len(given), width)
    places = [start + positions for start, positions in zip(starts, own, strict=True)]
    index_BS = np.zeros(shape, np.int64) + (0 if packed else np.arange(len(given))[:, None])
    mask_BS = np.zeros(shape)
    fields = [rng.choice([-9999.0, 70.0, 0.0, 3e38], shape) for _ in range(5)]
    for number, (response, place) in enumerate(zip(given, places, strict=True)):
        if packed:
            index_BS.flat[starts[number] : starts[number] + sizes[number]] = number
        mask_BS.flat[place] = 1.0
        values = (
            *(response.trainer, response.old, response.sampler),
            *(response.advantage, response.reference),
        )
        for field, value in zip(fields, values, strict=True):
            field.flat[place] = value
    logprobs_BS, old_BS, sampled_BS, advantages_BS, reference_BS = map(torch.from_numpy, fields)
    terms = LossTerms(
        logprobs_BS.requires_grad_(),
        old_BS,
        sampled_BS,
        advantages_BS,
        torch.from_numpy(mask_BS),
        Sequences(torch.from_numpy(index_BS), len(given)),
        reference_BS,
    )
    return LaidOut(terms, places)
