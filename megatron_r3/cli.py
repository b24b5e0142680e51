"""The command `megatron-r3`: `megatron-r3 --help` lists what it does.

Each package registers its own commands; this file imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import megatron_r3
from megatron_r3.patching.cli import add_commands, add_maintenance
from megatron_r3.rollouts.cli import add_rollouts


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it did what was asked, 1 if it refused and said why."""
    parser = argparse.ArgumentParser(prog="megatron-r3", description=megatron_r3.__doc__)
    parser.add_argument("--version", action="version", version=megatron_r3.__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(subparsers)
    add_maintenance(subparsers)
    add_rollouts(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, OSError) as error:
        from megatron_r3.untrusted import one_line  # imports numpy

        print(f"error: {one_line(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        print("error: interrupted; the same command again goes on", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
