"""The distribution of the policy: the softmax that gives the log-probs of response tokens.

A sampler divides its logits by a temperature, may leave tokens out (top-p, top-k), and has no rows
for the trainer's padding of the vocabulary. The trainer's log-probs must be of the distribution
from which the sampler drew. So the logits are changed here before they go to Megatron's own
language-model loss, with its tensor parallelism and its fused kernels.

MTP heads call the same loss method of the model, with labels of their own. So a `Policy` is
attached to the labels of the main loss, and MTP losses stay as they are.

Shape suffixes (docs/glossary.md): B, N, S, V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.data.kept import KeptSets
from megatron_r3.train.refuse import refuse

Loss = Callable[[Tensor, Tensor], Tensor]

_CHUNK = 1024  # how many tokens' entropies are computed at once, to bound the memory
_NAME = "_megatron_r3_policy"


@dataclass
class Policy:
    """How the logits of one micro-batch become a distribution.

    Attributes:
        temperature: what the logits are divided by.
        vocab_size: rows of the output layer that the sampler has; the trainer's further rows are
            left out. None: all rows take part.
        kept: the tokens that the sampler kept for each label; None: the sampler kept all tokens.
        measures_entropy: whether `entropy_BS` is wanted.
        returns_entropy: whether the model returns losses and entropies, `[2, B, S]`, instead of
            losses alone. The gradient of the entropy then goes through the model's output, as the
            gradient of the loss does: combined 1F1B cuts the graph at that output.
        entropy_BS: the entropy of each token's distribution, in nats, without gradient; None until
            the entropy was measured.
        used: whether the model has computed its loss with this policy.
    """

    temperature: float = 1.0
    vocab_size: int | None = None
    kept: KeptTokens | None = None
    measures_entropy: bool = False
    returns_entropy: bool = False
    entropy_BS: Tensor | None = None
    used: bool = False

    def check_used(self) -> None:
        """End training if this policy does anything and the model computed its loss without it."""
        changes = self.temperature != 1 or self.vocab_size or self.kept
        if not self.used and (changes or self.measures_entropy or self.returns_entropy):
            refuse(
                "the model does not call compute_language_model_loss, so its log-probs do not "
                "follow the sampler's temperature and vocabulary: use a GPTModel or a hybrid model "
                "of Megatron without a fused output layer"
            )

    def attach(self, labels_BS: Tensor) -> None:
        """Have the loss of these labels computed with this policy."""
        setattr(labels_BS, _NAME, self)


@dataclass(frozen=True)
class KeptTokens:
    """The tokens that the sampler kept, for the labels of one micro-batch.

    Attributes:
        places: int64, on the device: for each kept token the index of its label in `[B, S]`,
            flattened.
        ids: int64, on the device: the kept tokens.
        limited_BS: bool, on the device: the labels that have a kept set; for all other labels every
            token was kept.
    """

    places: Tensor
    ids: Tensor
    limited_BS: Tensor

    @classmethod
    def of(cls, sets: KeptSets, shape: torch.Size) -> KeptTokens:
        """The kept sets of the labels of a batch, moved to the device.

        Args:
            sets: one for each label of the batch, flattened; an empty set means that all tokens
                were kept.
            shape: `[B, S]` of the batch.
        """
        places = np.repeat(np.arange(len(sets.sizes_N)), sets.sizes_N)
        arrays = (places, sets.ids_V.astype(np.int64), sets.sizes_N > 0)
        moved = [torch.from_numpy(array).cuda(non_blocking=True) for array in arrays]
        return cls(moved[0], moved[1], moved[2].reshape(shape))


def install(model: torch.nn.Module) -> None:
    """Make a model's loss use the `Policy` that is attached to its labels.

    Args:
        model: a LanguageModule of Megatron.
    """
    upstream: Loss = model.compute_language_model_loss  # type: ignore[assignment]
    if getattr(upstream, _NAME, False):
        return

    def loss(labels: Tensor, logits: Tensor) -> Tensor:
        policy: Policy | None = getattr(labels, _NAME, None)
        if policy is None:
            return upstream(labels, logits)
        policy.used = True
        logits = limited(logits, policy, _tensor_parallel_group())
        if policy.returns_entropy:
            entropy_BS = Entropy.apply(logits, _tensor_parallel_group())
            policy.entropy_BS = entropy_BS.detach()
            return torch.stack([upstream(labels, logits), entropy_BS])
        if policy.measures_entropy:
            policy.entropy_BS = entropy(logits, _tensor_parallel_group())
        return upstream(labels, logits)

    setattr(loss, _NAME, True)
    model.compute_language_model_loss = loss  # type: ignore[assignment]


def limited(logits: Tensor, policy: Policy, group: Any | None = None) -> Tensor:
    """The logits of the policy: divided by the temperature, very low where a token is left out.

    Args:
        logits: `[S, B, rows of this rank]`; the rows of the vocabulary are split over the ranks of
            the group in order.
        policy: see `Policy`.
        group: the tensor-parallel group; None for one rank.
    """
    if policy.temperature != 1:
        logits = logits.float() / policy.temperature
    first = 0 if group is None else group.rank() * logits.shape[-1]
    if policy.vocab_size is not None and first + logits.shape[-1] > policy.vocab_size:
        row = torch.arange(first, first + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(row >= policy.vocab_size, _least(logits))
    if policy.kept is not None:
        logits = logits.masked_fill(_left_out(logits, policy.kept, first), _least(logits))
    return logits


def _least(logits: Tensor) -> float:
    """The logit of a token that is left out: its probability is exactly 0 in float32.

    The logit is not -inf. A fused loss goes over the vocabulary block by block and subtracts the
    largest logit so far: if a whole block is left out, -inf - -inf would be NaN.
    """
    return torch.finfo(logits.dtype).min / 2


class Entropy(torch.autograd.Function):
    """`entropy` with a gradient.

    The forward pass computes the gradient too, and keeps it, in as much memory as the logits need.
    The logits cannot be kept instead: losses of Megatron and Transformer Engine overwrite them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Any | None) -> Tensor:
        """Return the entropy `[B, S]`; see `entropy`."""
        slope = torch.empty_like(logits, memory_format=torch.contiguous_format)
        ctx.save_for_backward(slope)
        return entropy(logits, group, slope)

    @staticmethod
    def backward(ctx: Any, gradient_BS: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (slope,) = ctx.saved_tensors
        return (slope * gradient_BS.transpose(0, 1)[..., None]).to(slope.dtype), None


@torch.no_grad()
def entropy(logits: Tensor, group: Any | None = None, slope: Tensor | None = None) -> Tensor:
    """The entropy `[B, S]` of the distributions of `limited` logits, in nats; no gradient.

    Args:
        logits: `[S, B, rows of this rank]`.
        slope: a tensor like the logits, into which the derivative of each entropy by its logits is
            written; None if the derivative is not wanted.
    """
    rows = logits.detach().flatten(0, 1)
    slopes: Sequence[Tensor | None] = [None] * len(rows)
    if slope is not None:
        slopes = slope.flatten(0, 1).split(_CHUNK)
    parts = [
        _entropy(chunk.float(), group, into)
        for chunk, into in zip(rows.split(_CHUNK), slopes, strict=False)
    ]
    return torch.cat(parts).reshape(logits.shape[:2]).transpose(0, 1)


def _entropy(logits: Tensor, group: Any | None, slope: Tensor | None) -> Tensor:
    """The entropy of each row: log Z - sum(p x), with sums over the vocabulary of all ranks.

    x is a logit minus the row's largest logit, Z is sum(exp(x)), p is exp(x) / Z. The derivative by
    a logit is -p (log p + entropy), with log p = x - log Z.
    """
    most = _over_ranks(logits.max(-1).values, torch.distributed.ReduceOp.MAX, group)
    shifted = logits - most[:, None]
    weight = shifted.exp()
    total = _over_ranks(weight.sum(-1), torch.distributed.ReduceOp.SUM, group)
    # A token that is left out has weight 0. Its product is set to 0, also if its logit is -inf.
    products = torch.where(weight > 0, weight * shifted, 0.0)
    product = _over_ranks(products.sum(-1), torch.distributed.ReduceOp.SUM, group)
    found = total.log() - product / total
    if slope is not None:
        log_p = shifted - total.log()[:, None]
        slope.copy_(torch.where(weight > 0, -log_p.exp() * (log_p + found[:, None]), 0.0))
    return found


def _over_ranks(values: Tensor, operation: Any, group: Any | None) -> Tensor:
    if group is not None:
        torch.distributed.all_reduce(values, operation, group=group)
    return values


def _left_out(logits: Tensor, kept: KeptTokens, first: int) -> Tensor:
    """True for the tokens that the sampler left out, `[S, B, rows of this rank]`."""
    sequence, _, num_rows = logits.shape
    limited_SB = kept.limited_BS.transpose(0, 1)[..., None]
    out = limited_SB.expand(logits.shape).contiguous()
    here = (kept.ids >= first) & (kept.ids < first + num_rows)
    # a place is an index of [B, S] flattened, and the logits are [S, B, rows]
    row, column = kept.places[here] // sequence, kept.places[here] % sequence
    out[column, row, kept.ids[here] - first] = False
    return out


def _tensor_parallel_group() -> Any | None:
    from megatron.core import mpu

    group = mpu.get_tensor_model_parallel_group()
    return group if group.size() > 1 else None
