"""Print Megatron's arguments for the model of a transformers directory.

    python -m megatron_r3.weights.model_arguments DIR

The arguments are quoted for a shell. Arguments of the run (lengths, batches, the layout) are not
among them.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from megatron_r3.replay.words import one_line
from megatron_r3.weights.directory import CONFIG, read_config
from megatron_r3.weights.families import family_named


def arguments_of(directory: Path) -> list[str]:
    """Megatron's arguments for the model of a transformers directory.

    Raises:
        ValueError: naming the file, and the field that is missing or that Megatron does not
            support.
    """
    config, where = read_config(directory), directory / CONFIG
    family = family_named(config.get("model_type"), where)
    try:
        return family.arguments(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def main(argv: list[str] | None = None) -> None:
    """Print the arguments.

    Args:
        argv: the command's arguments; by default those of `sys.argv`.

    Raises:
        SystemExit: status 1, with one line that says what is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron_r3.weights.model_arguments",
        description="Print Megatron's arguments for the model of a transformers directory.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory")
    try:
        print(shlex.join(arguments_of(parser.parse_args(argv).directory)))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {one_line(str(error))}") from None


if __name__ == "__main__":
    main()
