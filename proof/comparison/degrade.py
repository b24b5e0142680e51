"""Makes the embedded sampler less exact on purpose ([sampler] degrade), for the comparison.

Shape suffixes (docs/glossary.md): E, H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_r3.data.engines.transformers import routers_of

NOISE = 0.7  # the standard deviation of the gaussian noise on every router logit
_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
Begin = Callable[[int | None, bool], None]  # called before each batch: its seed, and if it is exact


def noise(model: nn.Module) -> Begin:
    """Add noise to the router logits of each batch that need not be exact.

    Args:
        model: a transformers model, which is changed in place.
    """
    generator, is_quiet = torch.Generator(), [False]

    def begin(seed: int | None, exact: bool) -> None:
        is_quiet[0] = exact
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)

    def noisy(router: Any) -> Any:
        """A hook that moves the input of a router so that its logits get gaussian noise.

        The logits are x W^T, with W `[E, H]`. For noise n the input is moved by d = n (W W^T)^-1 W,
        because then d W^T = n. A hook on the input works for every kind of router, whatever the
        router does with its logits. Example with one expert, W = [2, 0] and n = 1:
        d = 1 / 4 * [2, 0] = [0.5, 0], and d W^T = 1.
        """
        inverse_EH = torch.linalg.pinv(router.weight.detach().double()).transpose(0, 1)

        def move(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if is_quiet[0]:
                return args
            hidden = args[0]
            shape = (*hidden.shape[:-1], inverse_EH.shape[0])
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            moved = (NOISE * drawn.to(hidden.device)) @ inverse_EH
            return (hidden + moved.to(hidden.dtype), *args[1:])

        return move

    for router in routers_of(model).values():
        router.register_forward_pre_hook(noisy(router))
    return begin


def fp8(model: nn.Module) -> Begin:
    """Round the weights of experts and linear layers to float8 (e4m3), and these layers' inputs.

    Routers and the output layer are not rounded.

    Args:
        model: a transformers model, which is changed in place.
    """
    routers = {id(router) for router in routers_of(model).values()}
    head = model.get_output_embeddings()  # type: ignore[operator]
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        is_linear = isinstance(module, nn.Linear)
        # the experts of a layer are parameters [E, rows, columns] of one module
        is_experts = not is_linear and any(weight.ndim == 3 for weight in own.values())
        if module is head or id(module) in routers or not (is_linear or is_experts):
            continue
        with torch.no_grad():
            for weight in own.values():
                if weight.ndim >= 2:
                    weight.copy_(rounded(weight))
        module.register_forward_pre_hook(_round_input)
    return lambda seed, exact: None


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rounded(args[0]), *args[1:])


def rounded(values: Tensor) -> Tensor:
    """Values rounded to float8 e4m3; each row is scaled so that its largest |value| becomes 448."""
    scale = values.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12).float() / _LARGEST
    return ((values.float() / scale).to(_FP8).float() * scale).to(values.dtype)
