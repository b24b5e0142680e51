"""Placements: what a file may hold, and what they do to routes and loads.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

import json

import numpy as np
import pytest

from megatron_r3.integrations.host_routes import PlacedRoutes, RouteArrays
from megatron_r3.placement import ATTRIBUTE, Placement, placement_of

PLACE_LE = np.array([[0, 2, 1, 3], [3, 2, 1, 0]])
PLACEMENT = Placement((1, 4), PLACE_LE)


def test_routes_become_places():
    ids_LTK = np.array([[[0, 1], [3, 2]], [[0, 1], [3, 2]]], np.uint8)
    placed_LTK = PLACEMENT.placed(ids_LTK, [0, 1])
    assert placed_LTK.tolist() == [[[0, 2], [3, 1]], [[3, 2], [0, 1]]]
    assert placed_LTK.dtype == np.uint8
    assert PLACEMENT.placed(ids_LTK[:1], [1]).tolist() == [[[3, 2], [0, 1]]]
    assert PLACEMENT.placed(ids_LTK[:0], []).shape == (0, 2, 2)  # a stage without MoE layers
    source = PlacedRoutes(RouteArrays(ids_LTK, 4, (1, 4), np.array([True, False])), PLACEMENT)
    read_LTK, recorded_T = source.routes(np.array([1, 0, -1]), [1])
    # row 1 was not recorded, and its ids say nothing
    assert read_LTK[:, 1].tolist() == [[3, 2]]
    assert recorded_T.tolist() == [False, True, False]
    assert source.info.moe_layers == (1, 4)


def test_the_inverse_and_the_loads():
    assert PLACEMENT.expert_LE.tolist() == [[0, 2, 1, 3], [3, 2, 1, 0]]
    load_LE = np.array([[10, 20, 30, 40], [1, 2, 3, 4]])
    assert PLACEMENT.loads(load_LE).tolist() == [[10, 30, 20, 40], [4, 3, 2, 1]]
    of_rollouts = PLACEMENT.loads(np.stack([load_LE, load_LE * 2]))
    assert of_rollouts[1].tolist() == [[20, 60, 40, 80], [8, 6, 4, 2]]
    assert PLACEMENT.of_layer(4).tolist() == [3, 2, 1, 0]
    assert PLACEMENT.of_layer(2) is None


def test_a_file_and_a_checkpoint_bring_it_back(tmp_path):
    class Args:
        load = "checkpoint"

    PLACEMENT.write(tmp_path / "p.json")
    again = Placement.read(tmp_path / "p.json")
    assert again.moe_layers == (1, 4)
    assert np.array_equal(again.place_LE, PLACE_LE)
    args = Args()
    assert placement_of(args) is None
    setattr(args, ATTRIBUTE, PLACEMENT.to_json())
    assert np.array_equal(placement_of(args).place_LE, PLACE_LE)
    setattr(args, ATTRIBUTE, "x")
    with pytest.raises(ValueError, match="of the checkpoint in --load checkpoint: no placement"):
        placement_of(args)


GOOD = PLACEMENT.to_json()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({**GOOD, "format": 2}, "no placement of format 1"),
        ([], "no placement of format 1"),
        ({**GOOD, "place": [[0, 1]]}, "must be lists of one length"),
        ({**GOOD, "moe_layers": 3}, "must be lists of one length"),
        ({**GOOD, "moe_layers": [4, 1]}, "ascending"),
        ({**GOOD, "moe_layers": ["a", "b"]}, "ascending"),
        ({**GOOD, "place": [[], []]}, "num_experts"),
        ({**GOOD, "place": [[0, 1, 2, 3], [0, 1, 2, 2]]}, "layer 4: place is .0, 1, 2, 2."),
        ({**GOOD, "place": [[0, 1, 2, 3], [0, 1, 2]]}, "each number from 0 to 3 once"),
        ({**GOOD, "place": [[0, 1, 2, 3], [0, 1, 2, 4]]}, "layer 4"),
        ({**GOOD, "place": [[0, 1, 2, 3.0], [0, 1, 2, 3]]}, "layer 1"),
        ({**GOOD, "place": [[0, 1, 2, 3], 7]}, "layer 4"),
    ],
)
def test_a_file_that_is_none(tmp_path, value, message):
    file = tmp_path / "p.json"
    file.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=message) as error:
        Placement.read(file)
    assert str(file) in str(error.value)


def test_another_model():
    PLACEMENT.check_layers("p.json", [1, 4], 4)
    for layers, experts in (((1, 4), 8), ((1, 2), 4), ((1, 4), None)):
        with pytest.raises(ValueError, match=r"p.json: a placement of 4 experts in the layers"):
            PLACEMENT.check_layers("p.json", layers, experts)


def test_groups_stay_together():
    PLACEMENT.check_groups("p.json", None)
    PLACEMENT.check_groups("p.json", 1)
    PLACEMENT.check_groups("p.json", 4)  # groups of one expert
    with pytest.raises(ValueError, match=r"p.json: layer 1: the experts of group 0 .* --groups 2"):
        PLACEMENT.check_groups("p.json", 2)
    Placement((0,), np.array([[3, 2, 0, 1]])).check_groups("p.json", 2)
