"""Values are checked as they are read, where nobody has verified the whole store before.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import INFO, make_rollout, rewrite

from megatron_r3.store import RolloutStore, StoreError, write_shard
from megatron_r3.store.verify import ReadChecks

SHARD = "shard-00000.safetensors"
LENGTHS = (5, 9, 70)  # tokens 0 to 4, 5 to 13, 14 to 83; rows 0 to 3, 4 to 11, 12 to 80


def changed(tensors, name, place, value):
    tensor = tensors[name].copy()
    tensor[place] = value
    return {name: tensor}


# what is wrong with rollout 1 (routes: in layer 2, token 3), and what the error says
TOKENS = {
    "token 2 is id 50; the vocabulary has ids 0 to 49": ("tokens", 5 + 2, 50),
    "token 4: its log-prob is nan, which is not finite": ("logprobs", 5 + 4, np.nan),
    "token 0: its log-prob is -1; it was not sampled, so 0": ("logprobs", 5, -1),
    "response must be 0 or 1": ("response", 5 + 6, 2),
    "its `turns` and its `response` name different tokens": ("turns", 3, 8),
    "token 6 has no recorded routes, and --moe-router-replay-missing": ("recorded", 4 + 6, 0),
}
ROUTES = {
    r"an expert id outside 0..15 at MoE layer 2, token 3": ((2, 4 + 3, 1), 16),
    r"an expert twice in one row at MoE layer 2, token 3": ((2, 4 + 3, slice(None)), 7),
}


@pytest.fixture
def folder(tmp_path):
    rollouts = [make_rollout(n, seed=n, sample=i) for i, n in enumerate(LENGTHS)]
    write_shard(tmp_path / "s", INFO, rollouts)
    return tmp_path / "s"


CHECKS = ReadChecks(50, refuses_missing=True)


def checked(folder, checks=CHECKS):
    store = RolloutStore([folder])
    store.trained_on(checks)
    return store


@pytest.mark.parametrize("message", TOKENS)
def test_a_wrong_value_is_refused_when_its_rollout_is_read(folder, message):
    path, (name, place, value) = folder / SHARD, TOKENS[message]
    rewrite(path, **changed(load_file(path), name, place, value))
    store = checked(folder)
    for other in (0, 2):  # control: the others are read
        store.fields(other)
    with pytest.raises(StoreError) as refusal:
        store.fields(1)
    assert str(refusal.value).startswith(f"{path}: ")
    assert message in str(refusal.value)
    if "must be" not in message and "turns" not in message:
        assert "rollout 1" in str(refusal.value)
    checked(folder, None).fields(1)  # control: without the checks nobody notices


@pytest.mark.parametrize("message", ROUTES)
def test_a_wrong_route_is_refused_when_its_row_and_layer_are_read(folder, message):
    path, (place, value) = folder / SHARD, ROUTES[message]
    rewrite(path, **changed(load_file(path), "routes", place, value))
    store = checked(folder)
    rows = store.row_ids(1)
    for some, layers in ((store.row_ids(0), [2]), (rows, [0, 1]), (rows[4:], [2])):
        store.routes(some, layers)  # control: other rows and layers are read
    for some, layers in ((rows, [0, 2]), (rows[3:4], [2]), (rows[::-1], [2, 1])):
        with pytest.raises(StoreError) as refusal:
            store.routes(some, layers)
        assert str(refusal.value).startswith(f"{path}: rollout 1: {message}")
    checked(folder, None).routes(rows, [2])


def test_a_store_that_is_right_is_read(folder):
    store = checked(folder)
    for rollout in range(3):
        store.fields(rollout)
        ids_LTK, recorded_T = store.routes(store.row_ids(rollout), [0, 1, 2])
        assert ids_LTK.shape == (3, LENGTHS[rollout] - 1, 4)
        assert recorded_T.all()
