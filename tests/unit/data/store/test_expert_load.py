"""The load of the experts that a shard has for each rollout, beside its routes.

Shape suffixes (docs/glossary.md): E, K, L, M, N, T.
"""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import INFO, ROLLOUTS, opened, rewrite

from megatron_r3.data.store import RolloutStore, StoreError, write_shard
from megatron_r3.replay.routes import Routes

SHARD = "shard-00000.safetensors"  # rollouts of 5 and 9 tokens: 14 tokens, 12 rows


def counted(rollout):
    """The load of a rollout, counted one id at a time."""
    load_LE = np.zeros((3, 16), np.int64)
    for layer in range(3):
        for row, recorded in enumerate(rollout.routes.recorded_T):
            for expert in rollout.routes.ids_LTK[layer, row]:
                load_LE[layer, expert] += recorded
    return load_LE


def with_gap(rollout):
    """The rollout, without a route for its second row."""
    recorded_T = np.arange(rollout.routes.num_rows) != 1
    return replace(rollout, routes=Routes.from_array(rollout.routes.ids_LTK, 16, recorded_T))


def test_it_is_what_the_routes_say_and_is_read_without_them(tmp_path):
    rollouts = [with_gap(ROLLOUTS[0]), ROLLOUTS[1]]
    path = write_shard(tmp_path, INFO, rollouts)
    assert load_file(path)["expert_load"].dtype == np.uint16
    shard = opened(tmp_path).shards[0]
    read = shard.bytes_read
    load_MLE = shard.expert_load()
    assert shard.bytes_read == read
    assert load_MLE.tolist() == [counted(rollout).tolist() for rollout in rollouts]
    assert load_MLE[0].sum() == 3 * 3 * 4  # of four rows one is not recorded


def test_a_rollout_of_many_rows_has_larger_counts(tmp_path):
    num_rows = 1 << 16
    routes = Routes.from_array(np.tile(np.arange(4), (3, num_rows, 1)), 16)
    many = replace(
        ROLLOUTS[0],
        routes=routes,
        tokens_N=np.zeros(num_rows + 1, np.int32),
        response_N=np.zeros(num_rows + 1, bool),
        logprobs_N=np.zeros(num_rows + 1, np.float32),
    )
    path = write_shard(tmp_path, INFO, [many])
    assert load_file(path)["expert_load"].dtype == np.uint32
    assert opened(tmp_path).shards[0].expert_load()[0, 0].tolist() == [num_rows] * 4 + [0] * 12


def test_another_load_than_that_of_the_routes_is_found(store_dir):
    path = store_dir / SHARD
    load_MLE = load_file(path)["expert_load"]
    first, second = np.argsort(load_MLE[1, 2])[[0, -1]]  # an unused and a busy expert
    load_MLE[1, 2, [first, second]] = load_MLE[1, 2, [second, first]]
    rewrite(path, expert_load=load_MLE)
    RolloutStore([store_dir]).shards[0].expert_load()  # the sums are possible
    with pytest.raises(StoreError) as refusal:
        opened(store_dir)
    assert str(refusal.value) == (
        f"{path}: rollout 1: expert_load says that {load_MLE[1, 2].tolist()[min(first, second)]} "
        f"rows take expert {min(first, second)} in MoE layer 2; its routes say "
        f"{load_MLE[1, 2].tolist()[max(first, second)]}: write the shard again"
    )


@pytest.mark.parametrize(
    ("place", "value"),
    [((1, 2, 0), 9), ((0, 0, 3), 4)],  # more than the rollout's 8 rows; a sum that is no layer's
)
def test_a_load_that_cannot_be_is_refused_where_it_is_read(store_dir, place, value):
    path = store_dir / SHARD
    load_MLE = load_file(path)["expert_load"]
    assert load_MLE[place] != value
    load_MLE[place] = value
    rewrite(path, expert_load=load_MLE)
    rollout, layer, _ = place
    expected = f"{path}: rollout {rollout}: expert_load of MoE layer {layer} has "
    with pytest.raises(StoreError, match="cannot have that: write the shard again") as refusal:
        RolloutStore([store_dir]).shards[0].expert_load()
    assert str(refusal.value).startswith(expected)
