"""Cases of the fidelity table that no other test is about; `make fidelity` runs every case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slow import slow_except

import proof.fidelity.table
from proof.fidelity.cases import CASES, Case
from proof.fidelity.models import MODELS, Model
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.rollouts import make_rollouts, write_stores
from proof.fidelity.run import run
from proof.fidelity.table import Table, passed

QUICK = [case for case in CASES if case.quick and not case.script]  # PyPI has no script
# Other tests are about these, or another case has the same layout and more. `make matrix` runs them
# on the older lines.
ELSEWHERE = (
    *("old log-probs first", "temperature 0.7, TP2+SP"),
    *("guests, EP2xPP2xVPP2", "balanced, EP2", "balanced, CP2"),
    *("PP2", "PP2xVPP2, number of stages", "EP2", "CP2", "TP2+SP, no EP"),
)
assert {*ELSEWHERE} <= {case.name for case in QUICK}


@pytest.fixture(scope="module")
def table(patched: TreeWorker, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(patched, tmp_path_factory.mktemp("fidelity"), "the tree of the tests")


FOLDING = "folding: TP2xCP2 over EP4"  # takes as long as six others
HERE = [case for case in QUICK if case.name not in ELSEWHERE]


@pytest.mark.parametrize(
    "case",
    slow_except(HERE, *(case for case in HERE if case.name != FOLDING)),
    ids=lambda case: case.name,
)
def test_fidelity(table: Table, case: Case) -> None:
    row = table.row(case)
    assert passed(row), json.dumps(row, indent=1)


def test_the_table_has_no_name_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_case_that_megatron_refuses_is_a_failed_row(table, capsys):
    (row,) = run([Case("bad", 1, "--moe-router-topk 9")], table)
    assert not passed(row)
    assert "bad" in capsys.readouterr().out
    assert "error" in row


def test_a_wrong_reference_shows(patched, tmp_path, monkeypatch):
    """The table's own control: rollouts of another model than the one that is the reference."""
    other = MODELS["even"]

    def other_stores(model: Model, rollouts: object, folder: Path) -> dict[str, Path]:
        return write_stores(other, make_rollouts(other), folder)

    monkeypatch.setattr(proof.fidelity.table, "write_stores", other_stores)
    row = Table(patched, tmp_path, "mixed").row(Case("mixed", 1))
    assert "error" not in row
    assert not passed(row)
    assert row["dispatched_as_recorded"] < 1.0
    assert not row["loss_matches"]
    assert not row["grads_match"]
