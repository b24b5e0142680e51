"""Makes the embedded sampler less exact on purpose, to measure what a mismatch does to a training.

A run that should learn well leaves every option of the config's table [degrade] off, which is the
default. The sampler prints the options when it starts.

Shape suffixes (docs/glossary.md): E, H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_r3.data.engines.transformers import routers_of
from megatron_r3.loop.config_tables import Degrading

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max


class Degraded:
    """Makes a model less exact.

    Args:
        model: a transformers model, which is changed in place.
        how: what is made less exact.

    Attributes:
        is_quiet: whether the router noise is switched off, as it is for a probe.
    """

    def __init__(self, model: nn.Module, how: Degrading) -> None:
        self.how, self.is_quiet = how, False
        self._generator = torch.Generator()
        if how.fp8:
            _round_weights(model)
        if how.router_noise:
            for router in routers_of(model).values():
                router.register_forward_pre_hook(self._noise(router))

    def begin(self, seed: int | None) -> None:
        """Begin a batch: seed its noise, so that a batch with a seed can be repeated."""
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def _noise(self, router: Any) -> Any:
        """A hook that moves the input of a router so that its logits get gaussian noise.

        The logits are x W^T, with W `[E, H]`. For noise n the input is moved by d = n (W W^T)^-1 W,
        because then d W^T = n. A hook on the input works for every kind of router, whatever the
        router does with its logits. Example with one expert, W = [2, 0] and n = 1:
        d = 1 / 4 * [2, 0] = [0.5, 0], and d W^T = 1.
        """
        weight_EH = router.weight.detach().double()
        inverse_EH = torch.linalg.pinv(weight_EH).transpose(0, 1)

        def move(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if self.is_quiet:
                return args
            hidden = args[0]
            shape = (*hidden.shape[:-1], inverse_EH.shape[0])
            noise = torch.randn(shape, generator=self._generator, dtype=torch.float64)
            moved = (self.how.router_noise * noise.to(hidden.device)) @ inverse_EH
            return (hidden + moved.to(hidden.dtype), *args[1:])

        return move


def _round_weights(model: nn.Module) -> None:
    """Round the weights that `Degrading.fp8` names, and add hooks that round the layers' inputs."""
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
                    weight.copy_(fp8(weight))
        module.register_forward_pre_hook(_round_input)


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (fp8(args[0]), *args[1:])


def fp8(values: Tensor) -> Tensor:
    """Values rounded to float8 e4m3; each row is scaled so that its largest |value| becomes 448."""
    scale = values.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12).float() / _LARGEST
    return ((values.float() / scale).to(_FP8).float() * scale).to(values.dtype)
