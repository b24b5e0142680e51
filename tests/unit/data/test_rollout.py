"""What the record of a rollout and the shape of a model refuse.

Shape suffixes (docs/glossary.md): K, L, N, T, U.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_r3.data.engines import EngineError, ModelShape
from megatron_r3.data.rollout import (
    UNKNOWN_POLICY,
    UNREWARDED,
    Rollout,
    sampled_tokens,
    turns_of,
)
from megatron_r3.data.store import RolloutStore, StoreError, StoreInfo, write_shard
from megatron_r3.replay.routes import MoEShape, Routes

SHAPE = ModelShape(16, 4, (1, 2, 3), 4)
INFO = StoreInfo.of_model(SHAPE, "vllm", "0.30.0", vocab_size=500)


def spans(*turns: tuple[int, int]) -> np.ndarray:
    return np.array(turns, np.int32)


def rollout(**change) -> Rollout:
    """Five prompt tokens and four sampled ones."""
    rng = np.random.default_rng(0)
    ids_LTK = rng.random((3, 8, 16)).argsort(-1)[..., :4]
    response_N = np.arange(9) >= 5
    whole = Rollout(
        tokens_N=rng.integers(0, 500, 9).astype(np.int32),
        response_N=response_N,
        logprobs_N=np.where(response_N, -rng.random(9), 0).astype(np.float32),
        reward=1.0,
        group=0,
        policy_version=0,
        routes=Routes.from_array(ids_LTK, 16),
    )
    return dataclasses.replace(whole, **change)


def masked(*tokens: int) -> np.ndarray:
    return np.isin(np.arange(9), tokens)


WRONG = {
    "1 tokens; a rollout has at least 2": {"tokens_N": np.zeros(1, np.int32)},
    "logprobs_N of shape (8,) for 9 tokens": {"logprobs_N": np.zeros(8, np.float32)},
    "response_N of shape (4,) for 9 tokens": {"response_N": masked(5, 6, 7, 8)[5:]},
    "8 rows of routes for 10 tokens; expected 9": {
        "tokens_N": np.arange(10),
        "response_N": np.arange(10) >= 6,
        "logprobs_N": np.zeros(10, np.float32),
    },
    "tokens_N must be whole numbers; got float64": {"tokens_N": np.arange(9.0)},
    "token 0 is id -1; ids go": {"tokens_N": np.full(9, -1)},
    "its first token cannot be sampled": {"response_N": masked(0, 5, 6, 7, 8)},
    "token 7: its log-prob is nan, which is not finite": {
        "logprobs_N": np.array([0, 0, 0, 0, 0, -1, -1, np.nan, -1], np.float32)
    },
    "token 2: its log-prob is -1; it must be 0, as the token was not sampled": {
        "logprobs_N": np.array([0, 0, -1, 0, 0, -1, -1, -1, -1], np.float32)
    },
    # turns that overlap, begin late, are empty, leave the rollout, hold a token of the prompt
    **{
        f"its `turns` and its `response` mark different tokens as sampled {turns.tolist()}": {
            "turns_U2": turns
        }
        for turns in (
            spans((5, 7), (6, 8)),
            spans((5, 8), (7, 9)),
            spans((6, 9), (8, 9)),
            spans((5, 5), (5, 9)),
            spans((5, 6), (7, 10)),
            spans((4, 8)),
            spans((4, 9)),
            spans((-1, 9)),
        )
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_parts_that_do_not_belong_together(tmp_path, message):
    wrong = rollout(**WRONG[message])
    expected = message.partition(" [")[0]
    assert str(wrong.wrong_parts()).startswith(expected)
    with pytest.raises(StoreError) as refused:
        write_shard(tmp_path / "store", INFO, [wrong])
    assert str(refused.value).startswith(f"{tmp_path / 'store'}: rollout 0: {expected}")


def test_the_control_is_written_and_read(tmp_path):
    write_shard(tmp_path / "store", INFO, [rollout()])
    store = RolloutStore([tmp_path / "store"])
    assert store.info == INFO
    assert (store.rollout(0).tokens_N == rollout().tokens_N).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": UNREWARDED}, "reward nan: a reward is finite"),
        ({"reward": None}, "reward None: a reward is a number"),
        ({"reward": 1e39}, "reward 1e\\+39: a reward is finite, in float32"),
        ({"sample": -1}, "sample -1: must be a whole number from 0 on"),
        ({"group": 2**63}, "group 9223372036854775808: must be a whole number"),
        ({"policy_version": UNKNOWN_POLICY}, "policy_version -1: must be a whole number from 0 on"),
        ({"group": 1.5}, "group must be a whole number; got 1.5"),
        ({"tokens_N": np.arange(496, 505)}, "token 4 is id 500; ids go from 0 to 499"),
        ({"prompt_digest": 2**63}, "prompt_digest must be of 63 bits"),
    ],
)
def test_what_nobody_rewarded_or_named_is_not_stored(tmp_path, change, message):
    """A decoder sets no reward and no policy version; a store refuses such a rollout."""
    wrong = rollout(**change)
    assert wrong.wrong_parts() is None
    with pytest.raises(StoreError, match=f"rollout 1: {message}"):
        write_shard(tmp_path / "store", INFO, [rollout(sample=1), wrong])
    assert not (tmp_path / "store").exists()


def test_turns_say_what_was_sampled():
    one = rollout()
    assert one.spans_U2.tolist() == [[5, 9]]
    assert one.spans_U2.dtype == np.int32
    assert one.prompt_length == 5
    two = rollout(
        response_N=masked(5, 7, 8), logprobs_N=np.array([0, 0, 0, 0, 0, -1, 0, -2, -3], np.float32)
    )
    assert two.wrong_parts() is None
    assert two.spans_U2.tolist() == [[5, 6], [7, 9]]
    touching = rollout(turns_U2=spans((5, 6), (6, 9)))
    assert touching.wrong_parts() is None
    assert touching.spans_U2.tolist() == [[5, 6], [6, 9]]
    nothing = rollout(response_N=masked(), logprobs_N=np.zeros(9, np.float32))
    assert (nothing.prompt_length, nothing.spans_U2.shape) == (9, (0, 2))


def test_turns_and_tokens_are_each_others_inverse():
    rng = np.random.default_rng(1)
    for _ in range(200):
        response_N = rng.random(12) < 0.5
        turns_U2 = turns_of(response_N)
        assert (sampled_tokens(turns_U2, 12) == response_N).all()
    assert turns_of(np.array([0, 0, 1, 1, 0, 1], bool)).tolist() == [[2, 4], [5, 6]]
    assert sampled_tokens(spans((2, 4), (3, 5)), 6) is None
    assert sampled_tokens(spans((2, 7)), 6) is None


def test_one_shape_from_engine_to_store():
    assert StoreInfo(16, 4, (1, 2, 3), "vllm", "0.30.0", vocab_size=500) == INFO
    assert MoEShape(16, 4, (1, 2, 3)).wrong_shape() is None
    assert SHAPE.wrong_shape() is None


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 1, (0,)), "num_experts must be a whole number from 1 to 32768; got 0"),
        ((16.0, 4, (0,)), "num_experts must be a whole number from 1 to 32768; got 16.0"),
        ((32769, 4, (0,)), "num_experts must be a whole number from 1 to 32768; got 32769"),
        ((16, 17, (0,)), "topk must be a whole number from 1 to 16; got 17"),
        ((16, True, (0,)), "topk must be a whole number from 1 to 16; got True"),
        *(
            ((16, 4, layers), "moe_layers must be the numbers of hidden layers, from 0 on")
            for layers in ((), (2, 1), (1, 1), (-1, 0), (0, 2**31), [0], (0.0,), (False, 1), 3)
        ),
    ],
)
def test_shapes_that_no_model_has(shape, message):
    assert str(MoEShape(*shape).wrong_shape()).startswith(message)
    with pytest.raises(EngineError, match=message):
        ModelShape(*shape, num_hidden_layers=2**31)
    with pytest.raises(StoreError, match=f"StoreInfo: {message}"):
        StoreInfo(*shape, "vllm", "0.30.0").check()
