"""The options that benchmarks on the CPU share: where to write, how many rounds, which cases."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Command(argparse.ArgumentParser):
    """The command of a benchmark, with `--out`.

    Args:
        name: of the benchmark.
        doc: of its module; the first line is what `--help` says.
        rounds: what a round is, for the help of `--rounds`; empty without that option.
        default_rounds: of that option.
        cases: what `--only` chooses from, by name; None without that option.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        rounds: str = "",
        default_rounds: int = 32,
        cases: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(prog=name, description=str(doc).splitlines()[0])
        self._cases = cases
        self.add_argument("--out", type=Path, required=True, help="the JSON file to write")
        if rounds:
            self.add_argument(
                "--rounds",
                type=int,
                default=default_rounds,
                help=f"{rounds} (default {default_rounds})",
            )
        if cases is not None:
            self.add_argument(
                "--only", default="", help=f"cases with this text: {'; '.join(cases)}"
            )

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """The options; `cases` has those that were chosen, by name.

        Raises:
            SystemExit: with status 2, where nothing would be measured.
        """
        args = self.parse_args(argv)
        if getattr(args, "rounds", 1) < 1:
            self.error(f"--rounds {args.rounds}: at least 1")
        if self._cases is not None:
            args.cases = {name: case for name, case in self._cases.items() if args.only in name}
            if not args.cases:
                self.error(
                    f"--only {args.only}: no case has this in its name: {'; '.join(self._cases)}"
                )
        return args
