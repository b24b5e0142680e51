"""Arguments that several of the commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["Commands", "add_model", "add_reward", "add_shard_size", "number"]

Commands = argparse._SubParsersAction  # what add_parser is a method of


def number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], float]:
    """An argument's type: a number of one kind inside limits."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or value == float("inf"):
            raise ValueError(text)
        return value  # type: ignore[no-any-return]

    limit = f" to {most:g}" if most != float("inf") else " up"
    parse.__name__ = f"{'number' if kind is float else 'whole number'} (from {least:g}{limit})"
    return parse


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The model that sampled."""
    text = "a transformers directory, or its config.json: then without digests of its weights"
    parser.add_argument("--model", required=required, type=Path, metavar="HF_DIR", help=text)


def add_reward(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """The function that rewards, and the policy version it is stored with."""
    text = "function(sample) -> float"
    parser.add_argument("--reward", required=required, metavar="MODULE:FUNCTION", help=text)
    parser.add_argument(
        "--policy-version", type=number(int, 0, 2**63 - 1), default=0, metavar="N",
        help="of the weights that sample (default: 0)",
    )  # fmt: skip


def add_shard_size(parser: argparse.ArgumentParser) -> None:
    """How many rollouts a shard has."""
    text = "rollouts of a shard, or more: groups stay whole (default: 128)"
    parser.add_argument("--shard-size", type=number(int, 1), default=128, metavar="N", help=text)
