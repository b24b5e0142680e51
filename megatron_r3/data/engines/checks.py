"""Checks of one response, its tokens and its routes, for all engines.

Shape suffixes (docs/glossary.md): T, N, G, L, Y, K.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.data.engines.body import most_tokens
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.values import wrong_token
from megatron_r3.replay.routes import Routes, RoutesError
from megatron_r3.replay.words import quoted, said

_NOT_CAPTURED = (
    "Known to return zeros: vLLM 0.22 to 0.26 on CPU, vLLM before 0.27 with FlashInfer's TRTLLM "
    "kernels, vLLM 0.21 for rows of a cached prefix"
)

ANOTHER_MODEL = "is --model the model that the server runs?"
STREAMED = "a streamed response is not read; ask with stream false"


def refuse_response(
    response: Mapping[str, Any], request: Mapping[str, Any], any_model: str = ""
) -> None:
    """Refuse a response of which no choice can be decoded.

    Args:
        any_model: the name that the engine returns for every model; empty if there is no such name.

    Raises:
        EngineError: the response is an error or names another model than the request, or the
            request asked for a stream or for an echo of the prompt.
    """
    # The forms of an error are {"error": {"message": ...}} or {"error": "..."} (vLLM), {"detail":
    # ...} (FastAPI), and {"object": "error", "message": ...} (SGLang's OpenAI endpoints).
    failed = response.get("error") or response.get("detail")
    if not failed and response.get("object") == "error":
        failed = response
    if failed:
        message = failed.get("message", failed) if isinstance(failed, Mapping) else failed
        raise EngineError(f"the server refused the request: {said(message)}")
    if request.get("stream"):
        raise EngineError(STREAMED)
    if request.get("echo"):
        raise EngineError("the response repeats the prompt (echo); ask with echo false")
    asked, got = request.get("model"), response.get("model")
    if asked and got and got not in (asked, any_model or asked):
        raise EngineError(
            f"the response names the model {quoted(got)}; the request asked for {quoted(asked)}"
        )


def refuse_half_way(reason: Any) -> None:
    """Refuse a choice that the engine aborted: the policy would have gone on sampling.

    Args:
        reason: the finish reason, a text (vLLM, Megatron) or an object with a `type` (SGLang).

    Raises:
        EngineError: the reason is "abort" or "error".
    """
    message = reason.get("message") if isinstance(reason, Mapping) else None
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind in ("abort", "error"):
        why = f": {said(message)}" if message else ""
        raise EngineError(f"the engine ended the response with {kind!r}, half-way{why}")


def checked_tokens(
    prompt: np.ndarray, response_G: np.ndarray, request: Mapping[str, Any], shape: ModelShape
) -> np.ndarray:
    """The tokens of prompt and response as one sequence, int32 `[N]`.

    Raises:
        EngineError: an id that the model's vocabulary does not have, or more sampled tokens than
            the request allows.
    """
    most = most_tokens(request)
    if most is not None and len(response_G) > most:
        raise EngineError(f"{len(response_G)} response tokens; at most {most} were asked for")
    tokens_N = np.concatenate([prompt, response_G])
    wrong = wrong_token(tokens_N, shape.vocab_size)
    if wrong is not None:
        raise EngineError(f"token {wrong[0]} {wrong[1]}")
    return tokens_N


def checked_routes(
    rows_TYK: np.ndarray, num_tokens: int, shape: ModelShape, start: int = 0
) -> Routes:
    """Routes of the tokens from `start` on, `[L, N - 1 - start, K]`.

    Args:
        rows_TYK: ids of all hidden layers, zero in dense layers, or of the MoE layers alone.
        num_tokens: N, of prompt and response together; N - 1 - start rows are expected, because
            the last token was never forwarded.
        shape: the MoE layers of the model that the engine runs.
        start: the token of row 0.

    Raises:
        EngineError: the number of rows, layers or experts of a row is wrong, a dense layer has
            routes, or rows were not captured.
        RoutesError: an id is out of range, or twice in a row.
    """
    _check_rows(rows_TYK, num_tokens, shape, start)
    rows_TLK = _moe_layers(rows_TYK, shape)
    # With K = 1 a row [0] may mean expert 0, so Routes accepts zeros: look for zeros first. With
    # K > 1 Routes refuses a row of zeros, which has expert 0 twice. Then look for zeros, so that
    # the error names the cause.
    if shape.topk == 1:
        _refuse_not_captured(rows_TLK, shape, start)
    try:
        return Routes.from_array(rows_TLK.transpose(1, 0, 2), shape.num_experts, first_token=start)
    except RoutesError:
        _refuse_not_captured(rows_TLK, shape, start)
        raise


def _check_rows(rows_TYK: np.ndarray, num_tokens: int, shape: ModelShape, start: int) -> None:
    expected = num_tokens - 1 - start
    rows, _, topk = rows_TYK.shape
    if rows != expected:
        ignored = start > 0 and rows == num_tokens - 1
        raise EngineError(
            f"{rows} rows of routes for {num_tokens} tokens; expected {expected}, from token "
            f"{start} on"
            + (
                "; the start in the request (vLLM: routed_experts_prompt_start) was ignored"
                if ignored
                else row_cause(rows, expected)
            )
        )
    if topk != shape.topk:
        raise EngineError(f"top-{topk} routes; the model is top-{shape.topk}: {ANOTHER_MODEL}")


def row_cause(rows: int, expected: int) -> str:
    """The likely cause of a wrong number of rows, for an error."""
    if rows > expected:
        return (
            ": were tokens cut off after they were sampled, for example behind a stop word? "
            "Take the response as the server sent it"
        )
    return ": are rows of a cached prefix missing? Start the server without its prefix cache"


def _moe_layers(rows_TYK: np.ndarray, shape: ModelShape) -> np.ndarray:
    """The rows of the MoE layers, `[T, L, K]`."""
    layers, num_moe = rows_TYK.shape[1], len(shape.moe_layers)
    if layers == num_moe:
        return rows_TYK
    if layers != shape.num_hidden_layers:
        raise EngineError(
            f"routes of {layers} layers; the model has {shape.num_hidden_layers}, {num_moe} of "
            f"them MoE layers: {ANOTHER_MODEL}"
        )
    # engines send zeros for dense layers; other ids there mean that the server's model has other
    # MoE layers than the config says
    for layer in range(layers):
        if layer not in shape.moe_layers and rows_TYK[:, layer].any():
            raise EngineError(
                f"routes at hidden layer {layer}, which is dense in the model's config: the server "
                "runs another model"
            )
    return rows_TYK[:, list(shape.moe_layers)]


def _refuse_not_captured(rows_TLK: np.ndarray, shape: ModelShape, start: int) -> None:
    """Refuse rows of zeros, which engines return where they captured nothing."""
    zero_TL = ~rows_TLK.any(-1)
    if shape.topk == 1:  # a row [0] may mean expert 0, unless all rows of a response are [0]
        zero_TL &= zero_TL.all() and shape.num_experts > 1
    if not zero_TL.any():
        return
    row, moe_layer = (int(i) for i in np.argwhere(zero_TL)[0])
    layer = shape.moe_layers[moe_layer]
    raise EngineError(
        f"the engine did not capture routes: {int(zero_TL.sum())} of {zero_TL.size} pairs of token "
        f"and layer have zeros alone, the first at token {row + start}, hidden layer {layer}. "
        f"{_NOT_CAPTURED}"
    )
