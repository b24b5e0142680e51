"""torch's norms in Megatron, also with sequence parallelism, which Megatron has only in TE's."""

from __future__ import annotations

import copy
from typing import Any

import torch


def patch() -> None:
    """Let WrappedTorchNorm take sequence parallelism, by marking its weights.

    Under sequence parallelism a rank's norm sees its part of the sequence only. Megatron adds the
    gradients of the weights marked `sequence_parallel` over the tensor parallel ranks.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__

    def make_marked(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        unsplit = copy.copy(config)
        unsplit.sequence_parallel = False
        norm = make(cls, unsplit, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = make_marked
