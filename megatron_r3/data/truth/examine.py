"""The truth test: tables of mismatch, and alarms that name the likely cause.

Shape suffixes (docs/glossary.md): T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from megatron_r3.data.truth.alarms import Alarm, table_alarms
from megatron_r3.data.truth.compared import Compared
from megatron_r3.data.truth.mismatch_tables import Tables, tables_of
from megatron_r3.data.truth.misplaced import older_weights, shifted
from megatron_r3.data.truth.unwritten import not_captured, stale

# The order matters: the rows that one function explains are left out for the next ones.
CAUSES = (not_captured, stale, older_weights, shifted)


@dataclass(frozen=True)
class Report:
    """What the truth test found.

    Attributes:
        tables: mismatch of all recorded rows.
        alarms: empty where nothing is wrong.
        newest: mismatch of the recorded rows of the newest policy version.
    """

    tables: Tables
    newest: Tables
    alarms: list[Alarm] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The tables and the alarms as a JSON object, where a share is `[share, rows]`."""
        return {"tables": asdict(self.tables), "alarms": [vars(a) for a in self.alarms]}


def examine(
    compared: Sequence[Compared], layers: Sequence[int], *, model: str = "the model"
) -> Report:
    """Compare recorded routes with live ones of the same tokens.

    The live routes must be the choice of the weights that sampled the newest policy version. Rows
    of older versions count in the tables. Of all alarms, one uses these rows: "weights of another
    version" compares the newest version with the older ones.

    Args:
        compared: rollouts of one model; with more rollouts, smaller faults are found.
        layers: what the MoE layers are called, in the order of the routes.
        model: what messages call the model that chose the live routes.

    Raises:
        ValueError: there are no rollouts.
    """
    if not compared:
        raise ValueError("no rollouts: the truth test needs at least one")
    tables = tables_of(compared, layers)
    newest = max(tables.versions, default=0)
    older = [one.version_T != newest for one in compared]
    alarms, marks = _causes(compared, older)
    rest = tables_of(compared, layers, marks)
    # rows of all versions, without the explained rows of the newest one
    versions = tables_of(
        compared, layers, [m & ~o for m, o in zip(marks, older, strict=True)]
    ).versions
    rest = replace(rest, versions=versions)
    names = [one.name for one in compared]
    alarms += table_alarms(rest, model=model, names=names)
    return Report(tables, tables_of(compared, layers, older), alarms)


def _causes(
    compared: Sequence[Compared], marks: list[np.ndarray]
) -> tuple[list[Alarm], list[np.ndarray]]:
    """The alarms of `CAUSES`, and `marks` with the rows that these alarms explain added."""
    alarms = []
    for cause in CAUSES:
        left = [_without(one, out_T) for one, out_T in zip(compared, marks, strict=True)]
        if (found := cause(left)) is not None:
            alarms.append(found.alarm)
            marks = [a | b for a, b in zip(marks, found.explains, strict=True)]
    return alarms, marks


def _without(one: Compared, out_T: np.ndarray) -> Compared:
    """The rollout as if the engine had not returned these rows."""
    if not out_T.any():
        return one
    routes = replace(one.rollout.routes, recorded_T=one.recorded_T & ~out_T)
    return replace(one, rollout=replace(one.rollout, routes=routes))
