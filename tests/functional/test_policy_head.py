"""Log-probs of the sampler: temperature, vocabulary and kept tokens, also under TP.

Shape suffixes (docs/glossary.md): B, S, V.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import BATCH, SEQUENCE, VOCABULARY, batch, config, model, start

TEMPERATURE, SAMPLERS_ROWS = 0.7, VOCABULARY - 3  # the last rows are the trainer's padding
SEVERAL = {"tensor_model_parallel_size": 2}


def labels_and_kept() -> tuple[torch.Tensor, dict[int, list[int]]]:
    """Labels that the sampler has, and what it kept for some of them, by place in `[B, S]`."""
    _, _, labels = batch()
    labels = labels % SAMPLERS_ROWS
    generator = torch.Generator().manual_seed(9)
    kept = {}
    for place in range(3, BATCH * SEQUENCE, 2):
        others = torch.randperm(SAMPLERS_ROWS, generator=generator)[:9].tolist()
        kept[place] = sorted({*others, int(labels.reshape(-1)[place])})
    return labels, kept


def made_policy(sets: dict[int, list[int]], **more: Any) -> Any:
    from megatron_r3.train.policy_head import KeptTokens, Policy

    places = torch.tensor([place for place, ids in sets.items() for _ in ids])
    limited = torch.zeros(BATCH * SEQUENCE, dtype=torch.bool)
    limited[[*sets]] = True
    tokens = KeptTokens(
        places,
        torch.tensor([token for ids in sets.values() for token in ids]),
        limited.reshape(BATCH, SEQUENCE),
    )
    options = {"temperature": TEMPERATURE, "vocab_size": SAMPLERS_ROWS, "kept": tokens}
    return Policy(**{**options, "measures_entropy": True, **more})


def run(rank: int, sizes: dict[str, int], **more: Any) -> dict[str, torch.Tensor]:
    """The loss of each label, the entropies, and the gradient of the output layer's rows."""
    from megatron_r3.replay.active import replaying
    from megatron_r3.train.policy_head import install

    start(**sizes)
    gpt = model(config(sequence_parallel=bool(sizes), **sizes))
    whole = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(4))
    weight = gpt.output_layer.weight
    first = rank * len(weight)
    weight.data.copy_(whole[first : first + len(weight)])
    install(gpt)
    tokens, positions, _ = batch()
    labels, kept = labels_and_kept()
    policy = made_policy(kept, **more)
    policy.attach(labels)
    scale = torch.cos(torch.arange(BATCH * SEQUENCE)).reshape(BATCH, SEQUENCE)
    with replaying(None):
        losses = gpt(tokens, positions, None, labels=labels)
    (losses * scale).sum().backward()
    assert policy.used
    with replaying(None), torch.no_grad():
        logits = gpt(tokens, positions, None)  # [B, S, rows of this rank]
    return {
        "losses": losses.detach(),
        "entropy": policy.entropy_BS,
        "weight": weight.grad,
        "logits": logits,
    }


def expected(logits_BSV: torch.Tensor, kept: dict[int, list[int]]) -> Any:
    """Losses and entropies in float64, label by label."""
    labels, _ = labels_and_kept()
    rows = (logits_BSV.double() / TEMPERATURE).reshape(BATCH * SEQUENCE, -1)
    losses, entropies = [], []
    for place, (row, label) in enumerate(zip(rows, labels.reshape(-1).tolist(), strict=True)):
        allowed = kept.get(place, [*range(SAMPLERS_ROWS)])
        logprob = row[allowed].log_softmax(0)
        losses.append(-logprob[allowed.index(label)])
        entropies.append(-(logprob.exp() * logprob).sum())
    shape = (BATCH, SEQUENCE)
    return torch.stack(losses).reshape(shape), torch.stack(entropies).reshape(shape)


@pytest.mark.parametrize("sizes", [{}, SEVERAL], ids=["1", "TP2"])
def test_the_loss_is_that_of_the_samplers_distribution(patched, sizes):
    ranks = patched.run(run, 2 if sizes else 1, sizes)
    logits = torch.cat([result["logits"] for result in ranks], -1)
    losses, entropies = expected(logits, labels_and_kept()[1])
    for result in ranks:
        torch.testing.assert_close(result["losses"].double(), losses, rtol=0, atol=1e-5)
        torch.testing.assert_close(result["entropy"].double(), entropies, rtol=0, atol=1e-5)
    # controls: without one of the three, the loss is another
    for less in ({"temperature": 1.0}, {"vocab_size": None}, {"kept": None}):
        (wrong,) = patched.run(run, 1, {}, **less)
        assert (wrong["losses"].double() - losses).abs().max() > 0.01, less


def test_gradients_are_those_of_one_process(patched: TreeWorker) -> None:
    (alone,) = patched.run(run, 1, {})
    parts = patched.run(run, 2, SEVERAL)
    both = torch.cat([result["weight"] for result in parts])
    torch.testing.assert_close(both, alone["weight"], rtol=1e-4, atol=1e-5)
    assert not both[SAMPLERS_ROWS:].any()  # the trainer's own rows take no part
