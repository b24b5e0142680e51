"""The numbers of `megatron_r3.balance.skew` as a table."""

from __future__ import annotations

from typing import Any

from megatron_r3.balance.skew import ORDERS
from megatron_r3.replay.words import one_line

_WORDS = {"store": "store order", "shuffled": "shuffled"}


def skew_table(numbers: dict[str, Any], by_layer: bool = False) -> str:
    """The table: a line for each size, a column for each order and number of guest slots.

    Args:
        by_layer: whether each size also has a line for each layer.
    """
    slots = [*numbers["sizes"][0]["store"]]
    heads = ["0 slots" if s == "0" else f"{s} slot{'s' if s != '1' else ''}" for s in slots]
    width = max(9, len(_WORDS["store"]) // len(heads) + 1)
    group = width * len(heads)
    rows = [
        f"{'':22}" + "".join(f"  {_WORDS[order]:>{group}}" for order in ORDERS),
        f"{'ranks':>6} {'micro-batches':>15}"
        + "".join("  " + "".join(f"{head:>{width}}" for head in heads) for _ in ORDERS),
    ]
    for size in numbers["sizes"]:
        cells = [[size[order][s]["all"] for s in slots] for order in ORDERS]
        rows.append(f"{size['ep']:6} {size['micro_batches']:15}" + _cells(cells, width))
        for index, layer in enumerate(numbers["moe_layers"] if by_layer else ()):
            cells = [[size[order][s]["layers"][index] for s in slots] for order in ORDERS]
            rows.append(f"{f'layer {layer}':>22}" + _cells(cells, width))
    columns = [
        size[order][s] for size in numbers["sizes"] for order in ORDERS for s in slots if s != "0"
    ]
    if columns and not any(column["guests"] for column in columns):
        rows.append(
            "No layer has guests: no layer is uneven enough, or no guest would have "
            f"{numbers['least_tokens']} tokens in a micro-batch. So all columns equal those of 0 "
            "slots. For short rollouts, give a lower --least-tokens."
        )
    return "\n".join(rows)


def _cells(values: list[list[float]], width: int) -> str:
    return "".join("  " + "".join(f"{value:{width}.3f}" for value in row) for row in values)


def skew_heading(numbers: dict[str, Any]) -> str:
    """What the table was made from, and what its numbers are, in two lines."""
    names = " ".join(one_line(directory, 200) for directory in numbers["directories"])
    domain = f", guests among {numbers['domain']} neighbours" if numbers["domain"] else ""
    sharing = numbers["ranks_per_rollout"]
    holders = "for each rank" if sharing == 1 else f"for {sharing} ranks together"
    return (
        f"{names}: {numbers['rollouts']} rollouts, {len(numbers['moe_layers'])} MoE layers, "
        f"{numbers['num_experts']} experts, top-{numbers['topk']}\n"
        "busiest rank's load divided by the mean, over layers and micro-batches of "
        f"{numbers['micro_batch_size']} rollout(s) {holders}; guests of {numbers['least_tokens']} "
        f"tokens or more{domain}"
    )
