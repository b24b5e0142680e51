"""Which policy sampled: a digest of each layer's router weights.

Router weights are whole on every tensor- and expert-parallel rank, so each rank can check the
layers it has, in any layout, and an update of the router changes them (a frozen router, or an
update below bfloat16's resolution, does not). They are compared as bfloat16, the form in which
samplers hold them; training in float32 rounds to the same bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

__all__ = ["router_digest"]


def router_digest(weight_EH: Tensor) -> str:
    """16 hex digits for one router's weights `[experts, hidden]`, any float dtype and device."""
    as_bytes = weight_EH.detach().to(torch.bfloat16).cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(as_bytes.numpy().tobytes()).hexdigest()[:16]
