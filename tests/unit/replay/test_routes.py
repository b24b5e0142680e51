"""Routes refuse what must not be trained on, and name it.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import numpy as np
import pytest

from megatron_r3.replay.routes import (
    Origin,
    Routes,
    RoutesError,
    check_ids,
    id_dtype,
    layer_major,
    repeated_rows,
)


def some_ids(layers=3, tokens=5, topk=4, experts=16, seed=0):
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts)[:topk] for _ in range(layers * tokens)]
    return np.array(rows).reshape(layers, tokens, topk)


@pytest.mark.parametrize(("experts", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16")])
def test_smallest_dtype(experts, dtype):
    assert id_dtype(experts) == np.dtype(dtype)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
def test_keeps_ids_and_their_order(dtype):
    ids = some_ids()
    routes = Routes.from_array(ids.astype(dtype), 16)
    assert np.array_equal(routes.ids_LTK, ids)
    assert routes.ids_LTK.dtype == np.uint8
    assert (routes.num_layers, routes.num_rows, routes.topk) == ids.shape


def test_id_out_of_range_is_named():
    ids = some_ids()
    ids[2, 3, 1] = 16
    with pytest.raises(RoutesError, match=r"file: .*outside 0\.\.15 at MoE layer 2, token 3"):
        Routes.from_array(ids, 16, where="file")


def test_negative_id_is_refused_and_not_wrapped():
    ids = some_ids()
    ids[0, 0, 0] = -1
    with pytest.raises(RoutesError, match="layer 0, token 0"):
        Routes.from_array(ids, 16)


def test_duplicate_is_named():
    ids = some_ids()
    ids[1, 4, 0] = ids[1, 4, 3]
    with pytest.raises(RoutesError, match=r"twice in one row at MoE layer 1, token 4"):
        Routes.from_array(ids, 16)


@pytest.mark.parametrize(
    ("topk", "experts", "dtype"),
    [
        *((1, 4, "u1"), (4, 9, "u1"), (6, 64, "u1"), (8, 256, "u1")),
        *((2, 300, "u2"), (4, 300, "u2"), (8, 300, "u2")),
    ],
)
def test_every_repeat_is_found_wherever_it_is(topk, experts, dtype):
    rng = np.random.default_rng(topk)
    ids = np.argsort(rng.random((2, 30_000, experts)), axis=-1)[..., :topk].astype(dtype)
    check_ids(ids, experts)
    ends = [(1, 29_999), (1, 2767), (0, 0)]  # the last row, and that of the first 32,768
    anywhere = [(int(rng.integers(2)), int(rng.integers(30_000))) for _ in range(60)]
    for layer, token in [*ends, *anywhere] if topk > 1 else []:
        one, other = rng.choice(topk, 2, replace=False)
        wrong = ids.copy()
        wrong[layer, token, one] = wrong[layer, token, other]
        with pytest.raises(
            RoutesError, match=f"twice in one row at MoE layer {layer}, token {token}"
        ):
            check_ids(wrong, experts)
        recorded = np.ones(30_000, bool)
        recorded[token] = False
        check_ids(wrong, experts, recorded)


@pytest.mark.parametrize(("topk", "dtype"), [(8, "u1"), (4, "u2"), (6, "u1"), (8, "i4")])
def test_layer_major_is_a_transpose(topk, dtype):
    rows = np.random.default_rng(0).integers(0, 100, (5000, 3, topk)).astype(dtype)
    assert np.array_equal(layer_major(rows), rows.transpose(1, 0, 2))
    assert np.array_equal(layer_major(rows[::2]), rows[::2].transpose(1, 0, 2))


def test_missing_rows_are_not_checked_and_hold_nothing():
    ids = some_ids()
    ids[:, 2] = 99
    recorded = np.arange(5) != 2
    routes = Routes.from_array(ids, 16, recorded)
    assert (routes.ids_LTK[:, 2] == 0).all()
    assert np.array_equal(routes.ids_LTK[:, recorded], ids[:, recorded])


def test_one_expert_a_token_cannot_repeat():
    assert Routes.from_array(np.zeros((2, 3, 1), int), 4).topk == 1


@pytest.mark.parametrize("layout", ["as kept", "engine's", "wide"])
def test_the_array_may_be_used_again(layout):
    ids = some_ids().astype(np.int64 if layout == "wide" else np.uint8)
    if layout == "engine's":
        ids = np.ascontiguousarray(ids.swapaxes(0, 1)).swapaxes(0, 1)
    before, recorded = ids.copy(), np.ones(ids.shape[1], bool)
    routes = Routes.from_array(ids, 16, recorded)
    ids[:] = 0  # no route: one expert several times
    recorded[:] = False
    assert np.array_equal(routes.ids_LTK, before)
    assert routes.recorded_T.all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.zeros((3, 4), int), "layers, tokens, topk"),
        (np.zeros((1, 1, 2)), "integers"),
        (np.zeros((1, 1, 5), int), "impossible"),
    ],
)
def test_wrong_kind(ids, message):
    with pytest.raises(RoutesError, match=message):
        Routes.from_array(ids, 4)


def test_recorded_bits_must_fit():
    with pytest.raises(RoutesError, match="routes: 4 recorded bits for 5 rows"):
        Routes.from_array(some_ids(), 16, np.ones(4, bool))


@pytest.mark.parametrize("experts", [0, -1, 32769])
def test_experts_that_no_id_can_name(experts):
    with pytest.raises(RoutesError, match=f"{experts} experts: a MoE layer must have 1 to 32,768"):
        id_dtype(experts)


@pytest.mark.parametrize("dtype", ["u1", "<u2", "i2"])
@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16, 17, 22])
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (70_000, 2), (2, 70_000), (2, 3, 4), (0, 3)])
def test_repeated_rows(shape, topk, dtype):
    ids = np.random.default_rng(0).integers(0, 5 * topk, (*shape, topk)).astype(dtype)
    ordered = np.sort(ids, axis=-1)
    expected = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    assert repeated_rows(ids).shape == shape
    assert (repeated_rows(ids) == expected).all()
    if len(shape) == 2:
        assert (repeated_rows(ids.transpose(1, 0, 2)) == expected.T).all()
        every_other = slice(None, None, 2)
        assert (repeated_rows(ids[:, every_other]) == expected[:, every_other]).all()


def test_tokens_are_counted_from_the_first_one():
    ids = some_ids()
    ids[1, 2] = 3
    with pytest.raises(RoutesError, match="layer 1, token 42"):
        Routes.from_array(ids, 16, first_token=40)


def test_layers_and_tokens_are_counted_from_the_origin():
    ids = some_ids(layers=1)
    ids[0, 2] = 3
    with pytest.raises(RoutesError, match="at MoE layer 5, token 42:"):
        check_ids(ids, 16, origin=Origin(layer=5, token=40))


def test_the_caller_may_change_the_array_afterwards():
    ids_LTK = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    routes = Routes.from_array(ids_LTK, 8)
    ids_LTK[:] = 0
    assert routes.ids_LTK.tolist() == [[[0, 1, 2], [3, 4, 5]]]
