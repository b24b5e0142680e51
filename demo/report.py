"""What the demo measured: from Megatron's TensorBoard events to a table, a picture and a JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# of each name in summary.json: the tag of the value in TensorBoard, and the words of the table
_VALUES = {
    "k3_kl": ("k3 kl", "k3 KL, sampler to trainer"),
    "extreme_2": ("extreme", "tokens with a ratio outside 1/2..2"),
    "mean_abs_dlogp": ("abs dlogp", "mean |log-prob difference|"),
    "router_mismatch": (
        "router mismatch",
        "router mismatch: (token, layer) pairs whose live experts differ",
    ),
    "token_mismatch": ("token mismatch", "token mismatch: tokens with at least one such pair"),
    "routes_dispatched_as_recorded": (
        "routes dispatched as recorded",
        "routes dispatched as recorded",
    ),
}


def series_of(events: Path) -> dict[str, list[float]]:
    """The values of every scalar that Megatron wrote, by its tag, in order of iterations."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0: keep all values; by default TensorBoard keeps a random choice of 10,000
    accumulator = EventAccumulator(str(events), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [event.value for event in accumulator.Scalars(tag)] for tag in tags}


def measured(events: Path) -> dict[str, Any]:
    """What summary.json says of a training: values of step 0, and lists by step or by layer."""
    series = series_of(events)
    return {
        # [0]: step 0, before any update: trainer and sampler have the same weights
        **{name: series[tag][0] for name, (tag, _) in _VALUES.items()},
        "loss": series["policy loss"],
        "grad_norm": series["grad-norm"],
        "reward_mean": series["reward"][0],
        "router_mismatch_by_layer": [
            values[0]
            for tag, values in sorted(series.items())
            if tag.startswith("router mismatch/layer ")
        ],
        "mean_abs_dlogp_by_step": series["abs dlogp"],
    }


def table(summary: dict[str, Any]) -> str:
    """The printed table: the measures of live and replay side by side, and the times of stages."""
    sampler = summary["sampler"]
    lines = [
        f"sampler {sampler['name']} {sampler['version']}, Megatron {summary['megatron']}, "
        f"{summary['rollouts']} rollouts, {summary['tokens']} tokens, "
        f"{summary['world_size']} processes (EP=2), step 0:",
        "",
        f"{'':66}{'live':>10}{'replay':>10}{'live / replay':>15}",
    ]
    for name, (_, words) in _VALUES.items():
        live, replay = summary["live"][name], summary["replay"][name]
        ratio = f"{live / replay:.2f}" if replay and name in ("k3_kl", "mean_abs_dlogp") else ""
        lines.append(f"{words:66}{live:10.5f}{replay:10.5f}{ratio:>15}")
    seconds = ", ".join(f"{name} {value:.0f} s" for name, value in summary["seconds"].items())
    return "\n".join([*lines, "", f"time: {seconds}"])


def picture(summary: dict[str, Any], path: Path) -> None:
    """Draw the agreement by step, and the router mismatch by layer at step 0, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    layers = range(1, len(summary["live"]["router_mismatch_by_layer"]) + 1)
    for shift, (mode, colour) in enumerate((("live", "tab:red"), ("replay", "tab:blue"))):
        values = summary[mode]
        by_step = values["mean_abs_dlogp_by_step"]
        left.plot(range(len(by_step)), by_step, marker="o", color=colour, label=mode)
        shares = [100 * share for share in values["router_mismatch_by_layer"]]
        right.bar([n + 0.36 * shift - 0.18 for n in layers], shares, 0.36, color=colour, label=mode)
    left.set(title="sampler and trainer", xlabel="step", ylabel="mean |log-prob difference|")
    right.set(
        title="live router against the recorded routes, step 0",
        xlabel="MoE layer",
        ylabel="tokens routed otherwise, %",
        xticks=list(layers),
    )
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.legend()
    sampler = summary["sampler"]
    figure.suptitle(f"Rollout routing replay, sampled by {sampler['name']} {sampler['version']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
