"""A store reads what was written; damaged and foreign files are refused by name.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file
from stored import INFO, ROLLOUTS, make_rollout, opened

from megatron_r3.data.store import RolloutStore, SamplingSettings, StoreError, write_shard
from megatron_r3.train.dataset import RolloutDataset
from megatron_r3.train.schedule import Schedule, UseOfRollouts


def test_round_trip_over_shards(store_dir):
    store = RolloutStore([store_dir])
    assert store.info == INFO
    assert len(store) == 5
    for index, expected in enumerate(ROLLOUTS):
        got = store.rollout(index)
        for name in ("tokens_N", "response_N", "logprobs_N", "spans_U2"):
            assert np.array_equal(getattr(got, name), getattr(expected, name))
        assert np.array_equal(got.routes.ids_LTK, expected.routes.ids_LTK)
        assert (got.reward, got.group, got.policy_version) == (
            pytest.approx(expected.reward),
            expected.group,
            7,
        )


def test_routes_by_row_in_any_order_layers_and_with_padding(store_dir):
    store = RolloutStore([store_dir])
    rows = np.concatenate([store.row_ids(3)[::-1], [-1], store.row_ids(0), store.row_ids(4)[1:2]])
    ids, recorded = store.routes(rows, [2, 0])
    want = np.concatenate(
        [
            ROLLOUTS[3].routes.ids_LTK[:, ::-1],
            np.zeros((3, 1, 4)),
            ROLLOUTS[0].routes.ids_LTK,
            ROLLOUTS[4].routes.ids_LTK[:, 1:2],
        ],
        axis=1,
    )
    assert np.array_equal(ids, want[[2, 0]])
    assert np.array_equal(recorded, rows >= 0)
    for rollout in range(5):
        for token, row in enumerate(store.row_ids(rollout)):
            assert store.locate(row) == (rollout, token)


@pytest.mark.parametrize("every", [2, 70, 200])
def test_rows_are_read_to_their_places_between_padding(tmp_path, every):
    """Padding comes after each row, inside of parts, or near the ends of rollouts."""
    rollouts = [make_rollout(201, seed=sample, sample=sample) for sample in range(3)]
    write_shard(tmp_path, INFO, rollouts)
    store = RolloutStore([tmp_path])
    want = np.concatenate([rollout.routes.ids_LTK for rollout in rollouts], axis=1)
    rows = np.insert(np.arange(600), np.arange(every - 1, 600, every - 1), -1)
    into = np.full((2, len(rows), 4), 99, np.uint8)
    ids, recorded = store.routes(rows, [2, 0], into)
    assert ids is into
    assert np.array_equal(ids, np.where(rows[:, None] < 0, 0, want[[2, 0]][:, rows]))
    assert np.array_equal(recorded, rows >= 0)


def test_uint16_above_256_experts(tmp_path):
    info = replace(INFO, num_experts=300)
    rollout = make_rollout(6, experts=300)
    assert rollout.routes.ids_LTK.max() > 255
    write_shard(tmp_path, info, [rollout])
    store = RolloutStore([tmp_path])
    assert np.array_equal(store.rollout(0).routes.ids_LTK, rollout.routes.ids_LTK)


def test_a_store_named_twice(store_dir):
    with pytest.raises(StoreError, match="named twice"):
        RolloutStore([store_dir, f"{store_dir}/../{store_dir.name}"])


def test_groups_of_two_collections_are_not_mixed(tmp_path):
    for number, name in enumerate(("a", "b")):
        scored = [replace(rollout, reward=float(number)) for rollout in ROLLOUTS]
        write_shard(tmp_path / name, INFO, scored[:2])
        write_shard(tmp_path / name, INFO, scored[2:3])  # another shard, the same group 1
    write_shard(tmp_path / "b", INFO, [replace(ROLLOUTS[0], policy_version=8)])
    groups = RolloutStore([tmp_path / "a", tmp_path / "b"]).groups().tolist()
    assert [r.group for r in ROLLOUTS[:3]] == [1, 1, 1]
    assert len({*groups[:3]}) == len({*groups[3:6]}) == 1
    assert len({groups[0], groups[3], groups[6]}) == 3


def test_missing_empty_and_foreign_directories(tmp_path):
    with pytest.raises(StoreError, match="no such rollout store"):
        RolloutStore([tmp_path / "none"])
    with pytest.raises(StoreError, match="not a rollout store"):
        RolloutStore([tmp_path])
    save_file({"x": np.zeros(3)}, tmp_path / "shard-00000.safetensors")
    with pytest.raises(StoreError, match="not a rollout shard"):
        RolloutStore([tmp_path])


def test_samples_align_inputs_with_what_they_predict(store_dir):
    store = RolloutStore([store_dir])
    dataset = RolloutDataset(store, UseOfRollouts(16, Schedule(1)), num_samples=8)
    assert len(dataset) == 8
    for index in (0, 3, 7):
        sample, rollout = dataset[index], ROLLOUTS[index % 5]
        inputs = len(rollout.tokens_N) - 1
        assert sample["tokens"][:inputs].tolist() == rollout.tokens_N[:-1].tolist()
        assert sample["labels"][:inputs].tolist() == rollout.tokens_N[1:].tolist()
        assert sample["loss_mask"][:inputs].bool().tolist() == rollout.response_N[1:].tolist()
        assert sample["sampled_logprobs"][:inputs].tolist() == rollout.logprobs_N[1:].tolist()
        assert sample["rows"][:inputs].tolist() == store.row_ids(index % 5).tolist()
        assert (sample["rows"][inputs:] == -1).all()
        assert sample["loss_mask"][inputs:].sum() == 0
        rewards = [other.reward for other in ROLLOUTS if other.group == rollout.group]
        advantage = (rollout.reward - np.mean(rewards)) / np.std(rewards)
        expected = np.where(rollout.response_N[1:], advantage, 0)
        assert np.allclose(sample["advantages"][:inputs], expected, atol=1e-4)
        assert (sample["advantages"][inputs:] == 0).all()


def test_a_rank_reads_its_layers_and_the_blocks_of_its_rows_and_no_other_byte(store_dir):
    store = RolloutStore([store_dir])
    rows = np.concatenate([store.row_ids(1)[2:5], store.row_ids(3)[8:], [-1, -1]])
    store.routes(np.random.default_rng(0).permutation(rows), [0, 2])
    assert sum(shard.bytes_read for shard in store.shards) == 2 * (8 + 11) * 4
    again = RolloutStore.told(pickle.loads(pickle.dumps(store.index)))
    assert again.shards[0].bytes_read == 0
    mine, theirs = (one.routes(np.arange(3), [1])[0] for one in (again, store))
    assert np.array_equal(mine, theirs)


def test_no_layer_at_all_needs_no_routes(store_dir):
    """A chunk of a model may have dense layers alone."""
    store = RolloutStore([store_dir])
    for rows in (store.row_ids(0), store.row_ids(1)[1:3]):
        ids_LTK, recorded_T = store.routes(rows, [])
        assert ids_LTK.shape == (0, len(rows), 4)
        assert recorded_T.all()


def test_prompt_digests_and_settings_are_kept(tmp_path):
    info = replace(
        INFO,
        policy_stamp="0011",
        engine_policy="step 7",
        vocab_size=64,
        sampling=SamplingSettings(1.0, 1.0, 0, 0.0, 512),
    )
    rollouts = [replace(rollout, prompt_digest=2**62 + rollout.group) for rollout in ROLLOUTS]
    write_shard(tmp_path / "s", info, rollouts)
    store = opened(tmp_path / "s")
    assert store.info == info
    assert [store.rollout(i).prompt_digest for i in range(5)] == [r.prompt_digest for r in rollouts]
    assert store.column("prompt_digest").tolist() == [r.prompt_digest for r in rollouts]
