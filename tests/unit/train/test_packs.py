"""Packs: every token of every rollout once, in order, each document where cu_seqlens says."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from stored import INFO, make_rollout

from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.train.dataset import PackedRollouts, RolloutDataset
from megatron_r3.train.schedule import Schedule, UseOfRollouts

USE = UseOfRollouts(16, Schedule(1))
LENGTHS = [5, 9, 3, 17, 4, 2, 16, 8]


@pytest.fixture
def store(tmp_path):
    rollouts = [
        make_rollout(n, seed=n, group=n % 2, reward=n / 10, sample=i) for i, n in enumerate(LENGTHS)
    ]
    write_shard(tmp_path / "s", INFO, rollouts)
    return RolloutStore([tmp_path / "s"])


@pytest.mark.parametrize("align", [1, 4, 8])
def test_a_pack_holds_its_rollouts_as_they_are_alone(store, align):
    packs, alone = PackedRollouts(store, USE, None, align), RolloutDataset(store, USE)
    seen = []
    for index in range(len(packs)):
        sample, bounds = packs[index], packs[index]["cu_seqlens"].tolist()
        assert bounds[0] == 0
        assert bounds[-1] == 16
        assert all((end - start) % align == 0 for start, end in pairwise(bounds))
        for rollout, (start, end) in zip(packs.packs[index], pairwise(bounds), strict=False):
            inputs = LENGTHS[rollout] - 1
            assert end - start == -(-inputs // align) * align
            for name in ("tokens", "labels", "rows", "loss_mask", "sampled_logprobs", "advantages"):
                want = alone[rollout][name]
                assert sample[name][start : start + inputs].tolist() == want[:inputs].tolist()
                assert sample[name].dtype == want.dtype
            assert (sample["rows"][start + inputs : end] == -1).all()
            assert sample["position_ids"][start:end].tolist() == list(range(end - start))
        assert sample["loss_mask"].sum() == sum(
            alone[rollout]["loss_mask"].sum() for rollout in packs.packs[index]
        )
        assert sample["reward"].tolist() == store.column("reward")[packs.packs[index]].tolist()
        seen += packs.packs[index]
    assert seen == list(range(len(LENGTHS)))


def test_a_pack_takes_what_fits_and_no_more(store):
    assert PackedRollouts(store, USE).packs == [[0, 1, 2], [3], [4, 5], [6], [7]]
    assert len(PackedRollouts(store, replace(USE, seq_length=32)).packs) == 2
    assert PackedRollouts(store, USE, 12)[5]["rows"].tolist() == (
        PackedRollouts(store, USE)[0]["rows"].tolist()
    )


def test_padding_between_documents_carries_nothing(store):
    sample = PackedRollouts(store, USE, None, 8)[0]
    padding = (sample["rows"] == -1).numpy()
    assert padding.any()
    for name in ("tokens", "labels", "loss_mask", "sampled_logprobs", "advantages"):
        assert not np.any(sample[name].numpy()[padding])
