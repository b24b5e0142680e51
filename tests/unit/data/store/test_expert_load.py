"""The load of the experts that a shard has for each rollout, beside its routes.

Shape suffixes (docs/glossary.md): E, K, L, M, N, T.
"""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from stored import INFO, ROLLOUTS, block_sums, header_of, metadata_of, opened, part_sums, rewrite

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
    assert header_of(path)["must_know"] == []  # an earlier megatron-r3 leaves it out
    shard = opened(tmp_path).shards[0]
    read = shard.bytes_read
    load_MLE = shard.expert_load()
    assert shard.bytes_read == read
    assert load_MLE.tolist() == [counted(rollout).tolist() for rollout in rollouts]
    assert load_MLE[0].sum() == 3 * 3 * 4  # of four rows one is not recorded


def test_a_shard_without_it_is_counted(store_dir):
    path = store_dir / SHARD
    expected = opened(store_dir).shards[0].expert_load()
    tensors = load_file(path)
    del tensors["expert_load"]
    save_file(tensors, path, metadata_of(INFO, tensors))
    shard = RolloutStore([store_dir]).shards[0]
    assert np.array_equal(shard.expert_load(), expected)
    assert shard.bytes_read == tensors["routes"].nbytes


def test_an_id_out_of_range_is_refused_where_it_is_counted(store_dir):
    path = store_dir / SHARD
    tensors = load_file(path)
    del tensors["expert_load"]
    tensors["routes"][2, 5, 1] = 16  # the second row of rollout 1
    tensors["block_crc32"] = block_sums(tensors)
    tensors["part_crc32"] = part_sums(tensors)
    save_file(tensors, path, metadata_of(INFO, tensors))
    with pytest.raises(StoreError) as refusal:
        RolloutStore([store_dir]).shards[0].expert_load()
    assert str(refusal.value) == (
        f"{path}: rollout 1: MoE layer 2 has the expert id 16, but there are 16 experts: the store "
        "is damaged; megatron-r3 rollouts verify says where"
    )
    with pytest.raises(ValueError, match=r"rollout 1: .*token 1"):
        opened(store_dir)


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


@pytest.mark.parametrize("wrong", [np.zeros((2, 3, 15), np.uint16), np.zeros((2, 3, 16), np.int16)])
def test_another_shape_or_type_is_refused(store_dir, wrong):
    rewrite(store_dir / SHARD, expert_load=wrong)
    with pytest.raises(StoreError, match=r"need U16 or U32 \(2, 3, 16\)"):
        RolloutStore([store_dir])


def test_a_damaged_load_is_refused(store_dir):
    path = store_dir / SHARD
    shard = RolloutStore([store_dir]).shards[0]
    data = bytearray(path.read_bytes())
    data[shard.header.entries["expert_load"].begin] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="checksum of 'expert_load'"):
        RolloutStore([store_dir]).shards[0].expert_load()
    with pytest.raises(StoreError, match="checksum of 'expert_load'"):
        opened(store_dir)
