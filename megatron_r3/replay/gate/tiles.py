"""Functions that the gate kernels call: to read rows, choose experts, and compute scores.

A tile has the axes `[T, W, 32]`: the rows of one program, words, bits of a word. A tile for up to
16 experts has one word of fewer bits. Expert e of a row is bit e % 32 of word e // 32, so that the
set of experts of a row is W integers. For 128 experts (W = 4) the set {1, 33, 34} is

    words_TW = [[0b10, 0b110, 0, 0]]       1 = word 0, bit 1;   33, 34 = word 1, bits 1 and 2

Collecting the K experts of a row costs K x W steps and not K x E, and next to no registers. The
last two axes together are the experts in order, and are loaded as one row of memory. Triton's
sizes are powers of two: a tile `_TK` has BLOCK_K columns, K rounded up to a power of two.

Shape suffixes (docs/glossary.md): T, K, W.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def rows(num_tokens, BLOCK_T: tl.constexpr):
    """The rows of this program, and which of them exist.

    Example: 10 rows in programs of BLOCK_T = 8. Program 1 has rows 8 to 15, of which only 8 and 9
    exist.
    """
    # int64, because rows * E goes past 2**31 from 2 million rows of 1024 experts on
    rows_T = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    return rows_T, rows_T < num_tokens


@triton.jit
def experts(in_T, E: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    """Two tiles: the expert of each element, `[1, W, BITS]`; which elements exist, `[T, W, BITS]`.

    Example: 40 experts are in 2 words of 32; in the second only the bits 0 to 7 exist.
    """
    experts_1W32 = (tl.arange(0, W)[:, None] * BITS + tl.arange(0, BITS)[None, :])[None, :, :]
    return experts_1W32, in_T[:, None, None] & (experts_1W32 < E)


@triton.jit
def fill_zeros(
    ptr, num_tokens, E: tl.constexpr, BLOCK_T: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr
):
    """Fill this program's rows of a result with zeros; the rows of all programs are contiguous."""
    if W * BITS == E:  # no element of a tile is beyond E: one run of memory, in stores of 16 bytes
        at = tl.arange(0, BLOCK_T * E)
        begin = tl.program_id(0).to(tl.int64) * (BLOCK_T * E)
        inside = at < tl.minimum(num_tokens - tl.program_id(0) * BLOCK_T, BLOCK_T) * E
        tl.store(ptr + begin + at, tl.zeros([BLOCK_T * E], ptr.dtype.element_ty), mask=inside)
    else:
        rows_T, in_T = rows(num_tokens, BLOCK_T)
        experts_1W32, inside_TW32 = experts(in_T, E, W, BITS)
        places_TW32 = rows_T[:, None, None] * E + experts_1W32
        zeros_TW32 = tl.zeros(inside_TW32.shape, ptr.dtype.element_ty)
        tl.store(ptr + places_TW32, zeros_TW32, mask=inside_TW32)


@triton.jit
def whole_rows(ptr, rows_T, in_T, E: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr):
    """What `experts` returns, and the logits of this program's rows as float32, -inf outside."""
    experts_1W32, inside_TW32 = experts(in_T, E, W, BITS)
    places_TW32 = (rows_T * E)[:, None, None] + experts_1W32
    logits_TW32 = tl.load(ptr + places_TW32, mask=inside_TW32, other=-float("inf")).to(tl.float32)
    return experts_1W32, inside_TW32, logits_TW32


@triton.jit
def row_sum(values_TW32):
    """The sum of each row, `[T]`."""
    return tl.sum(tl.sum(values_TW32, axis=2), axis=1)


@triton.jit
def row_max(values_TW32):
    """The largest number of each row, `[T]`."""
    return tl.max(tl.max(values_TW32, axis=2), axis=1)


@triton.jit
def row_min(values_TW32):
    """The smallest number of each row, `[T]`."""
    return tl.min(tl.min(values_TW32, axis=2), axis=1)


