"""The skew of a store, worked out by hand, and the command.

Shape suffixes (docs/glossary.md): K, L, T.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from stored import INFO, make_rollout

from megatron_r3.balance.skew import SkewPlan, measure_skew
from megatron_r3.cli import main
from megatron_r3.data.store import RolloutStore, write_shard
from megatron_r3.replay.routes import Routes
from megatron_r3.train.schedule import Schedule


def on_experts(rollout, experts, sample):
    """The rollout with the same experts in each row and layer."""
    rows = rollout.routes.num_rows
    ids_LTK = np.tile(np.array(experts), (3, rows, 1))
    return replace(rollout, routes=Routes.from_array(ids_LTK, 16), sample=sample)


@pytest.fixture
def lopsided(tmp_path):
    """Eight rollouts of 10 rows: the first four take experts 0 to 3 alone, the others 8 to 11."""
    rollouts = [
        on_experts(make_rollout(11, group=i // 4), np.arange(4) + 8 * (i // 4), i % 4)
        for i in range(8)
    ]
    write_shard(tmp_path / "s", INFO, rollouts[:5])
    write_shard(tmp_path / "s", INFO, rollouts[5:])
    return tmp_path / "s"


def test_store_order_and_shuffled(lopsided):
    store = RolloutStore([lopsided])
    numbers = measure_skew(store, SkewPlan([2], [0, 1], least_tokens=1))
    (size,) = numbers["sizes"]
    assert (size["micro_batches"], size["rollouts_left_out"]) == (4, 0)
    # each micro-batch has two rollouts of one group, and all their tokens are on one rank
    assert size["store"]["0"]["all"] == 2
    assert size["store"]["0"]["layers"] == [2, 2, 2]
    assert size["store"]["0"]["micro_batches"] == [2, 2, 2, 2]
    # one guest of the four experts takes a quarter of the tokens
    assert size["store"]["1"]["all"] == 1.5
    assert size["store"]["1"]["guests"] == 0.5
    # a micro-batch that the shuffle gave a rollout of each group is even
    order = np.array([Schedule(8, seed=1).mixed(i) for i in range(8)]).reshape(4, 2) // 4
    even = int((order[:, 0] != order[:, 1]).sum())
    assert 0 < even < 4
    assert size["shuffled"]["0"]["all"] == pytest.approx((2 * (4 - even) + even) / 4)


def test_rollouts_that_fill_no_micro_batch_are_left_out(lopsided):
    (size,) = measure_skew(RolloutStore([lopsided]), SkewPlan([2], [0], micro_batch_size=3))[
        "sizes"
    ]
    assert (size["micro_batches"], size["rollouts_left_out"]) == (1, 2)
    # four rollouts of rank 0's experts and two of rank 1's: 4 / 3
    assert size["store"]["0"]["all"] == pytest.approx(4 / 3)


def test_ranks_that_share_their_rollouts_have_fewer_in_a_micro_batch(lopsided):
    store, plan = RolloutStore([lopsided]), SkewPlan([4], [0], ranks_per_rollout=2)
    (size,) = measure_skew(store, plan)["sizes"]
    assert size["micro_batches"] == 4
    assert size["store"]["0"]["all"] == 4  # two rollouts of one group load one rank of four


def test_the_command_prints_a_table(lopsided, capsys):
    words = ["--ep", "2", "4", "--slots", "0", "1", "--least-tokens", "1", "--layers"]
    assert main(["rollouts", "skew", str(lopsided), *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{lopsided}: 8 rollouts, 3 MoE layers, 16 experts, top-4"
    assert lines[3].split() == ["store", "order", "shuffled"]
    assert lines[4].split() == ["ranks", "micro-batches", *["0", "slots", "1", "slot"] * 2]
    assert lines[5].split()[:4] == ["2", "4", "2.000", "1.500"]
    assert [line.split()[:2] for line in lines[6:9]] == [["layer", n] for n in "125"]
    assert lines[9].split()[:3] == ["4", "2", "4.000"]
    assert "has guests" not in lines[-1]
    assert main(["rollouts", "skew", str(lopsided), "--ep", "2"]) == 0
    (note,) = capsys.readouterr().out.splitlines()[6:]
    assert note.startswith(
        "No layer has guests: no layer is uneven enough, or no guest would have 1024 t"
    )
    assert "all columns equal those of 0 slots" in note
    assert main(["rollouts", "skew", str(lopsided), "--ep", "2", "--slots", "0"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_the_command_prints_json(lopsided, capsys):
    assert main(["rollouts", "skew", str(lopsided), "--ep", "2", "--json", "--domain", "2"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["sizes"][0]["store"]["0"]["all"] == 2
    assert numbers["sizes"][0]["store"]["2"]["guests"] == 0  # none would have 1024 tokens


WRONG = {
    "--ep 3: the 16 experts of {store} cannot be shared out among 3 ranks": ["--ep", "3"],
    "--ep 16: a micro-batch of 16 ranks has 16 rollouts; {store} has 8": ["--ep", "16"],
    "--ranks-per-rollout 3: 8 ranks cannot be divided into groups": [
        "--ep", "8", "--ranks-per-rollout", "3",
    ],
    "--domain 3: 8 ranks cannot be divided into domains": ["--ep", "8", "--domain", "3"],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_refused(lopsided, message, capsys):
    words = [word.format(store=lopsided) for word in WRONG[message]]
    assert main(["rollouts", "skew", str(lopsided), *words]) == 1
    assert message.format(store=lopsided) in capsys.readouterr().err
