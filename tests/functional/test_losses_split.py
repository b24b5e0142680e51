"""A rollout that lies on several ranks has the loss and the gradients that it has on one.

Context parallelism splits each rollout. The ranks are real processes; what Megatron then does with
their losses (`forward_step_calc_loss`, `finalize_model_grads` and the data-parallel average) is
written out here, so that every loss, average and correction can be tried without a model.
`test_policy_update.py` tries some of them in Megatron itself.

Shape suffixes (docs/glossary.md): B, S.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from loss_cases import CORRECTIONS, LOSSES, lay_out, responses
from split_losses import FIELDS, Part, losses_of

from megatron_r3.train.losses.aggregation import AGGREGATIONS
from megatron_r3.train.losses.loss import LossOptions
from proof.fidelity.policy_loss import expected
from proof.fidelity.rig.worker import TreeWorker

TOLERANCE = 2e-5
OPTIONS = {
    f"{loss}, {aggregation}, {correction}": replace(
        LOSSES[loss],
        aggregation=aggregation,
        fixed_length=11,
        correction=CORRECTIONS[correction],
    )
    for loss, aggregation, correction in itertools.product(LOSSES, AGGREGATIONS, CORRECTIONS)
}


def batches() -> tuple[list[list], list[dict[str, torch.Tensor]]]:
    """Two micro-batches, one of them a pack, in float32; and their responses.

    The response of one token, and the one without any, lie on one rank alone.
    """
    rng = np.random.default_rng(5)
    given, made = [], []
    for lengths, packed in (([7, 1, 9, 4], False), ([6, 0, 8, 3, 5], True)):
        given.append(responses(rng, lengths))
        terms = lay_out(given[-1], rng, packed).terms
        batch = {
            "logprobs": terms.logprobs_BS.detach(),
            "old_logprobs": terms.old_logprobs_BS,
            "sampled_logprobs": terms.sampled_logprobs_BS,
            "advantages": terms.advantages_BS,
            "mask": terms.mask_BS,
            "index": terms.sequences.index_BS,
        }
        pad = -terms.mask_BS.shape[1] % 4  # what two ranks split is a multiple of 4
        padded = {name: torch.nn.functional.pad(batch[name], (0, pad)) for name in FIELDS}
        made.append({n: v if n == "index" else v.float() for n, v in padded.items()})
    return given, made


def as_megatron_does(ranks: list[list[Part]], per_token: bool) -> tuple[float, list[torch.Tensor]]:
    """The loss that is logged, and the gradient of each micro-batch's log-probs in the update."""
    parts = [part for rank in ranks for part in rank]
    logged = sum(p.logged[0] for p in parts) / sum(p.logged[1] for p in parts)
    if per_token:  # DDP sums; finalize_model_grads divides by the sum of all counts
        scales = [[1 / max(sum(p.count for p in parts), 1)] * len(rank) for rank in ranks]
    else:  # each loss by its count and the number of micro-batches; DDP averages over the ranks
        scales = [[1 / max(p.count, 1) / len(rank) / len(ranks) for p in rank] for rank in ranks]
    slopes = [
        sum(part.slope_BS * scale for part, scale in zip(column, column_scales, strict=True))
        for column, column_scales in zip(
            zip(*ranks, strict=True), zip(*scales, strict=True), strict=True
        )
    ]
    return logged, slopes


def error(got: tuple[float, list[torch.Tensor]], want: tuple[float, list[torch.Tensor]]) -> float:
    """The largest difference, relative to 1 for the loss and to the largest gradient."""
    pairs = [*zip(got[1], want[1], strict=True)]
    scale = max(w.abs().max().item() for _, w in pairs)
    wrong = max((g - w).abs().max().item() for g, w in pairs) / scale
    return max(abs(got[0] - want[0]), wrong)


def needed_exchanges(option: LossOptions, per_token: bool) -> int:
    """How many sums over whole rollouts the loss of a micro-batch reads."""
    lengths = set()  # of the responses, with and without what a mask leaves out
    if option.name == "gspo":
        lengths.add("whole")
    if option.aggregation != "token-mean" or not per_token:
        lengths.add("left" if option.correction.name == "mask" else "whole")
    means = [option.name == "gspo", option.correction.level == "sequence"]
    return len(lengths) + sum(means)


@pytest.mark.parametrize("per_token", [True, False])
def test_two_ranks_are_one(patched: TreeWorker, per_token: bool) -> None:
    given, made = batches()
    (one,) = patched.run(losses_of, 1, made, OPTIONS, per_token)
    two = patched.run(losses_of, 2, made, OPTIONS, per_token)
    forgetful = patched.run(losses_of, 2, made, OPTIONS, per_token, forgets=True)
    for name, option in OPTIONS.items():
        want = as_megatron_does([one[name]], per_token)
        got = as_megatron_does([rank[name] for rank in two], per_token)
        assert error(got, want) <= TOLERANCE, name
        # one process against the papers, in float64
        papers = expected([response for batch in given for response in batch], option)
        assert abs(want[0] - papers.loss) <= TOLERANCE * max(1.0, papers.positive), name
        exchanges = {part.exchanges for rank in two for part in rank[name]}
        assert exchanges == {needed_exchanges(option, per_token)}, name
        # a control: without the sums over both ranks it is another loss
        wrong = as_megatron_does([rank[name] for rank in forgetful], per_token)
        sums_nothing = "gspo" not in name and "sequence" not in name and "fixed" not in name
        if per_token and sums_nothing:
            assert error(wrong, want) <= TOLERANCE, name
        else:
            assert error(wrong, want) > 1e-3, name
