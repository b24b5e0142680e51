"""Parts of the gate kernels: which experts are chosen, and what a score function makes of logits.

A tile is `[T, W, B]`: tokens, words, bits. Expert e of a token is bit e % 32 of word e // 32, so
that a token's set of experts is W integers: choosing costs K x W steps, not K x E, and next to no
registers. The last two axes together are the experts in order, and are loaded as one row.

Shape suffixes: T tokens of one program, W words of 32 experts, B bits of a word, K top-k (padded).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def row_sum(values_TWB):
    """float32 `[T]`, always in the same order."""
    return tl.sum(tl.sum(values_TWB, axis=2), axis=1)


@triton.jit
def row_max(values_TWB):
    """`[T]`."""
    return tl.max(tl.max(values_TWB, axis=2), axis=1)


@triton.jit
def row_min(values_TWB):
    """`[T]`."""
    return tl.min(tl.min(values_TWB, axis=2), axis=1)


@triton.jit
def load_ids(ids_ptr, wanted, E: tl.constexpr):
    """Ids as int32 of the pointers' shape; -1 for what is not wanted or is no expert."""
    ids = tl.load(ids_ptr, mask=wanted, other=0).to(tl.int64)
    return tl.where(wanted & (ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit
def with_ids(words_TW, ids_T):
    """The set with one more expert for each token; -1 adds none."""
    bits_T = tl.full(ids_T.shape, 1, tl.int32) << (ids_T & 31)
    here_TW = (ids_T >> 5)[:, None] == tl.arange(0, words_TW.shape[1])[None, :]
    return words_TW | tl.where(here_TW, bits_T[:, None], 0)


@triton.jit
def chosen(words_TW):
    """The set as bool `[T, W, B]`."""
    return ((words_TW[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1) != 0


@triton.jit
def ordered(values):
    """int32 that compare as the floats do: -0 is 0, and NaN is above all, as in torch.topk."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ HIGHEST, bits)
    return tl.where(values != values, HIGHEST, keys)


@triton.jit
def choose(keys_TWB, experts_TWB, inside_TWB, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The K largest of each row, the lowest index first among equals: set and ids `[T, K]`."""
    num_words: tl.constexpr = keys_TWB.shape[1]
    words_TW = tl.zeros([keys_TWB.shape[0], num_words], tl.int32)
    ids_TK = tl.zeros([keys_TWB.shape[0], BLOCK_K], tl.int32)
    for k in range(K):
        left_TWB = inside_TWB & (chosen(words_TW) == 0)
        best_T = row_max(tl.where(left_TWB, keys_TWB, LOWEST))
        is_best_TWB = left_TWB & (keys_TWB == best_T[:, None, None])
        first_T = row_min(tl.where(is_best_TWB, experts_TWB, 32 * num_words))
        words_TW = with_ids(words_TW, first_T)
        ids_TK = tl.where((tl.arange(0, BLOCK_K) == k)[None, :], first_T[:, None], ids_TK)
    return words_TW, ids_TK


@triton.jit
def softmax_of(logits_TWB, over_TWB):
    """Largest logit and sum of exponentials `[T]`, over a part of the row."""
    largest_T = row_max(tl.where(over_TWB, logits_TWB, -float("inf")))
    largest_T = tl.where(largest_T == -float("inf"), 0.0, largest_T)  # an empty part: no NaN
    over_logits_TWB = tl.where(over_TWB, logits_TWB, -float("inf"))
    return largest_T, row_sum(tl.exp(over_logits_TWB - largest_T[:, None, None]))


@triton.jit
def score(logits, FUNCTION: tl.constexpr):
    """Sigmoid, or the root of softplus, each to float32's own precision.

    The latter is log(1 + z) as z log(u) / (u - 1) with u = 1 + z rounded: the error of u cancels.
    Far to the left it is exp(x / 2), which is still there where exp(x) underflows.
    """
    if FUNCTION == "sigmoid":
        return tl.sigmoid(logits)
    near = tl.minimum(tl.maximum(logits, -17.0), 20.0)
    z = tl.exp(near)
    u = 1.0 + z
    softplus = tl.where(u == 1.0, z, z * (tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0)))
    root = tl.sqrt(tl.where(logits > 20.0, logits, softplus))
    return tl.where(logits < -17.0, tl.exp(0.5 * tl.minimum(logits, 0.0)), root)


@triton.jit
def slope(logits, scores, FUNCTION: tl.constexpr):
    """The derivative of `score`."""
    if FUNCTION == "sigmoid":
        return scores * tl.sigmoid(-logits)
    far = logits < -17.0
    return tl.where(far, 0.5 * scores, 0.5 * tl.sigmoid(logits) / tl.where(far, 1.0, scores))
