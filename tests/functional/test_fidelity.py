"""One case of each kind of the fidelity table; `make fidelity` runs them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fidelity.cases import CASES, Case
from fidelity.rig.worker import TreeWorker
from fidelity.run import run
from fidelity.table import Table, passed

QUICK = [case for case in CASES if case.quick and not case.script]  # PyPI has no script


@pytest.fixture(scope="module")
def table(patched: TreeWorker, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(patched, tmp_path_factory.mktemp("fidelity"), "the tree of the tests")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_fidelity(table: Table, case: Case) -> None:
    row = table.row(case)
    assert passed(row), json.dumps(row, indent=1)


def test_the_table_has_no_name_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_case_that_megatron_refuses_is_a_failed_row(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = run([Case("bad", 1, "--moe-router-topk 9")], table, verbose=False)
    assert not passed(row)
    assert "bad" in capsys.readouterr().out
    assert "error" in row


def test_a_wrong_reference_shows(table: Table, tmp_path: Path) -> None:
    """The table's own control: another model's rollouts are not those of this one."""
    prepared, other = table._prepared("base"), table._prepared("even")
    mixed = Table(table.worker, tmp_path, "mixed")
    mixed._models["base"] = type(prepared)(prepared.checkpoint, other.stores, prepared.judge)
    row = mixed.row(Case("mixed", 1))
    assert not passed(row)
    assert row["dispatched_as_recorded"] < 1.0
    assert not row["loss_matches"]
    assert not row["grads_match"]
