"""Decodes plain arrays, from an engine of your own or from a file.

No command reads such arrays: this file is for a framework that calls `engines.decode` itself.
docs/engines.md has an example.

Shape suffixes (docs/glossary.md): G, K, N, T, Y.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_r3.data.engines.body import (
    id_array,
    integer_array,
    number_array,
    option,
    prompt_array,
    whole_number,
)
from megatron_r3.data.engines.checks import checked_routes, checked_tokens
from megatron_r3.data.engines.conversation import Increment, read_choices
from megatron_r3.data.engines.shape import EngineError, ModelShape, naming


def decode_increments(
    response: Any, request: Mapping[str, Any], shape: ModelShape, where: str
) -> list[Increment]:
    """The increment of each sampled sequence: what the sequence adds to its conversation.

    Args:
        response: one sampled sequence or a list of sequences. A sequence is a mapping with the
            sampled `token_ids`, their `logprobs`, and `routes`: the ids `[T, Y, K]` of every token
            but the last, in all hidden layers or in the MoE layers alone. Each of the three values
            may be an array or a list, and `routes` also base64 of a `.npy`. A sequence needs
            `prompt_token_ids` if the request has no `prompt`.
        request: a mapping with `prompt`, the token ids that every sequence continues; `start`, the
            token of the first row, 0 if left out; and `max_tokens`, if sampled tokens have a limit.
        shape, where: see `engines.decode`.

    Raises:
        EngineError: naming `where` and, as far as the fault has them, sequence, token and layer.
    """
    with naming(where):
        sequences = [response] if isinstance(response, Mapping) else response
        if not isinstance(sequences, Sequence) or isinstance(sequences, str) or not sequences:
            raise EngineError("the response must be a sampled sequence or a list of them")
        start = whole_number(option(request, "start", 0), "start")
    return read_choices(
        *(sequences, where, len(sequences)),
        lambda sequence, _: _increment(sequence, request, start, shape),
    )


def _increment(
    sequence: Any, request: Mapping[str, Any], start: int, shape: ModelShape
) -> Increment:
    if not isinstance(sequence, Mapping):
        raise EngineError(f"a sampled sequence must be a mapping; got {type(sequence).__name__}")
    prompt = prompt_array(
        request.get("prompt"),
        sequence.get("prompt_token_ids"),
        "give them, or a `prompt` in the request",
    )
    response_G = id_array(
        sequence.get("token_ids"), "token_ids", "give the ids of the sampled tokens"
    )
    tokens_N = checked_tokens(prompt, response_G, request, shape)
    rows_TYK = integer_array(sequence.get("routes"), "routes")
    routes = checked_routes(rows_TYK, len(tokens_N), shape, start)
    logprobs_G = number_array(sequence.get("logprobs"), "logprobs")
    return Increment(tokens_N, len(prompt), logprobs_G, routes, start)
