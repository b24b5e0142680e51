"""Decodes what rollout engines return into checked rollouts.

megatron.py, own.py, sglang.py and vllm.py each have a function `decode_increments`; docs/engines.md
names the responses that these functions read, and has examples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_r3.data.engines import megatron, own, sglang, vllm
from megatron_r3.data.engines.conversation import Increment, stitch
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.rollout import Rollout

__all__ = ["EngineError", "Increment", "ModelShape", "decode", "decode_increments", "stitch"]

# transformers.py is not here: it captures routes of a model in this process, and imports torch
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
        shape: the MoE layers of the model that the engine runs.
        where: the name of the request in errors.
        options: keyword options of the engine's `decode_increments`.

    Returns:
        One rollout for each choice. Its `group` is the index of its prompt in the request, its
        `reward` is `UNREWARDED`, and its `policy_version` is `UNKNOWN_POLICY` unless several
        versions sampled it (`stitch`). The caller sets reward and policy version.

    Raises:
        EngineError: naming `where` and, as far as the fault has them, choice, token and layer. A
            response is refused if its routes do not start at token 0: decode all responses of the
            conversation with `decode_increments`, and join them with `stitch`.
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
    """The increment of each choice of one response; `decode` describes the arguments.

    An increment is what the choice adds to its conversation.

    Raises:
        EngineError: naming `where` and, as far as the fault has them, choice, token and layer.
    """
    return _DECODERS[engine](response, request, shape, where, **options)
