"""Writing shards: what does not fit is refused, and what is there is whole."""

import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, ROLLOUTS, make_rollout, opened

from megatron_r3.routes import Routes
from megatron_r3.store import RolloutStore, StoreError, write_shard


@pytest.mark.parametrize(
    "change", [{"moe_layers": ()}, {"topk": 17}, {"router_fingerprint": ("a", "b")}]
)
def test_a_writer_refuses_an_impossible_info(tmp_path, change):
    with pytest.raises(StoreError):
        write_shard(tmp_path / "new", replace(INFO, **change), ROLLOUTS[:1])
    assert not (tmp_path / "new").exists()


def test_a_writer_refuses_rows_short_by_one(tmp_path):
    good = ROLLOUTS[0]
    short = Routes.from_array(good.routes.ids_LTK[:, :-1], 16)
    with pytest.raises(StoreError, match=r"rollout 1: 3 rows of routes for 5 tokens; expected 4"):
        write_shard(tmp_path / "new", INFO, [good, replace(good, routes=short)])
    assert not (tmp_path / "new").exists()


def test_a_writer_refuses_other_models(tmp_path):
    with pytest.raises(StoreError, match=r"\(3, 4, 32\) in a store of \(3, 4, 16\)"):
        write_shard(tmp_path, INFO, [make_rollout(5, experts=32)])


@pytest.mark.parametrize("field", ["logprobs_N", "response_N"])
def test_a_writer_refuses_fields_of_another_length(tmp_path, field):
    wrong = replace(ROLLOUTS[0], **{field: getattr(ROLLOUTS[0], field)[:-1]})
    with pytest.raises(StoreError, match=field):
        write_shard(tmp_path, INFO, [wrong])


def test_a_writer_refuses_nan_logprobs(tmp_path):
    wrong = ROLLOUTS[0].logprobs_N.copy()
    wrong[3] = np.nan
    with pytest.raises(StoreError, match="finite"):
        write_shard(tmp_path, INFO, [replace(ROLLOUTS[0], logprobs_N=wrong)])


def test_shards_are_appended_and_never_overwritten(store_dir):
    before = {path.name: path.read_bytes() for path in store_dir.iterdir()}
    (store_dir / "shard-00000.safetensors").rename(store_dir / "shard-00003.safetensors")
    write_shard(store_dir, INFO, ROLLOUTS[:1])
    write_shard(store_dir, INFO, ROLLOUTS[:1])
    (store_dir / "shard-old.safetensors").write_bytes(b"a stray file")
    assert len(RolloutStore([store_dir])) == 2 + 3 + 1 + 1
    (store_dir / "shard-old.safetensors").unlink()
    assert sorted(p.name for p in store_dir.iterdir()) == [
        f"shard-{n:05d}.safetensors" for n in (1, 2, 3, 4)
    ]
    assert (store_dir / "shard-00003.safetensors").read_bytes() == before["shard-00000.safetensors"]


def test_killed_writers_leave_whole_shards_only(tmp_path):
    write_shard(tmp_path, INFO, ROLLOUTS)
    cut_short = 0
    for pause in np.random.default_rng(0).uniform(0.0, 0.02, 50):
        writer = os.fork()
        if not writer:
            while True:
                write_shard(tmp_path, INFO, ROLLOUTS)
        time.sleep(pause)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        cut_short += len([*tmp_path.glob(".shard-*")]) > cut_short
        store = opened(tmp_path)
        assert len(store) == 5 * len(store.shards)
    assert cut_short > 5, "hardly any writer was killed in the middle of a shard"
    assert len(store.shards) > 5


def test_turns_are_kept_also_where_one_follows_the_other(tmp_path):
    one = ROLLOUTS[3]
    response = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1], bool)
    runs = replace(one, response_N=response)
    assert runs.spans_U2.tolist() == [[2, 5], [7, 9], [10, 12]]
    split = replace(runs, turns_U2=np.array([[2, 3], [3, 5], [7, 9], [10, 12]]), sample=6)
    write_shard(tmp_path, INFO, [runs, split, ROLLOUTS[0]])
    store = opened(tmp_path)
    assert store.rollout(0).spans_U2.tolist() == runs.spans_U2.tolist()
    assert store.rollout(1).spans_U2.tolist() == split.spans_U2.tolist()
    assert store.column("sample").tolist() == [0, 6, 0]


@pytest.mark.parametrize(
    "turns", [[[2, 12]], [[2, 13]], [[3, 12]], [[5, 2]], [[2, 7], [6, 12]], [[7, 12], [2, 7]], []]
)
def test_a_writer_refuses_turns_that_are_not_the_response(tmp_path, turns):
    rollout = replace(ROLLOUTS[3], turns_U2=np.array(turns).reshape(-1, 2))
    if turns == [[2, 12]]:
        write_shard(tmp_path, INFO, [rollout])
        return
    with pytest.raises(StoreError, match="turns"):
        write_shard(tmp_path, INFO, [rollout])
