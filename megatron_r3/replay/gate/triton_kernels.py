"""The three Triton kernels of the replayed gate.

A program is one warp with whole rows, about a thousand logits, so that a sum over a row stays
inside the warp. Only the K logits of a row's experts are read, unless the softmax is one over all
experts. A row of the result is filled with zeros, and then its K numbers are written. The backward
pass computes again what it needs from the logits and the ids. tiles.py says how a tile is laid out.

`gate_choose`, which chooses and compares experts, reads whole rows and is a kernel of its own. In a
kernel that also weighs the experts, Triton could give the K numbers of a row to other threads, and
their sum would round differently. But a recompute, in which nothing is chosen, must give the bits
of its forward pass.

The constants of all kernels: E experts, K experts for each row (BLOCK_K is K padded to a power of
two), BLOCK_T rows for each program, W words of BITS experts for each row, and FUNCTION, which is
`GateOptions.function`. For 128 experts a program has W = 4 words of 32 and
BLOCK_T = 1024 / (32 x 4) = 8 rows; for 8 experts it has 128 rows of one word with 8 bits. The rows
of all tensors are contiguous. One function launches all kernels with a `scale`, so `gate_choose`
has this parameter too, and does not use it.

Shape suffixes (docs/glossary.md): T, K, W.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_r3.replay.gate import tiles


# Triton compiles a kernel of its own for integers that are 1 or divisible by 16. Not so here for
# num_tokens, which changes with every batch.
@triton.jit(do_not_specialize=["num_tokens"])
def gate_choose(
    logits_ptr,
    ids_ptr,
    bias_ptr,
    live_ptr,
    counted_ptr,
    used_ptr,
    differs_ptr,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    """The ids that BLOCK_T rows use, and which counted rows live top-k would send elsewhere.

    `bias_ptr` and two pairs of pointers may be None, and the code for them is then not compiled:
    `live_ptr` with `used_ptr`, and `counted_ptr` with `differs_ptr`. Masks are bytes.
    """
    rows_T, in_T = tiles.rows(num_tokens, BLOCK_T)
    given_T = in_T  # rows whose experts are those of `ids`
    if live_ptr is not None:
        live_T = tl.load(live_ptr + rows_T, mask=in_T, other=0) != 0
        given_T = in_T & (live_T == 0)
    experts_1W32, inside_TW32, logits_TW32 = tiles.whole_rows(logits_ptr, rows_T, in_T, E, W, BITS)
    largest_T = tl.zeros([BLOCK_T], tl.float32)
    total_T = largest_T
    if FUNCTION == "pre_softmax":
        largest_T, total_T = tiles.softmax_of(logits_TW32)
    keys_TW32 = _selection_keys(
        logits_TW32,
        largest_T[:, None, None],
        total_T[:, None, None],
        bias_ptr,
        experts_1W32,
        experts_1W32 < E,
        FUNCTION,
    )
    ids_TK = tiles.load_ids(ids_ptr, rows_T, given_T, E, K, BLOCK_K)
    if live_ptr is not None:
        # Most programs have no live row, and skip the top-k, which would be most of their work.
        if tl.max(live_T.to(tl.int32), axis=0) > 0:
            best_TK = tiles.choose(keys_TW32, experts_1W32, inside_TW32, K, BLOCK_K, BITS)
            ids_TK = tl.where(live_T[:, None], best_TK, ids_TK)
        k_1K = tl.arange(0, BLOCK_K)[None, :]
        tl.store(
            used_ptr + rows_T[:, None] * K + k_1K,
            ids_TK.to(used_ptr.dtype.element_ty),
            mask=in_T[:, None] & (k_1K < K),
        )
    if counted_ptr is not None:
        counted_T = tl.load(counted_ptr + rows_T, mask=in_T, other=0) != 0
        chosen_TK = ids_TK >= 0
        chosen_keys_TK = _selection_keys(
            tiles.gather(logits_ptr, rows_T, ids_TK, chosen_TK, E),
            largest_T[:, None],
            total_T[:, None],
            bias_ptr,
            ids_TK,
            chosen_TK,
            FUNCTION,
        )
        differs_T = _differs_from_topk(keys_TW32, experts_1W32 < E, chosen_keys_TK, chosen_TK)
        tl.store(differs_ptr + rows_T, (counted_T & differs_T).to(tl.uint8), mask=in_T)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_forward(
    logits_ptr,
    ids_ptr,
    probs_ptr,
    map_ptr,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    """Probabilities and map of BLOCK_T rows; the map is bytes."""
    rows_T, in_T = tiles.rows(num_tokens, BLOCK_T)
    ids_TK = tiles.load_ids(ids_ptr, rows_T, in_T, E, K, BLOCK_K)
    chosen_TK = ids_TK >= 0
    logits_TK = tiles.gather(logits_ptr, rows_T, ids_TK, chosen_TK, E)
    if FUNCTION == "pre_softmax":
        _, _, logits_TW32 = tiles.whole_rows(logits_ptr, rows_T, in_T, E, W, BITS)
        shift_T, total_T = tiles.softmax_of(logits_TW32)
        raw_TK = tl.exp(tl.minimum(logits_TK - shift_T[:, None], 0.0))
    else:
        raw_TK, total_T = _weights(logits_TK, chosen_TK, K, FUNCTION)
    probs_TK = raw_TK / total_T[:, None] * scale
    tiles.fill_zeros(probs_ptr, num_tokens, E, BLOCK_T, W, BITS)
    tiles.fill_zeros(map_ptr, num_tokens, E, BLOCK_T, W, BITS)
    tl.debug_barrier()  # another thread of the program may have written the zero of a place
    places_TK = rows_T[:, None] * E + ids_TK
    tl.store(probs_ptr + places_TK, probs_TK.to(probs_ptr.dtype.element_ty), mask=chosen_TK)
    tl.store(map_ptr + places_TK, tl.full(ids_TK.shape, 1, tl.uint8), mask=chosen_TK)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_backward(
    logits_ptr,
    ids_ptr,
    dprobs_ptr,
    dlogits_ptr,
    num_tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    W: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    """The gradient of BLOCK_T rows of logits, from the gradient of the probabilities, `dprobs`.

    With weights w_i = r_i / sum_j r_j (r: raw weights of the chosen experts) and gradients g_i of
    the weights, the gradient of r_i is (g_i - sum_j w_j g_j) / sum_j r_j: each raw weight changes
    all weights of its row through the sum. For softmax r_i = exp(s_i), so the logit s_i gets
    w_i (g_i - sum_j w_j g_j). The formula is the same for pre_softmax, where the sums are over all
    experts, with g_i = 0 where expert i is not chosen. For sigmoid and sqrtsoftplus the gradient of
    r_i (g_i if K is 1) is multiplied by the slope of the score.
    """
    rows_T, in_T = tiles.rows(num_tokens, BLOCK_T)
    ids_TK = tiles.load_ids(ids_ptr, rows_T, in_T, E, K, BLOCK_K)
    chosen_TK = ids_TK >= 0
    logits_TK = tiles.gather(logits_ptr, rows_T, ids_TK, chosen_TK, E)
    dprobs_TK = scale * tiles.gather(dprobs_ptr, rows_T, ids_TK, chosen_TK, E)
    if FUNCTION == "pre_softmax":
        # a softmax over all experts has weights, and gradients, outside of the chosen ones too
        experts_1W32, inside_TW32, logits_TW32 = tiles.whole_rows(
            logits_ptr, rows_T, in_T, E, W, BITS
        )
        shift_T, total_T = tiles.softmax_of(logits_TW32)
        raw_TK = tl.where(chosen_TK, tl.exp(tl.minimum(logits_TK - shift_T[:, None], 0.0)), 0.0)
    else:
        raw_TK, total_T = _weights(logits_TK, chosen_TK, K, FUNCTION)
    weights_TK = raw_TK / total_T[:, None]
    common_T = tl.sum(weights_TK * dprobs_TK, axis=1)
    if FUNCTION == "softmax" or FUNCTION == "pre_softmax":
        dlogits_TK = weights_TK * (dprobs_TK - common_T[:, None])
    else:
        dscores_TK = dprobs_TK  # with K = 1 a score is not divided by anything
        if K > 1:
            dscores_TK = (dprobs_TK - common_T[:, None]) / total_T[:, None]
        dlogits_TK = dscores_TK * tiles.slope(logits_TK, raw_TK, FUNCTION)
    dtype = dlogits_ptr.dtype.element_ty
    if FUNCTION == "pre_softmax":
        exp_TW32 = tl.exp(tl.minimum(logits_TW32 - shift_T[:, None, None], 0.0))
        others_TW32 = -(exp_TW32 / total_T[:, None, None]) * common_T[:, None, None]
        places_TW32 = rows_T[:, None, None] * E + experts_1W32
        tl.store(dlogits_ptr + places_TW32, others_TW32.to(dtype), mask=inside_TW32)
    else:
        tiles.fill_zeros(dlogits_ptr, num_tokens, E, BLOCK_T, W, BITS)
    tl.debug_barrier()  # another thread of the program may have written the zero of a place
    places_TK = rows_T[:, None] * E + ids_TK
    tl.store(dlogits_ptr + places_TK, dlogits_TK.to(dtype), mask=chosen_TK)


@triton.jit
def _selection_keys(logits, largest, total, bias_ptr, experts, wanted, FUNCTION: tl.constexpr):
    """The numbers by which a live top-k chooses, as integers that compare in the same way.

    The logits have any shape, and nothing is summed over a row here: the same logit gives the same
    number in a tile of whole rows and in a tile of chosen experts. Example: expert 33 of a row is
    at word 1, bit 1 of the first tile, and at k = 0 of the second if the row's ids are [33, 7].

    Args:
        largest, total: those of `tiles.softmax_of`, for a softmax over all experts.
        experts: the expert of each logit, to look up its bias.
        wanted: where that expert exists.
    """
    # -0 equals 0 for torch.topk, and not for sort_keys. A score, with a bias or not, is never -0.
    scores = logits + 0.0
    if FUNCTION == "pre_softmax":
        # the logits have the same order, but two of them may round to the same probability, and
        # then the lower index comes first
        scores = tl.exp(logits - largest) / total
    elif FUNCTION != "softmax":
        scores = tiles.score(logits, FUNCTION)
    if bias_ptr is not None:
        scores += tl.load(bias_ptr + experts, mask=wanted, other=0).to(tl.float32)
    return tiles.sort_keys(scores)


@triton.jit
def _differs_from_topk(keys_TW32, exists_1W32, chosen_keys_TK, chosen_TK):
    """Rows where some expert that was left out beats the worst that was taken, bool `[T]`.

    In such a row more experts beat the worst taken one than are taken themselves. Example: keys
    [5, 9, 7, 2], taken {0, 1}. Two keys beat 5 (9 and 7), but only one of them is taken (9).
    """
    worst_T = tl.min(tl.where(chosen_TK, chosen_keys_TK, tiles.HIGHEST), axis=1)
    better_TW32 = exists_1W32 & (keys_TW32 > worst_T[:, None, None])
    better_TK = chosen_TK & (chosen_keys_TK > worst_T[:, None])
    # Floats are added: for a sum of bools LLVM may spill single bits to (slow) local memory.
    return tiles.row_sum(better_TW32.to(tl.float32)) > tl.sum(better_TK.to(tl.float32), axis=1)


@triton.jit
def _weights(logits_TK, chosen_TK, K: tl.constexpr, FUNCTION: tl.constexpr):
    """The raw weights of the chosen experts `[T, K]`, and what they are divided by, `[T]`."""
    if FUNCTION == "softmax":
        largest_T = tl.max(tl.where(chosen_TK, logits_TK, -float("inf")), axis=1)
        # a row whose chosen logits are all -inf has that maximum, and -inf - -inf would be NaN
        largest_T = tl.where(largest_T == -float("inf"), 0.0, largest_T)
        raw_TK = tl.where(chosen_TK, tl.exp(logits_TK - largest_T[:, None]), 0.0)
        total_T = tl.sum(raw_TK, axis=1)
    else:
        raw_TK = tl.where(chosen_TK, tiles.score(logits_TK, FUNCTION), 0.0)
        total_T = tl.sum(raw_TK, axis=1) + 1e-20
        if K == 1:
            total_T = tl.full(total_T.shape, 1.0, tl.float32)
    return raw_TK, total_T
