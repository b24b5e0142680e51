"""The benchmark of clients: its rounds, its table, what it refuses to record, its check of routes.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proof.benchmarks import clients
from proof.benchmarks.clients import _line, compared, faults, run_rounds, summarise
from proof.benchmarks.clients_model import EXPERTS, LAYERS, MICROBATCHES, TOPK, Batch
from proof.benchmarks.clients_ranks import WAYS, Case, Held, Seen
from proof.benchmarks.interval import LOOKS
from proof.benchmarks.report import clients_part
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
        "layer passes": 8,
        "wrong": 8 if is_live else 0,
        "moved": 0 if is_live else 3200,
        "held": 100.0 if is_live else 228.0,
        "tokens": 100,
    }


def rows_of(most: int = 1, **what: Any) -> tuple[dict[str, dict[str, Any]], Ranks]:
    given = {"slow": {}, "spread": 0.1, "counts": {}, **what}
    ranks = Ranks(**given)
    result = run_rounds(list(WAYS), ranks, most)
    rows = [{"ep": 2, "recompute": True, **row} for row in summarise(result)]
    return {row["way"]: row for row in rows}, ranks


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
    assert "cannot tell" not in _line(rows["by hand, native, plan"])


def test_equal_ways_run_to_the_end_and_cannot_tell() -> None:
    """The control: only noise, and nothing is claimed."""
    rows, ranks = rows_of(16)
    assert len(ranks.steps) == len(WAYS) * 17
    assert "cannot tell (0." in _line(rows["by hand, native"])
    seconds = {name: [1.0] for name in WAYS}
    assert len(compared(seconds)) == sum(way.peer is not None for way in WAYS.values())


def test_a_row_says_what_a_layer_and_a_token_cost() -> None:
    rows, _ = rows_of()
    row = rows["verl, own replay"]
    assert (row[WAITS], row[COPIES], row[GATHERS], row[PLANS]) == (1, 2, 1, 0)
    assert (row["moved_per_token"], row["gathered_per_token"]) == (32, 40)
    assert row["held_per_token"] == 128
    assert rows["verl, native, plan"][PLANS] == 2
    assert not any(fault for row in rows.values() for fault in faults(row))


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
    assert {row["way"] for row in rows.values() if faults(row)} == {name}
    assert fault in " ".join(faults(rows[name]))


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


def seen(maps: list[tuple[int, torch.Tensor]]) -> Seen:
    found = object.__new__(Seen)
    found._maps = maps
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_passes_that_take_other_routes_are_counted(recompute: bool) -> None:
    made = batch()
    maps = maps_of(made, recompute)
    assert seen(maps).wrong(made, recompute) == 0
    for tokens, experts in ((1, 0), (0, 1)):  # the controls
        rolled = [(layer, map_TE.roll((tokens, experts), (0, 1))) for layer, map_TE in maps]
        assert seen(rolled).wrong(made, recompute) == len(maps)
    swapped = [maps[1], maps[0], *maps[2:]]
    assert seen([(1, swapped[0][1]), (2, swapped[1][1]), *maps[2:]]).wrong(made, recompute) == 2
    with pytest.raises(ValueError, match="passes of routers"):
        seen(maps[:-1]).wrong(made, recompute)


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


def test_the_same_memory_is_held_once() -> None:
    found: dict[int, int] = {}
    ids = torch.arange(8)
    for tensor in (ids, ids[2:], ids.view(2, 4), torch.ones(100), None):
        Held._add(found, tensor)
    assert found == {ids.untyped_storage().data_ptr(): 64}


# -- the command


def test_the_recorded_table_has_a_row_for_each_way(tmp_path: Path) -> None:
    rows, _ = rows_of()
    machine = {"machine": "x86_64", "processor": "P", "cores": 2, "load": 0.1, "python": "3.11"}
    path = tmp_path / "clients-cpu-2026-12-01.json"
    path.write_text(json.dumps({**machine, "verl": "0.9.1", "rows": [*rows.values()]}))
    part = clients_part(path)
    assert "| 2 | full | by hand, native, plan | 0 | 0 | 0 | 32 | 10 | 128 |" in part
    assert part.count("\n| 2 | full |") == len(WAYS)


def test_what_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_R3_CLIENTS", str(tmp_path))
    out = ["--out", str(tmp_path / "out.json")]
    assert clients.main(out) == 1
    assert "run `make bench-clients`" in capsys.readouterr().err
    (tmp_path / clients.VERL).mkdir()
    assert clients.main([*out, "--skyrl", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: SKYRL={tmp_path}: no skyrl/")
    assert not (tmp_path / "out.json").exists()
    with pytest.raises(SystemExit):
        clients.main([*out, "--rounds", "0"])
    with pytest.raises(SystemExit):
        clients.main([*out, "--only", "EP3"])
    assert "--only EP3: no case has this in its name: EP1 none; EP1 full" in capsys.readouterr().err
