"""The command `megatron-r3`: `megatron-r3 --help` lists what it does.

The subpackages patching, collect, record and loop register their commands. Importing this file
loads neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import megatron_r3
from megatron_r3.collect.rollouts_cli import add_rollouts
from megatron_r3.loop.rl_cli import add_rl
from megatron_r3.patching.patches_cli import add_commands
from megatron_r3.record.record_cli import add_record
from megatron_r3.replay.words import one_line

DESCRIPTION = (
    "Rollout Routing Replay (R3) for Megatron-LM: patch a Megatron-LM tree, collect and inspect "
    "rollouts with the experts that the sampler used, and run a loop of sampling and training."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status, as `run_command` does."""
    parser = argparse.ArgumentParser(prog="megatron-r3", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=megatron_r3.__version__)
    parser.set_defaults(group=parser)  # a command sets `run`, a group of commands sets `group`
    subparsers = parser.add_subparsers(metavar="COMMAND")
    add_commands(subparsers)
    add_record(add_rollouts(subparsers))
    add_rl(subparsers)
    return run_command(parser, argv)


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Run the command that was given.

    Returns:
        What the command returns, which is 0 if it did what was asked; 1 if it raised ValueError or
        OSError or was interrupted, after one line that says so; 2 if no command was given.
    """
    args = parser.parse_args(argv)
    if "run" not in args:
        args.group.print_help(sys.stderr)  # argparse's own error would not list the commands
        return 2
    try:
        return int(args.run(args))
    except (ValueError, OSError) as error:
        print(f"error: {one_line(str(error))}", file=sys.stderr)
    except KeyboardInterrupt:
        # Each command can be run again: it begins anew, or goes on from where it was stopped.
        print("error: interrupted; run the same command again to continue", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
