"""Placements that are made of loads: even, with groups kept together, and the command.

Shape suffixes (docs/glossary.md): E, K, L, T, V.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, make_rollout

from megatron_r3.balance import place
from megatron_r3.balance.place import plan_placement, shared_out, unevenness
from megatron_r3.cli import main
from megatron_r3.placement import Placement
from megatron_r3.routes import Routes
from megatron_r3.store import write_shard


def test_shared_out_by_hand(monkeypatch):
    load_V = np.array([9, 9, 8, 8, 8, 6])
    # the heaviest first gives 9 + 8 + 8 and 9 + 8 + 6; then a 9 and an 8 are exchanged
    assert sorted(int(load_V[part].sum()) for part in shared_out(load_V, 2)) == [24, 24]
    monkeypatch.setattr(place, "_exchange", lambda *_: False)
    assert sorted(int(load_V[part].sum()) for part in shared_out(load_V, 2)) == [23, 25]
    # a part has as many units as another: 8 + 1 + 1 + 1 would be even too, and is not allowed
    parts = shared_out(np.array([8, 5, 3, 1, 1, 0]), 2)
    assert [len(part) for part in parts] == [3, 3]
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(5))
def test_loads_are_even_and_every_expert_has_a_place(seed):
    load_LE = np.exp(np.random.default_rng(seed).standard_normal((3, 128)) * 0.6) * 10_000
    load_LE = load_LE.astype(np.int64)
    placement = plan_placement(load_LE, (0, 1, 2), 16, 4)
    assert (np.sort(placement.place_LE, 1) == np.arange(128)).all()
    placed_LE = placement.loads(load_LE)
    for parts, before, after in ((4, 1.05, 1.002), (16, 1.3, 1.02)):
        assert unevenness(load_LE, parts) > before
        assert 1 <= unevenness(placed_LE, parts) < after


@pytest.mark.parametrize(("ep", "domain"), [(32, 8), (64, 8), (8, 8), (4, 2), (32, 2)])
def test_groups_stay_together(ep, domain):
    """DeepSeek-V3's 8 groups of 32: larger than a domain's places, as large, or smaller."""
    load_LE = np.random.default_rng(1).integers(1, 10_000, (2, 256))
    placement = plan_placement(load_LE, (3, 4), ep, domain, groups=8)
    placement.check_groups("here", 8)
    assert (np.sort(placement.place_LE, 1) == np.arange(256)).all()
    assert unevenness(placement.loads(load_LE), ep) <= unevenness(load_LE, ep)
    with pytest.raises(ValueError, match="layer 3"):  # the control
        plan_placement(load_LE, (3, 4), ep, domain).check_groups("here", 8)


@pytest.mark.parametrize(
    ("ep", "domain", "groups", "message"),
    [
        (5, 5, 1, "--ep 5: the store has 24 experts"),
        (4, 3, 1, "--domain 3: 4 ranks are no whole number of domains"),
        (2, 1, 5, "--groups 5: the store has 24 experts"),
        (2, 1, 3, "--groups 3: a group has 8 experts, a domain 12 and a rank 12"),
    ],
)
def test_experts_that_cannot_be_shared_out(ep, domain, groups, message):
    with pytest.raises(ValueError, match=message):
        plan_placement(np.ones((1, 24), np.int64), (0,), ep, domain, groups)


@pytest.fixture
def lopsided(tmp_path):
    """Rollouts of which all rows take two experts of the first quarter and two of the second."""
    rows = make_rollout(11).routes.num_rows
    ids_LTK = np.tile(np.array([0, 1, 4, 5]), (3, rows, 1))
    ids_LTK[:, ::2] = [2, 3, 6, 7]
    routes = Routes.from_array(ids_LTK, 16)
    rollouts = [replace(make_rollout(11, group=i), routes=routes) for i in range(8)]
    write_shard(tmp_path / "s", INFO, rollouts)
    return tmp_path / "s"


def test_the_command_writes_and_skew_reads(lopsided, tmp_path, capsys):
    file = tmp_path / "placement.json"
    argv = ["rollouts", "place", str(lopsided), "--ep", "4", "--domain", "2", "-o", str(file)]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "2 domains, busiest by mean: 2.000 as they are, 1.000 placed" in said
    assert "4 ranks, busiest by mean: 2.000 as they are, 1.000 placed" in said
    assert f"--hf-placement {file}" in said
    assert Placement.read(file).moe_layers == tuple(INFO.moe_layers)
    skew = ["rollouts", "skew", str(lopsided), "--ep", "4", "--slots", "0", "--json"]
    found = []
    for more in ([], ["--placement", str(file)]):
        assert main([*skew, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    before, after = (numbers["sizes"][0]["store"]["0"]["all"] for numbers in found)
    assert (before, after) == (2.0, 1.0)
    assert main([*skew[:-1], "--placement", str(file)]) == 0
    assert f"experts as {file} places them" in capsys.readouterr().out
    # what is there is not written over
    assert main(argv) == 1
    assert "it is there already" in capsys.readouterr().err
    assert main([*argv[:-1], str(tmp_path / "nowhere" / "p.json")]) == 1
    assert "nowhere/p.json: there is no such folder; make it first" in capsys.readouterr().err


def test_skew_refuses_the_placement_of_another_model(lopsided, tmp_path, capsys):
    Placement((0,), np.arange(4)[None]).write(tmp_path / "p.json")
    argv = ["rollouts", "skew", str(lopsided), "--ep", "2", "--placement", str(tmp_path / "p.json")]
    assert main(argv) == 1
    assert "a placement of 4 experts in the layers [0]" in capsys.readouterr().err


def test_an_empty_store(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    argv = ["rollouts", "place", str(tmp_path / "empty"), "--ep", "2", "-o", str(tmp_path / "p")]
    assert main(argv) == 1
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
