"""The benchmark of clients: its rounds, its table, what it refuses to record, its check of routes.

Shape suffixes (docs/glossary.md): T, E, K.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from proof.benchmarks import clients
from proof.benchmarks.clients import (
    EXPERTS,
    LAYERS,
    LIVE,
    MICROBATCHES,
    TOPK,
    WAYS,
    Batch,
    summarise,
    wrong,
    wrong_passes,
)
from proof.benchmarks.waits import COPIES, GATHERED, GATHERS, PLANS, WAITS


def row_of(name: str, **counts: Any) -> dict[str, Any]:
    """The row of what is right for a way: no wait with a plan; live routers take other routes."""
    plan, live = WAYS[name].plan, name in LIVE
    in_layers = {} if plan else {WAITS: 8, COPIES: 16, GATHERS: 8, GATHERED: 4000}
    rank = {
        **({PLANS: 2, GATHERED: 1000} if plan else in_layers),
        **{"experts": 8, "wrong": 8 if live else 0, "moved": 0 if live else 3200, "tokens": 100},
        **{"wall_s": (0.3, 0.1, 0.2), "cpu_s": (0.1, 0.1, 0.1), **counts},
    }
    other = {**rank, "wall_s": (0.1, 0.1, 0.4)}
    return {"ep": 2, "recompute": True, **summarise(name, [rank, other])}


@pytest.mark.parametrize(
    ("name", "counts", "fault"),
    [
        ("by hand, native, plan", {WAITS: 8}, "1 waits, copies and collectives"),
        ("verl, on megatron_r3", {GATHERS: 4}, "0.5 waits, copies and collectives"),
        ("SkyRL, RouterReplay", {"wrong": 3}, "6 passes took other routes"),
        ("by hand, native", {WAITS: 0, COPIES: 0, GATHERS: 0}, "no wait was counted"),
        ("verl, live", {"wrong": 0}, "the check cannot fail"),
    ],
)
def test_a_row_that_breaks_a_promise_is_found(name, counts, fault):
    assert not any(wrong(row_of(way)) for way in WAYS)
    assert fault in wrong(row_of(name, **counts))


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


def test_what_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_R3_CLIENTS", str(tmp_path))
    out = ["--out", str(tmp_path / "out.json")]
    assert clients.BENCH.main(out) == 1
    assert "run `make bench-clients`" in capsys.readouterr().err
    (tmp_path / clients.VERL).mkdir()
    assert clients.BENCH.main([*out, "--skyrl", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: SKYRL={tmp_path}: has no skyrl/")
    assert not (tmp_path / "out.json").exists()
