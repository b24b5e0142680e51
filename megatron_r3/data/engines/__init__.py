"""What rollout engines return, decoded into checked rollouts.

    from megatron_r3.data.engines import ModelShape, decode

    shape = ModelShape.from_hf_config("model/config.json")
    rollouts = decode("sglang", response, request, shape, "request 7")

Each engine has a file with one function, `decode_increments`; docs/engines.md says what each reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_r3.data.engines import megatron, own, sglang, vllm
from megatron_r3.data.engines.conversation import Increment, stitch
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.rollout import Rollout

__all__ = ["EngineError", "Increment", "ModelShape", "decode", "decode_increments", "stitch"]

# transformers.py is not among them: it watches a model that runs here, and importing it loads torch
_DECODERS: dict[str, Callable[..., list[Increment]]] = {
    "megatron": megatron.decode_increments,
    "own": own.decode_increments,
    "sglang": sglang.decode_increments,
    "vllm": vllm.decode_increments,
}


def decode(
    engine: str,
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    **options: Any,
) -> list[Rollout]:
    """The rollouts of one response, in the order of its choices.

    Args:
        engine: "vllm", "sglang", "megatron" or "own".
        response: what the engine returned, as the engine's file describes it.
        request: the body that was sent to the engine.
        shape: of the model that the engine runs.
        where: what errors call the request.
        options: those of the engine's `decode_increments`.

    Returns:
        One rollout for each choice. Its group is the index of its prompt in the request; its
        reward is `UNREWARDED` and its policy version `UNKNOWN_POLICY`, until the caller knows them.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one. A
            response whose routes start late is refused: it is for `decode_increments` and `stitch`.
    """
    found = decode_increments(engine, response, request, shape, where, **options)
    return [increment.whole() for increment in found]


def decode_increments(
    engine: str,
    response: Any,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
    **options: Any,
) -> list[Increment]:
    """What each choice of one response adds to its conversation; the arguments of `decode`.

    Raises:
        EngineError: naming `where` and the choice, and token and layer where there is one.
    """
    return _DECODERS[engine](response, request, shape, where, **options)
