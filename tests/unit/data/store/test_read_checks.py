"""A store that was not verified before refuses a wrong value when the value is read.

All checksums of the shards here fit; only values are wrong.

Shape suffixes (docs/glossary.md): K, L, N, T.
"""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from stored import INFO, make_rollout, rewrite

from megatron_r3.data.store import RolloutStore, StoreError, write_shard
from megatron_r3.data.store.verify_shard import ReadChecks, verify_shard

SHARD = "shard-00000.safetensors"  # rollouts of 5 and 9 tokens: 14 tokens, 12 rows
OTHERS = (0, 2, 3, 4)  # the rollouts without the fault, of both shards


def trained_on(directory, checks, told=False):
    store = RolloutStore([directory])
    store = RolloutStore.told(pickle.loads(pickle.dumps(store.index))) if told else store
    store.trained_on(checks)
    return store


def changed(path, name, place, value):
    tensor = load_file(path)[name]
    tensor[place] = value
    rewrite(path, **{name: tensor})


def of_vocabulary(directory, sampler):
    """A shard of a sampler with this vocabulary, in which token 4 of rollout 1 is id 70."""
    info = replace(INFO, vocab_size=sampler)
    first, second = (make_rollout(n, seed=n, sample=n) for n in (5, 9))
    second.tokens_N[4] = 70
    write_shard(directory, info, [first, second])
    return directory / SHARD


@pytest.mark.parametrize(
    ("sampler", "trainer", "refused"),
    [
        (0, 0, False),
        (0, 71, False),
        (0, 70, True),
        (80, 0, False),
        (80, 80, False),
        (80, 64, True),
        (71, 72, False),
    ],
)
def test_the_vocabulary_of_the_trainer(tmp_path, sampler, trainer, refused):
    path = of_vocabulary(tmp_path / "s", sampler)
    store = trained_on(tmp_path / "s", ReadChecks(vocab_size=trainer))
    store.fields(0)
    trained_on(tmp_path / "s", None).fields(1)  # control
    if not refused:
        store.fields(1)
        return
    with pytest.raises(StoreError) as refusal:
        store.fields(1)
    most = f"ids go from 0 to {trainer - 1}"
    assert str(refusal.value).startswith(f"{path}: rollout 1: token 4 is id 70; {most}")


@pytest.mark.parametrize("refuses", [True, False])
def test_a_row_without_routes(store_dir, refuses):
    path = store_dir / SHARD
    changed(path, "recorded", 7, 0)  # row 3 of rollout 1
    store = trained_on(store_dir, ReadChecks(refuses_missing=refuses))
    for rollout in OTHERS:
        store.fields(rollout)
    if not refuses:
        assert store.fields(1)["recorded"].tolist() == [True] * 3 + [False] + [True] * 4
        return
    with pytest.raises(StoreError) as refusal:
        store.fields(1)
    assert str(refusal.value).startswith(f"{path}: rollout 1: token 3 has no recorded routes")
    trained_on(store_dir, None).fields(1)


ROUTES = {  # expert ids of row 6, which is row 2 of rollout 1, in the layer 1
    (3, 3, 4, 5): "an expert twice in one row",
    (3, 16, 4, 5): "an expert id outside 0..15",
    (3, 255, 4, 5): "an expert id outside 0..15",
}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("ids", ROUTES)
def test_wrong_ids_are_refused_by_whoever_reads_their_row_and_layer(store_dir, ids, told):
    path = store_dir / SHARD
    whole_LTK = load_file(path)["routes"]
    changed(path, "routes", (1, 6), ids)
    store = trained_on(store_dir, ReadChecks(), told)
    unchecked = trained_on(store_dir, None, told)
    rows_T = np.arange(12)
    for rows, layers in (
        ([6], [1]),
        ([4, 5, 6, 7], [0, 1, 2]),
        ([11, 6, -1, 6, 0], [2, 1]),
        (rows_T, [1]),
        ([6, 13], [1]),  # row 13 is of the second shard
    ):
        with pytest.raises(StoreError) as refusal:
            store.routes(np.array(rows), layers)
        fault = f"{ROUTES[ids]} at MoE layer 1, token 2: {[*ids]} (rows with this fault: 1)"
        assert str(refusal.value) == f"{path}: rollout 1: {fault}"
        unchecked.routes(np.array(rows), layers)
    with pytest.raises(ValueError, match=r"rollout 1: an expert .* at MoE layer 1, token 2"):
        verify_shard(store.shards[0])
    # control: other rows of this layer and part, and this row in other layers
    for rows, layers in ((np.delete(rows_T, 6), [0, 1, 2]), (rows_T, [0, 2])):
        ids_LTK, _ = store.routes(rows, layers)
        assert np.array_equal(ids_LTK, whole_LTK[layers][:, rows])
    store.fields(1)  # reads no routes


def test_wrong_ids_of_a_row_that_was_not_recorded(store_dir):
    """Such ids are not used, so neither a read nor `verify_shard` refuses them."""
    path = store_dir / SHARD
    changed(path, "routes", (1, 6), (3, 3, 4, 255))
    changed(path, "recorded", 6, 0)
    store = trained_on(store_dir, ReadChecks())
    _, recorded_T = store.routes(np.arange(12), [0, 1, 2])
    assert np.flatnonzero(~recorded_T).tolist() == [6]
    verify_shard(store.shards[0], thorough=False)
