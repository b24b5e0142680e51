"""Prints the mean reward of each collection of a run: `python docker/rewards.py CONFIG.toml`.

docker/rl-run runs this script in the image at the end of a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_r3.loop.collected import told
from megatron_r3.loop.config import read_config


def main() -> int:
    """Print the rewards; return 1 if the config cannot be read."""
    try:
        lines = told(read_config(Path(sys.argv[1])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
