"""The benchmark of clients: its rounds, its table, what it refuses to record, its check of routes.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proof.benchmarks import clients
from proof.benchmarks.clients import (
    EXPERTS,
    LAYERS,
    MICROBATCHES,
    TOPK,
    WAYS,
    Batch,
    Case,
    run_rounds,
    summarise,
    wrong,
    wrong_passes,
)
from proof.benchmarks.interval import LOOKS
from proof.benchmarks.waits import COPIES, GATHERED, GATHERS, PLANS, WAITS


class Ranks:
    """Two made-up ranks of every way, which answer at once.

    Args:
        slow: how many times as long as the others a way takes.
        spread: of the times.
        counts: what a way counts, where it is not what is right.
    """

    def __init__(
        self, slow: dict[str, float], spread: float, counts: dict[str, dict[str, float]]
    ) -> None:
        self.slow, self.spread, self.counts = slow, spread, counts
        self.draw, self.steps, self.taken = random.Random(0), [], []

    def ask(self, name: str, method: str, *arguments: list[Any]) -> list[Any]:
        if method == "record":
            return ["routes of rank 0", "routes of rank 1"]
        if method == "take":
            assert arguments == (["routes of rank 0", "routes of rank 1"],)
            self.taken.append(name)
            return [None, None]
        assert not arguments
        if method == "count":
            return [counted(name) | self.counts.get(name, {})] * 2
        self.steps.append(name)
        taken = self.slow.get(name, 1.0) * self.draw.lognormvariate(0.0, self.spread)
        return [(taken, 0.5 * taken), (0.9 * taken, 0.4 * taken)]


def counted(name: str) -> dict[str, float]:
    """What is right for a way: no wait with a plan; live routers take none of the routes."""
    way = WAYS[name]
    in_layers = {} if way.plan else {WAITS: 8, COPIES: 16, GATHERS: 8, GATHERED: 4000}
    plan = {PLANS: 2, GATHERED: 1000} if way.plan else {}
    is_live = name == way.live
    return {
        **in_layers,
        **plan,
        "experts": 8,
        "wrong": 8 if is_live else 0,
        "moved": 0 if is_live else 3200,
        "tokens": 100,
    }


def rows_of(most: int = 1, **what: Any) -> tuple[dict[str, dict[str, Any]], Ranks]:
    given = {"slow": {}, "spread": 0.1, "counts": {}, **what}
    ranks = Ranks(**given)
    result = run_rounds(list(WAYS), ranks, most)
    rows = [{"ep": 2, "recompute": True, **row} for row in summarise(result)]
    return {row["way"]: row for row in rows}, ranks


def shown(row: dict[str, Any]) -> str:
    return " ".join(clients.BENCH.cells(row))


def test_every_way_has_a_turn_in_every_round_and_the_routes() -> None:
    _, ranks = rows_of(3)
    assert sorted(ranks.taken) == sorted(WAYS)
    rounds = np.array(ranks.steps).reshape(4, len(WAYS))  # one warms up
    assert all(sorted(names) == sorted(WAYS) for names in rounds)
    assert len({tuple(names) for names in rounds}) == 4


def test_a_way_is_compared_with_the_peer_of_its_own_forward_step() -> None:
    for name, way in WAYS.items():
        assert name == way.live or name.split(",")[0] in ("verl", "by hand", "SkyRL")
        if way.peer:
            assert WAYS[way.peer].peer is None
            assert WAYS[way.peer].live == way.live
            assert WAYS[way.peer].worker != way.worker
            assert name.split(",")[0] == way.peer.split(",")[0]
    assert "SkyRL, drop-in" not in Case(1, False).ways()
    assert Case(1, False, Path("skyrl")).ways() == list(WAYS)


def test_ways_that_differ_end_early_and_tell() -> None:
    slow = {name: 0.5 for name, way in WAYS.items() if way.peer}
    rows, ranks = rows_of(32, slow=slow, spread=0.02)
    assert len(ranks.steps) == len(WAYS) * (1 + LOOKS[0])
    for name, way in WAYS.items():
        for ratio in ("wall_of_peer", "cpu_of_peer"):
            if way.peer:
                assert rows[name][ratio]["median"] == pytest.approx(0.5, rel=0.05)
                assert rows[name][ratio]["tells"]
            else:
                assert rows[name][ratio] is None
    assert "cannot tell" not in shown(rows["by hand, native, plan"])


def test_equal_ways_run_to_the_end_and_cannot_tell() -> None:
    """The control: only noise, and nothing is claimed."""
    rows, ranks = rows_of(16)
    assert len(ranks.steps) == len(WAYS) * 17
    assert "cannot tell (0." in shown(rows["by hand, native"])


def test_a_row_says_what_a_layer_and_a_token_cost() -> None:
    rows, _ = rows_of()
    row = rows["verl, own replay"]
    assert (row[WAITS], row[COPIES], row[GATHERS], row[PLANS]) == (1, 2, 1, 0)
    assert (row["moved_per_token"], row["gathered_per_token"]) == (32, 40)
    assert rows["verl, native, plan"][PLANS] == 2
    assert not any(wrong(row) for row in rows.values())


@pytest.mark.parametrize(
    ("name", "counts", "fault"),
    [
        ("by hand, native, plan", {WAITS: 8}, "1 waits, copies and collectives"),
        ("verl, on megatron_r3", {GATHERS: 4}, "0.5 waits, copies and collectives"),
        ("SkyRL, RouterReplay", {"wrong": 3}, "6 passes took other routes"),
        ("by hand, native", {WAITS: 0, COPIES: 0, GATHERS: 0}, "waits are not counted"),
        ("verl, live", {"wrong": 0}, "nothing is checked"),
    ],
)
def test_a_row_that_breaks_a_promise_is_found(
    name: str, counts: dict[str, float], fault: str
) -> None:
    rows, _ = rows_of(counts={name: counts})
    assert {row["way"] for row in rows.values() if wrong(row)} == {name}
    assert fault in wrong(rows[name])


# -- what the ranks check


def batch() -> Batch:
    made = Batch(0)
    rng = np.random.default_rng(5)
    shape = (LAYERS, EXPERTS)
    made.routes = [
        rng.random((len(ids) - 1, *shape)).argsort(-1)[..., :TOPK].astype(np.int16)
        for ids in made.tokens
    ]
    return made


def maps_of(made: Batch, recompute: bool) -> list[tuple[int, torch.Tensor]]:
    """What routers do that replay: layer by layer, and in a recompute backwards."""
    maps = []
    for samples in made.microbatches():
        order = [*range(LAYERS), *(reversed(range(LAYERS)) if recompute else ())]
        for layer in order:
            ids_TK = torch.from_numpy(made.wanted(samples)[layer]).long()
            ids_TK = torch.where(ids_TK < 0, torch.arange(TOPK), ids_TK)
            map_TE = torch.zeros(len(ids_TK), EXPERTS, dtype=torch.bool).scatter(1, ids_TK, True)
            maps.append((layer + 1, map_TE))
    return maps


@pytest.mark.parametrize("recompute", [False, True])
def test_passes_that_take_other_routes_are_counted(recompute: bool) -> None:
    made = batch()
    maps = maps_of(made, recompute)
    assert wrong_passes(maps, made, recompute) == 0
    for tokens, experts in ((1, 0), (0, 1)):  # the controls
        rolled = [(layer, map_TE.roll((tokens, experts), (0, 1))) for layer, map_TE in maps]
        assert wrong_passes(rolled, made, recompute) == len(maps)
    swapped = [(1, maps[1][1]), (2, maps[0][1]), *maps[2:]]
    assert wrong_passes(swapped, made, recompute) == 2
    with pytest.raises(ValueError, match="passes of routers"):
        wrong_passes(maps[:-1], made, recompute)


def test_routes_are_turned_and_keep_their_load() -> None:
    made = batch()
    turned = made.turned(made.routes)
    for before, after in zip(made.routes, turned, strict=True):
        # a set like {1, 4, 9, 12} is turned into itself; one of 65 is
        assert (np.sort(before, -1) == np.sort(after, -1)).all(-1).mean() < 0.1
        assert (np.roll(np.bincount(before.ravel(), minlength=EXPERTS), EXPERTS // 2)
                == np.bincount(after.ravel(), minlength=EXPERTS)).all()  # fmt: skip
    counts = Counter(len(made.wanted(samples)[0]) for samples in made.microbatches())
    assert counts == {made.num_tokens() // MICROBATCHES: MICROBATCHES}


# -- the command


def test_what_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_R3_CLIENTS", str(tmp_path))
    out = ["--out", str(tmp_path / "out.json")]
    assert clients.BENCH.main(out) == 1
    assert "run `make bench-clients`" in capsys.readouterr().err
    (tmp_path / clients.VERL).mkdir()
    assert clients.BENCH.main([*out, "--skyrl", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: SKYRL={tmp_path}: no skyrl/")
    assert not (tmp_path / "out.json").exists()
