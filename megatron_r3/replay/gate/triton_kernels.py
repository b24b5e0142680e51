"""The two Triton kernels of the replayed gate.

A program is one warp with about a thousand logits, so that what is summed over a row never leaves
the warp; it has several rows where they fit. A row is read once and written once; the backward pass
computes again what it needs from the logits and the ids. How a tile is laid out: see tiles.py.

The constants of both kernels: E experts, K experts for each row, BLOCK_T rows for each program, W
words of 32 experts for each row, FUNCTION the name in `GateOptions.function`. For 128 experts a
program has W = 4 words and BLOCK_T = 1024 / (32 x 4) = 8 rows. All strides are in elements.

Shape suffixes (docs/glossary.md): T, K, W.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_r3.replay.gate import tiles


# Triton compiles a kernel of its own for integers that are 1 or divisible by 16. num_tokens changes
# with every batch, so it is exempt.
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
):
    """Probabilities and map of BLOCK_T rows.

    Four pointers may be None, and the code for them is then not compiled: `bias_ptr`, `live_ptr`
    with `used_ptr` (the ids that were used), `counted_ptr` with `differs_ptr`. BLOCK_K is K padded
    to a power of two. Masks and the map are bytes.
    """
    rows_T, in_T, experts_1W32, inside_TW32 = tiles.rows_and_experts(num_tokens, E, BLOCK_T, W)
    logits_TW32 = tiles.load_rows(
        logits_ptr, logits_stride_t, logits_stride_e, rows_T, experts_1W32, inside_TW32
    )
    given_T = in_T  # rows whose experts are those of `ids`
    if live_ptr is not None:
        live_T = tl.load(live_ptr + rows_T, mask=in_T, other=0) != 0
        given_T = in_T & (live_T == 0)
    words_TW = tiles.load_set(ids_ptr, ids_stride_t, ids_stride_k, rows_T, given_T, E, K, W)

    if live_ptr is not None or counted_ptr is not None:
        keys_TW32 = _selection_keys(logits_TW32, inside_TW32, experts_1W32, bias_ptr, E, FUNCTION)
    if live_ptr is not None:
        k_1K = tl.arange(0, BLOCK_K)[None, :]
        used_TK = tiles.load_ids(
            ids_ptr + (rows_T * ids_stride_t)[:, None] + k_1K * ids_stride_k,
            given_T[:, None] & (k_1K < K),
            E,
        )
        # few programs have live rows, and a top-k is most of the work of one that does
        if tl.max(live_T.to(tl.int32), axis=0) > 0:
            best_TW, best_TK = tiles.choose(keys_TW32, experts_1W32, inside_TW32, K, BLOCK_K)
            words_TW = tl.where(live_T[:, None], best_TW, words_TW)
            used_TK = tl.where(live_T[:, None], best_TK, used_TK)
        tl.store(
            used_ptr + rows_T[:, None] * K + k_1K,
            used_TK.to(used_ptr.dtype.element_ty),
            mask=in_T[:, None] & (k_1K < K),
        )
    chosen_TW32 = tiles.members(words_TW) & inside_TW32
    if counted_ptr is not None:
        counted_T = tl.load(counted_ptr + rows_T, mask=in_T, other=0) != 0
        differs_T = counted_T & _differs_from_topk(keys_TW32, chosen_TW32, inside_TW32)
        tl.store(differs_ptr + rows_T, differs_T.to(tl.uint8), mask=in_T)

    shift_T, total_T = _row_totals(logits_TW32, chosen_TW32, inside_TW32, K, FUNCTION)
    probs_TW32 = _raw_weights(logits_TW32, shift_T, FUNCTION) / total_T[:, None, None]
    probs_TW32 = tl.where(chosen_TW32, probs_TW32 * scale, 0.0)
    places_TW32 = rows_T[:, None, None] * E + experts_1W32
    tl.store(probs_ptr + places_TW32, probs_TW32.to(probs_ptr.dtype.element_ty), mask=inside_TW32)
    tl.store(map_ptr + places_TW32, chosen_TW32.to(tl.uint8), mask=inside_TW32)


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
):
    """The gradient of BLOCK_T rows of logits, from the gradient of the probabilities, `dprobs`.

    With weights w_i = r_i / sum_j r_j (r: raw weights of the chosen experts) and gradients g_i of
    the probabilities, the gradient of r_i is (g_i - sum_j w_j g_j) / sum_j r_j: a raw weight moves
    the others of its row through their sum. For softmax r_i = exp(s_i), so the gradient of the
    logit s_i is w_i (g_i - sum_j w_j g_j); for the other functions the slope of the score follows.
    """
    rows_T, in_T, experts_1W32, inside_TW32 = tiles.rows_and_experts(num_tokens, E, BLOCK_T, W)
    logits_TW32 = tiles.load_rows(
        logits_ptr, logits_stride_t, logits_stride_e, rows_T, experts_1W32, inside_TW32
    )
    dprobs_TW32 = tiles.load_rows(
        dprobs_ptr, dprobs_stride_t, dprobs_stride_e, rows_T, experts_1W32, inside_TW32
    )
    words_TW = tiles.load_set(ids_ptr, ids_stride_t, ids_stride_k, rows_T, in_T, E, K, W)
    chosen_TW32 = tiles.members(words_TW) & inside_TW32
    dprobs_TW32 = tl.where(chosen_TW32, dprobs_TW32 * scale, 0.0)

    shift_T, total_T = _row_totals(logits_TW32, chosen_TW32, inside_TW32, K, FUNCTION)
    raw_TW32 = _raw_weights(logits_TW32, shift_T, FUNCTION)
    # a softmax over all experts has weights, and gradients, outside of the chosen ones too
    weighed_TW32 = inside_TW32 if FUNCTION == "pre_softmax" else chosen_TW32
    weights_TW32 = tl.where(weighed_TW32, raw_TW32 / total_T[:, None, None], 0.0)
    common_T = tiles.row_sum(weights_TW32 * dprobs_TW32)
    if FUNCTION == "softmax" or FUNCTION == "pre_softmax":
        dlogits_TW32 = weights_TW32 * (dprobs_TW32 - common_T[:, None, None])
    else:
        dscores_TW32 = dprobs_TW32  # with K = 1 a score is not divided by anything
        if K > 1:
            dscores_TW32 = (dprobs_TW32 - common_T[:, None, None]) / total_T[:, None, None]
        slopes_TW32 = tiles.slope(logits_TW32, raw_TW32, FUNCTION)
        dlogits_TW32 = tl.where(chosen_TW32, dscores_TW32 * slopes_TW32, 0.0)
    tl.store(
        dlogits_ptr + rows_T[:, None, None] * E + experts_1W32,
        dlogits_TW32.to(dlogits_ptr.dtype.element_ty),
        mask=inside_TW32,
    )


@triton.jit
def _selection_keys(
    logits_TW32, inside_TW32, experts_1W32, bias_ptr, E: tl.constexpr, FUNCTION: tl.constexpr
):
    """The numbers by which a live top-k chooses, as integers that compare in the same way."""
    scores_TW32 = logits_TW32
    if FUNCTION == "pre_softmax":
        # the logits have the same order, but two of them may round to the same probability, and
        # then torch takes the lower index
        largest_T, sum_T = tiles.softmax_of(logits_TW32, inside_TW32)
        scores_TW32 = tl.exp(logits_TW32 - largest_T[:, None, None]) / sum_T[:, None, None]
    elif FUNCTION != "softmax":
        scores_TW32 = tiles.score(logits_TW32, FUNCTION)
    if bias_ptr is not None:
        bias_1W32 = tl.load(bias_ptr + experts_1W32, mask=experts_1W32 < E, other=0)
        scores_TW32 += bias_1W32.to(tl.float32)
    return tiles.sort_keys(scores_TW32)


@triton.jit
def _differs_from_topk(keys_TW32, chosen_TW32, inside_TW32):
    """Rows where some expert that was left out beats the worst that was taken, bool `[T]`."""
    left_TW32 = inside_TW32 & (chosen_TW32 == 0)
    best_left_T = tiles.row_max(tl.where(left_TW32, keys_TW32, tiles.LOWEST))
    worst_taken_T = tiles.row_min(tl.where(chosen_TW32, keys_TW32, tiles.HIGHEST))
    return best_left_T > worst_taken_T


@triton.jit
def _row_totals(logits_TW32, chosen_TW32, inside_TW32, K: tl.constexpr, FUNCTION: tl.constexpr):
    """What the logits of a row are shifted by, and what its raw weights are divided by, `[T]`."""
    if FUNCTION == "softmax":
        shift_T, total_T = tiles.softmax_of(logits_TW32, chosen_TW32)
    elif FUNCTION == "pre_softmax":
        shift_T, total_T = tiles.softmax_of(logits_TW32, inside_TW32)
    else:
        shift_T = tl.zeros([logits_TW32.shape[0]], tl.float32)
        total_T = shift_T + 1.0
        if K > 1:
            scores_TW32 = tiles.score(logits_TW32, FUNCTION)
            total_T = tiles.row_sum(tl.where(chosen_TW32, scores_TW32, 0.0)) + 1e-20
    return shift_T, total_T


@triton.jit
def _raw_weights(logits_TW32, shift_T, FUNCTION: tl.constexpr):
    """Weights before they are divided by the total of their row."""
    if FUNCTION == "softmax" or FUNCTION == "pre_softmax":
        # experts outside of the sum may have larger logits, whose exponential could overflow
        return tl.exp(tl.minimum(logits_TW32 - shift_T[:, None, None], 0.0))
    return tiles.score(logits_TW32, FUNCTION)
