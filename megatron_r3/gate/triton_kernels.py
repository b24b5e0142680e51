"""The two Triton kernels of the replayed gate.

A program is one warp with about a thousand logits, several rows where they fit, so that what is
summed over a row never leaves the warp. A row is read once and written once; the backward pass
computes again what it needs from the logits and the ids.

Shape suffixes: T tokens of one program, E experts, W words of 32 experts, B bits of a word (see
tiles.py), K top-k, padded to a power of two in a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_r3.gate import tiles


@triton.jit(do_not_specialize=["num_tokens"])
def gate_forward(
    logits_ptr,
    ids_ptr,
    bias_ptr,
    live_ptr,
    counted_ptr,
    probs_ptr,
    map_ptr,
    used_ptr,
    differs_ptr,
    num_tokens,
    scale,
    logits_stride_t,
    logits_stride_e,
    ids_stride_t,
    ids_stride_k,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    W: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FUNCTION: tl.constexpr,
    DENSE: tl.constexpr,
):
    """Probabilities and map of BLOCK_T rows; with live rows the ids, with counted rows differs."""
    rows_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    in_T = rows_T < num_tokens
    experts_TWB = (tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None, :])[None, :, :]
    inside_TWB = in_T[:, None, None] & (experts_TWB < E)
    ids_row_T = ids_ptr + rows_T * ids_stride_t
    logits_row_T = logits_ptr + rows_T * logits_stride_t
    logits_TWB = tl.load(
        logits_row_T[:, None, None] + experts_TWB * logits_stride_e, mask=inside_TWB, other=0.0
    ).to(tl.float32)

    given_T = in_T
    if live_ptr is not None:
        live_T = tl.load(live_ptr + rows_T, mask=in_T, other=0) != 0
        given_T = in_T & (live_T == 0)
    words_TW = tl.zeros([BLOCK_T, W], tl.int32)
    for k in tl.static_range(K):
        ids_T = tiles.load_ids(ids_row_T + k * ids_stride_k, given_T, E)
        words_TW = tiles.with_ids(words_TW, ids_T)
    if DENSE or live_ptr is not None:
        k_TK = tl.arange(0, BLOCK_K)[None, :]
        used_TK = tiles.load_ids(
            ids_row_T[:, None] + k_TK * ids_stride_k, given_T[:, None] & (k_TK < K), E
        )

    if live_ptr is not None or counted_ptr is not None:
        scores_TWB = logits_TWB
        if FUNCTION == "pre_softmax":
            most_T, sum_T = tiles.softmax_of(logits_TWB, inside_TWB)
            scores_TWB = tl.exp(logits_TWB - most_T[:, None, None]) / sum_T[:, None, None]
        elif FUNCTION != "softmax":
            scores_TWB = tiles.score(logits_TWB, FUNCTION)
        if bias_ptr is not None:
            bias_1WB = tl.load(bias_ptr + experts_TWB, mask=experts_TWB < E, other=0)
            scores_TWB += bias_1WB.to(tl.float32)
        keys_TWB = tiles.ordered(scores_TWB)
        if live_ptr is not None:
            # few programs have live rows, and a top-k is most of the work of one that does
            if tl.max(live_T.to(tl.int32), axis=0) > 0:
                best_TW, best_TK = tiles.choose(keys_TWB, experts_TWB, inside_TWB, K, BLOCK_K)
                words_TW = tl.where(live_T[:, None], best_TW, words_TW)
                used_TK = tl.where(live_T[:, None], best_TK, used_TK)
            tl.store(
                used_ptr + rows_T[:, None] * K + k_TK,
                used_TK.to(used_ptr.dtype.element_ty),
                mask=in_T[:, None] & (k_TK < K),
            )
    chosen_TWB = tiles.chosen(words_TW) & inside_TWB
    if counted_ptr is not None:
        counted_T = tl.load(counted_ptr + rows_T, mask=in_T, other=0) != 0
        left_TWB = inside_TWB & (chosen_TWB == 0)
        best_left_T = tiles.row_max(tl.where(left_TWB, keys_TWB, tiles.LOWEST))
        worst_taken_T = tiles.row_min(tl.where(chosen_TWB, keys_TWB, tiles.HIGHEST))
        differs_T = counted_T & (best_left_T > worst_taken_T)
        tl.store(differs_ptr + rows_T, differs_T.to(tl.uint8), mask=in_T)

    shift_T, total_T = _row_totals(logits_TWB, chosen_TWB, inside_TWB, K, FUNCTION)
    if DENSE:
        held_TK = (used_TK >= 0) & in_T[:, None] & (k_TK < K)
        taken_TK = tl.load(
            logits_row_T[:, None] + used_TK * logits_stride_e, mask=held_TK, other=0.0
        ).to(tl.float32)
        probs_TK = _raw(taken_TK, shift_T[:, None], FUNCTION) / total_T[:, None] * scale
        tl.store(
            probs_ptr + rows_T[:, None] * K + k_TK,
            tl.where(held_TK, probs_TK, 0.0).to(probs_ptr.dtype.element_ty),
            mask=in_T[:, None] & (k_TK < K),
        )
    else:
        places_TWB = rows_T[:, None, None] * E + experts_TWB
        probs_TWB = _raw(logits_TWB, shift_T[:, None, None], FUNCTION) / total_T[:, None, None]
        probs_TWB = tl.where(chosen_TWB, probs_TWB * scale, 0.0)
        tl.store(probs_ptr + places_TWB, probs_TWB.to(probs_ptr.dtype.element_ty), mask=inside_TWB)
        tl.store(map_ptr + places_TWB, chosen_TWB.to(tl.uint8), mask=inside_TWB)


@triton.jit
def _row_totals(logits_TWB, chosen_TWB, inside_TWB, K: tl.constexpr, FUNCTION: tl.constexpr):
    """What is taken from each logit of a row, and what its raw weights are divided by, `[T]`."""
    if FUNCTION == "softmax":
        shift_T, total_T = tiles.softmax_of(logits_TWB, chosen_TWB)
    elif FUNCTION == "pre_softmax":
        shift_T, total_T = tiles.softmax_of(logits_TWB, inside_TWB)
    else:
        shift_T = tl.zeros([logits_TWB.shape[0]], tl.float32)
        total_T = shift_T + 1.0
        if K > 1:
            scores_TWB = tiles.score(logits_TWB, FUNCTION)
            total_T = tiles.row_sum(tl.where(chosen_TWB, scores_TWB, 0.0)) + 1e-20
    return shift_T, total_T


@triton.jit
def _raw(logits, shift, FUNCTION: tl.constexpr):
    """Weights before their division."""
    if FUNCTION == "softmax" or FUNCTION == "pre_softmax":
        return tl.exp(tl.minimum(logits - shift, 0.0))
    return tiles.score(logits, FUNCTION)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_backward(
    logits_ptr,
    ids_ptr,
    dprobs_ptr,
    dlogits_ptr,
    num_tokens,
    scale,
    logits_stride_t,
    logits_stride_e,
    ids_stride_t,
    ids_stride_k,
    dprobs_stride_t,
    dprobs_stride_e,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    W: tl.constexpr,
    FUNCTION: tl.constexpr,
    DENSE: tl.constexpr,
):
    """The gradient of BLOCK_T rows of logits; `dprobs` is `[T, E]`, if DENSE `[T, K]`."""
    rows_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    in_T = rows_T < num_tokens
    experts_TWB = (tl.arange(0, W)[:, None] * 32 + tl.arange(0, 32)[None, :])[None, :, :]
    inside_TWB = in_T[:, None, None] & (experts_TWB < E)
    dprobs_row_T = dprobs_ptr + rows_T * dprobs_stride_t
    logits_TWB = tl.load(
        logits_ptr + rows_T[:, None, None] * logits_stride_t + experts_TWB * logits_stride_e,
        mask=inside_TWB,
        other=0.0,
    ).to(tl.float32)
    if DENSE:
        dprobs_TWB = tl.zeros([BLOCK_T, W, 32], tl.float32)
    else:
        dprobs_TWB = tl.load(
            dprobs_row_T[:, None, None] + experts_TWB * dprobs_stride_e, mask=inside_TWB, other=0.0
        ).to(tl.float32)

    words_TW = tl.zeros([BLOCK_T, W], tl.int32)
    for k in tl.static_range(K):
        ids_T = tiles.load_ids(ids_ptr + rows_T * ids_stride_t + k * ids_stride_k, in_T, E)
        words_TW = tiles.with_ids(words_TW, ids_T)
    if DENSE:
        for k in range(K):  # unrolled, 64 of these would spill
            ids_T = tiles.load_ids(ids_ptr + rows_T * ids_stride_t + k * ids_stride_k, in_T, E)
            dprobs_T = tl.load(dprobs_row_T + k * dprobs_stride_e, mask=in_T, other=0.0)
            here_TWB = experts_TWB == ids_T[:, None, None]
            dprobs_TWB = tl.where(here_TWB, dprobs_T.to(tl.float32)[:, None, None], dprobs_TWB)
    chosen_TWB = tiles.chosen(words_TW) & inside_TWB
    dprobs_TWB = tl.where(chosen_TWB, dprobs_TWB * scale, 0.0)

    shift_T, total_T = _row_totals(logits_TWB, chosen_TWB, inside_TWB, K, FUNCTION)
    raw_TWB = _raw(logits_TWB, shift_T[:, None, None], FUNCTION)
    weighed_TWB = inside_TWB if FUNCTION == "pre_softmax" else chosen_TWB
    weights_TWB = tl.where(weighed_TWB, raw_TWB / total_T[:, None, None], 0.0)
    # a weight moves the others of its row through their common sum
    common_T = tiles.row_sum(weights_TWB * dprobs_TWB)
    if FUNCTION == "softmax" or FUNCTION == "pre_softmax":
        dlogits_TWB = weights_TWB * (dprobs_TWB - common_T[:, None, None])
    else:
        dscores_TWB = dprobs_TWB
        if K > 1:
            dscores_TWB = (dprobs_TWB - common_T[:, None, None]) / total_T[:, None, None]
        slopes_TWB = tiles.slope(logits_TWB, raw_TWB, FUNCTION)
        dlogits_TWB = tl.where(chosen_TWB, dscores_TWB * slopes_TWB, 0.0)
    tl.store(
        dlogits_ptr + rows_T[:, None, None] * E + experts_TWB,
        dlogits_TWB.to(dlogits_ptr.dtype.element_ty),
        mask=inside_TWB,
    )
