"""Code that is written for upstream's RouterReplay, on a patched tree.

It records, replays and recomputes as its own documentation says. Megatron is imported only inside
the function that a rank runs.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import pytest
import torch

from fidelity.models import MODELS, SEQ_LENGTH, VOCAB_SIZE
from fidelity.reference import build

_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def use_router_replay(rank: int) -> None:
    """Record a forward, replay it in forward and in recompute; refuse both options together.

    Raises:
        AssertionError: what is replayed is not what was recorded.
    """
    argv = [*MODELS["base"].argv(), *_RECOMPUTE.split(), "--micro-batch-size", "1"]
    _, model = build([*argv, "--moe-enable-routing-replay"])
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    def output() -> torch.Tensor:
        ids = torch.arange(SEQ_LENGTH + 1)[None] * 7 % VOCAB_SIZE
        positions = torch.arange(SEQ_LENGTH)[None]
        return model(ids[:, :-1], positions, None, labels=ids[:, 1:])

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    assert len(RouterReplay.global_router_replay_instances) == 4, "one instance for each router"
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    want = output()
    recorded = [ids_TK.clone() for ids_TK in RouterReplay.get_recorded_data()]
    want.sum().backward()
    want_gradients = gradients()

    for shift in (0, 1):  # the same experts, and as a control the next ones
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data([(ids_TK + shift) % 8 for ids_TK in recorded])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        got = output()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        got.sum().backward()
        same = all(map(torch.equal, gradients(), want_gradients))
        assert torch.equal(got, want) == same == (shift == 0), f"experts + {shift}: same is {same}"
    RouterReplay.clear_global_router_replay_action()
    _refuses_both(model)


def _refuses_both(model: torch.nn.Module) -> None:
    import dataclasses

    from megatron.core.transformer import TransformerConfig

    config = getattr(model, "module", model).config
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with pytest.raises(ValueError, match="moe_enable_routing_replay"):
        TransformerConfig(**{**given, "moe_router_replay": True})
