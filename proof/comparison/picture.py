"""The picture of a comparison: reward and k3 by collection, a column for each regime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_r3.loop.report_numbers import Line, line_of
from proof.comparison.arms import ARMS, CONTROL, REGIMES, Regime
from proof.comparison.measure import of_arm

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH = 5  # collections; a point of the picture is the mean of so many, up to its own
_DRAWN = {"none": "#777777", "live": "#d1495b", "r3": "#1f6f8b"}  # arms, and their colours


def picture(record: dict[str, Any], path: Path) -> None:
    """Write the picture of a record as PNG.

    Above the reward, below k3, each the mean of the seeds with a band from the smallest to the
    largest. The reward without a mismatch is in every column, for comparison.

    Raises:
        ValueError: the record has no run of any regime.
    """
    drawn = [regime for regime in REGIMES.values() if regime.key != CONTROL]
    drawn = [regime for regime in drawn if of_arm(record, regime.key, "live")]
    if not drawn:
        raise ValueError("the record has no run of the arm live, so there is nothing to draw")
    figure = _figure(record, drawn)
    # no date and no version in the file: the same record gives the same picture
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _figure(record: dict[str, Any], drawn: Sequence[Regime]) -> Figure:
    # Not pyplot: it keeps every figure, and may ask for a screen.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.6 * len(drawn) + 0.6, 6), layout="constrained")
    axes = figure.subplots(2, len(drawn), sharex=True, sharey="row", squeeze=False)
    for column, regime in enumerate(drawn):
        above, below = axes[0][column], axes[1][column]
        for name, on in (("reward", above), ("k3", below)):
            for arm, (label, line) in lines_of(record, regime, name).items():
                # the k3 of the control is rounding, thousands of times below that of the others
                if name == "reward" or arm in regime.arms:
                    _draw(on, label, line, _DRAWN[arm])
        above.set_title(regime.name)
        above.set_ylim(0, 1)
        below.set_yscale("log")
        below.set_xlabel("collection")
    axes[0][0].set_ylabel("reward of the sampler's answers")
    axes[1][0].set_ylabel("k3, sampler to trainer")
    axes[0][0].legend(loc="lower left", frameon=False, fontsize=9)
    return figure


def lines_of(record: dict[str, Any], regime: Regime, name: str) -> dict[str, tuple[str, Line]]:
    """The lines of a panel: label and line by the key of the arm; arms without a run have none.

    A regime has "none" of its own only where staleness alone is compared; else it is the control.
    """
    found = {}
    for arm in _DRAWN:
        of = regime.key if arm != "none" or "none" in regime.arms else CONTROL
        curves = [smooth(run[name]) for run in of_arm(record, of, arm)]
        line = line_of([dict(enumerate(values, start=1)) for values in curves])
        if line is not None:
            found[arm] = (ARMS[arm].name, line)
    return found


def smooth(values: Sequence[float]) -> list[float]:
    """Of each value the mean with up to `SMOOTH` - 1 values before it."""
    parts = [values[max(0, i + 1 - SMOOTH) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _draw(axes: Axes, label: str, line: Line, colour: str) -> None:
    if line.low != line.high:
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(line.x, line.mean, color=colour, linewidth=1.6, label=label)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
