"""A program that uses upstream's RouterReplay as upstream's documentation says.

The program records, replays and recomputes. Megatron is imported only inside the functions that a
rank runs.

Shape suffixes (docs/glossary.md): T, K.
"""

from __future__ import annotations

import dataclasses

import torch

from proof.fidelity.models import MODELS, SEQ_LENGTH, VOCAB_SIZE
from proof.fidelity.reference import build

_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def use_router_replay(rank: int) -> None:
    """Record a forward pass, and replay it in a forward pass and its recompute.

    Raises:
        AssertionError: a replay of the recorded experts gives other results, a replay of other
            experts gives the same, or `_assert_not_both` fails.
    """
    argv = [*MODELS["base"].argv(), *_RECOMPUTE.split(), "--micro-batch-size", "1"]
    _, model = build([*argv, "--moe-enable-routing-replay"])
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    def output() -> torch.Tensor:
        ids = torch.arange(SEQ_LENGTH + 1)[None] * 7 % VOCAB_SIZE
        positions = torch.arange(SEQ_LENGTH)[None]
        return model(ids[:, :-1], positions, None, labels=ids[:, 1:])

    def gradients() -> list[torch.Tensor]:
        copies = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return copies

    assert len(RouterReplay.global_router_replay_instances) == 4, "one instance for each router"
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    want = output()
    recorded = [ids_TK.clone() for ids_TK in RouterReplay.get_recorded_data()]
    want.sum().backward()
    want_gradients = gradients()

    for shift in (0, 1):  # 0: the recorded experts; 1: a control with the next expert of each
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data([(ids_TK + shift) % 8 for ids_TK in recorded])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        got = output()
        # with this action the recompute in the backward pass takes the same routes again
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        got.sum().backward()
        same = all(map(torch.equal, gradients(), want_gradients))
        assert torch.equal(got, want) == same == (shift == 0), f"experts + {shift}: same is {same}"
    RouterReplay.clear_global_router_replay_action()
    _assert_not_both(model)


def _assert_not_both(model: torch.nn.Module) -> None:
    """Assert that a config with RouterReplay and moe_router_replay both on is refused.

    Only a tree whose inference engine can record beside replay (`engine_records`) accepts the
    config. Such a tree refuses to replay with RouterReplay: see
    `tests/functional/test_untaken.py`.
    """
    from megatron.core.transformer import TransformerConfig

    from megatron_r3.seams.option import engine_records

    config = getattr(model, "module", model).config
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    refusal = "it was accepted"
    try:
        TransformerConfig(**{**given, "moe_router_replay": True})
    except ValueError as error:
        refusal = str(error)
    expected = "it was accepted" if engine_records() else "moe_enable_routing_replay"
    assert expected in refusal, refusal
