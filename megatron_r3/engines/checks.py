"""What the tokens and routes of one response must satisfy, whichever engine sent them.

Shape suffixes: T rows, P prompt tokens, G sampled tokens, L MoE layers, H layers as sent, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_r3.engines.body import most_tokens
from megatron_r3.engines.shape import EngineError, ModelShape
from megatron_r3.routes import Routes, RoutesError
from megatron_r3.values import wrong_token

_NOT_CAPTURED = (
    "Known to return zeros: vLLM 0.22-0.26 on CPU, vLLM before 0.27 with FlashInfer TRTLLM "
    "kernels, prefix-cached rows in 0.21"
)


def checked_tokens(
    prompt_P: np.ndarray,
    response_G: np.ndarray,
    request: Mapping[str, Any],
    shape: ModelShape,
    where: str,
) -> np.ndarray:
    """Prompt and response as one sequence, int32 `[P + G]`.

    Raises:
        EngineError: an id that the model's vocabulary does not have, or more sampled tokens than
            the request allows.
    """
    most = most_tokens(request, where)
    if most is not None and len(response_G) > most:
        raise EngineError(
            f"{where}: {len(response_G)} response tokens; at most {most} were asked for"
        )
    tokens = np.concatenate([prompt_P, response_G])
    wrong = wrong_token(tokens, shape.vocab_size)
    if wrong is not None:
        raise EngineError(f"{where}: token {wrong[0]} {wrong[1]}")
    return tokens


def checked_routes(
    rows_THK: np.ndarray,
    num_tokens: int,
    shape: ModelShape,
    where: str,
    start: int,
    cached_rows: str = "refuse",
) -> Routes:
    """Routes of a rollout's tokens from `start` on, out of `[T, layers, K]` ids.

    Args:
        rows_THK: all hidden layers (dense ones are zero), or the MoE layers alone.
        num_tokens: N, prompt and response; N - 1 - start rows are expected.
        shape: of the model that the engine runs.
        where: what errors call the data.
        start: the token of row 0.
        cached_rows: of tokens whose ids are zero in every layer: "refuse", or "missing" to take
            them as not recorded.

    Raises:
        EngineError: wrong rows, layers or top-k, wrong ids, or rows that were not captured.
    """
    if cached_rows not in ("refuse", "missing"):
        raise EngineError(f"{where}: cached rows are refuse or missing; got {cached_rows!r}")
    _check_rows(rows_THK, num_tokens, shape, where, start)
    rows_TLK = _moe_layers(rows_THK, shape, where)
    recorded_T = None
    if cached_rows == "missing" and shape.topk > 1:
        recorded_T = np.asarray(rows_TLK.any((1, 2)))
    if shape.topk == 1:  # zero is expert 0 unless it is all that there is
        _refuse_not_captured(rows_TLK, shape, where, start)
    try:
        return Routes.from_array(
            rows_TLK.transpose(1, 0, 2), shape.num_experts, recorded_T, where, start
        )
    except RoutesError as error:
        _refuse_not_captured(rows_TLK, shape, where, start, recorded_T)
        raise EngineError(str(error)) from error


def _check_rows(
    rows_THK: np.ndarray, num_tokens: int, shape: ModelShape, where: str, start: int
) -> None:
    expected = num_tokens - 1 - start
    rows, _, topk = rows_THK.shape
    if rows != expected:
        ignored = start > 0 and rows == num_tokens - 1
        raise EngineError(
            f"{where}: {rows} rows of routes for {num_tokens} tokens from token {start} on; "
            f"expected {expected}"
            + ("; the server ignored routed_experts_prompt_start" if ignored else "")
        )
    if topk != shape.topk:
        raise EngineError(f"{where}: top-{topk} routes; the model is top-{shape.topk}")


def _moe_layers(rows_THK: np.ndarray, shape: ModelShape, where: str) -> np.ndarray:
    layers, num_moe = rows_THK.shape[1], len(shape.moe_layers)
    if layers == num_moe:
        return rows_THK
    if layers != shape.num_hidden_layers:
        raise EngineError(
            f"{where}: routes of {layers} layers; the model has {shape.num_hidden_layers}, "
            f"{num_moe} of them MoE layers"
        )
    dense = [i for i in range(layers) if i not in shape.moe_layers]
    for layer in dense:
        if rows_THK[:, layer].any():
            raise EngineError(
                f"{where}: routes at hidden layer {layer}, which is dense in the model's config: "
                "the server runs another model"
            )
    return rows_THK[:, list(shape.moe_layers)]


def _refuse_not_captured(
    rows_TLK: np.ndarray,
    shape: ModelShape,
    where: str,
    start: int,
    recorded_T: np.ndarray | None = None,
) -> None:
    """A row of zeros is no route: ids are distinct. With K = 1 only a whole response can tell."""
    zero_TL = ~rows_TLK.any(-1)
    if shape.topk == 1:
        zero_TL &= zero_TL.all() and shape.num_experts > 1
    if recorded_T is not None:
        zero_TL &= recorded_T[:, None]
    if not zero_TL.any():
        return
    row, trace_layer = (int(i) for i in np.argwhere(zero_TL)[0])
    raise EngineError(
        f"{where}: the engine did not capture routes: {int(zero_TL.sum())} of {zero_TL.size} rows "
        f"are zeros, the first at token {row + start}, hidden layer "
        f"{shape.moe_layers[trace_layer]}. {_NOT_CAPTURED}"
    )