@triton.jit
def load_ids(ids_ptr, rows_T, wanted_T, E: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The given experts of wanted rows as int32 `[T, K]`; -1 in other rows and for wrong ids."""
    k_1K = tl.arange(0, BLOCK_K)[None, :]
    wanted_TK = wanted_T[:, None] & (k_1K < K)
    ids_TK = tl.load(ids_ptr + (rows_T * K)[:, None] + k_1K, mask=wanted_TK, other=0)
    # int64 first: the id 2**40 must not become a valid one when its upper half is cut off
    ids_TK = ids_TK.to(tl.int64)
    return tl.where(wanted_TK & (ids_TK >= 0) & (ids_TK < E), ids_TK, -1).to(tl.int32)


@triton.jit
def gather(ptr, rows_T, ids_TK, chosen_TK, E: tl.constexpr):
    """The values of the chosen experts as float32 `[T, K]`; 0 where `chosen_TK` is False."""
    places_TK = (rows_T * E)[:, None] + ids_TK
    return tl.load(ptr + places_TK, mask=chosen_TK, other=0.0).to(tl.float32)


@triton.jit
def with_ids(words_TW, ids_T):
    """The sets `words_TW` with one more expert in each row; the id -1 adds no expert."""
    # id 34: bit 34 & 31 = 2 of word 34 >> 5 = 1.   id -1: word -1 >> 5 = -1, which does not exist.
    bits_T = tl.full(ids_T.shape, 1, tl.int32) << (ids_T & 31)
    here_TW = (ids_T >> 5)[:, None] == tl.arange(0, words_TW.shape[1])[None, :]
    return words_TW | tl.where(here_TW, bits_T[:, None], 0)


@triton.jit
def members(words_TW, BITS: tl.constexpr):
    """The sets `words_TW` as bool `[T, W, BITS]`: True for each expert of a row."""
    return ((words_TW[:, :, None] >> tl.arange(0, BITS)[None, None, :]) & 1) != 0


@triton.jit
def sort_keys(values):
    """int32 numbers that compare as the floats do, with NaN above all others; none may be -0.

    That is the order of torch.topk. Read as an integer, the bits of a positive float grow with the
    float. The bits of a negative float have the sign bit set and grow with the absolute value, so
    all bits but the sign are flipped:

         1.0  0x3f800000 -> 0x3f800000      -1.0  0xbf800000 -> 0xc07fffff (a negative integer)
         2.0  0x40000000 -> 0x40000000      -2.0  0xc0000000 -> 0xbfffffff (a smaller one)
    """
    bits = values.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & HIGHEST)  # bits >> 31 has the sign bit in all 32 bits
    return tl.where(values != values, HIGHEST, keys)


@triton.jit
def choose(
    keys_TW32,
    experts_1W32,
    inside_TW32,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BITS: tl.constexpr,
):
    """The K largest of each row, the lowest index first among equals: ids `[T, K]`.

    Each of K rounds takes the best expert that is left. A row of keys [5, 9, 9, 2] gives expert 1
    (the first of the nines), then 2, then 0.
    """
    num_words: tl.constexpr = keys_TW32.shape[1]
    words_TW = tl.zeros([keys_TW32.shape[0], num_words], tl.int32)
    ids_TK = tl.full([keys_TW32.shape[0], BLOCK_K], -1, tl.int32)
    for k in range(K):
        left_TW32 = inside_TW32 & (members(words_TW, BITS) == 0)
        best_T = row_max(tl.where(left_TW32, keys_TW32, LOWEST))
        is_best_TW32 = left_TW32 & (keys_TW32 == best_T[:, None, None])
        first_T = row_min(tl.where(is_best_TW32, experts_1W32, 32 * num_words))
        words_TW = with_ids(words_TW, first_T)
        # a tile in registers cannot be written at an index: every column is compared with k
        ids_TK = tl.where((tl.arange(0, BLOCK_K) == k)[None, :], first_T[:, None], ids_TK)
    return ids_TK


@triton.jit
def softmax_of(logits_TW32):
    """The largest logit of each row, and the row's sum of exp(logit - largest): both `[T]`."""
    largest_T = row_max(logits_TW32)
    # a row that is not there has the largest logit -inf, and -inf - -inf would be NaN
    largest_T = tl.where(largest_T == -float("inf"), 0.0, largest_T)
    return largest_T, row_sum(tl.exp(logits_TW32 - largest_T[:, None, None]))


@triton.jit
def score(logits, FUNCTION: tl.constexpr):
    """Sigmoid, or the root of softplus, each to float32's own precision.

    The softplus is log(1 + z) with z = exp(x). Triton has no log1p, and log(1 + z) alone loses the
    digits of a small z that do not fit beside the 1. Kahan's log1p is z log(u) / (u - 1) with
    u = 1 + z rounded: log(u) and u - 1 both come from the rounded u, so that the error of rounding
    cancels.

        z = 1e-7: u = 1.00000012, and log(u) = 1.192e-7 is 19 % too large;
                  u - 1 = 1.192e-7 too, so z log(u) / (u - 1) = 1e-7 is right

    Where u is 1 the answer is z itself. Below -17 the root of softplus(x) is exp(x / 2) to all
    digits, and exp(x / 2) is still a number where exp(x) underflows (x = -120: 8.8e-27 and 0).
    Above 20 softplus(x) is x to all digits.
    """
    if FUNCTION == "sigmoid":
        return tl.sigmoid(logits)
    # a NaN must not become the score of -17
    near = tl.maximum(logits, -17.0, propagate_nan=tl.PropagateNan.ALL)
    near = tl.minimum(near, 20.0, propagate_nan=tl.PropagateNan.ALL)
    z = tl.exp(near)
    u = 1.0 + z
    softplus = tl.where(u == 1.0, z, z * (tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0)))
    root = tl.sqrt(tl.where(logits > 20.0, logits, softplus))
    return tl.where(logits < -17.0, tl.exp(0.5 * tl.minimum(logits, 0.0)), root)


@triton.jit
def slope(logits, scores, FUNCTION: tl.constexpr):
    """The derivative of `score` at the logits, given the scores there.

    The derivative of sqrt(softplus(x)) is sigmoid(x) / (2 score). Below -17 `score` returns
    exp(x / 2), which has the derivative score / 2.
    """
    if FUNCTION == "sigmoid":
        return scores * tl.sigmoid(-logits)
    far = logits < -17.0
    return tl.where(far, 0.5 * scores, 0.5 * tl.sigmoid(logits) / tl.where(far, 1.0, scores))
