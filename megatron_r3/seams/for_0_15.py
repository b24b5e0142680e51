"""What only the patches of 0.15, or of 0.15 and 0.16, call; upstream has it from then on.

Shape suffixes (docs/glossary.md): T, E.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Not used here: the patch puts both under their upstream name.
from megatron_r3.router_replay import RouterReplay as RouterReplay
from megatron_r3.router_replay import RouterReplayAction as RouterReplayAction
from megatron_r3.seams.load import RouterLoad


def z_loss_of_real_tokens(
    load: RouterLoad, logits_TE: Tensor, coeff: float
) -> tuple[Tensor, int | Tensor]:
    """The z-loss of the real tokens, and how many these are; called by 0.15.

    From 0.16 on upstream's `z_loss_func` (megatron/core/transformer/moe/moe_utils.py) takes a
    padding mask and gives the same.
    """
    values_T = torch.logsumexp(logits_TE, dim=-1).square()
    num_tokens = load.real_tokens(logits_TE.shape[0])
    if isinstance(num_tokens, int):  # no token is padding
        return values_T.mean() * coeff, num_tokens
    values_T = load.without_padding(values_T[:, None])[:, 0]
    # A rank may have nothing but padding; its loss is 0, not 0 / 0.
    return values_T.sum() / num_tokens.clamp(min=1) * coeff, num_tokens


def keep_live(module: torch.nn.Module) -> None:
    """Tell the routers in an MTP layer to stay live; called by 0.15 and 0.16.

    From 0.17 on a router is told when it is made.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    for router in module.modules():
        if isinstance(router, TopKRouter):
            router.router_replay.has_routes = False
