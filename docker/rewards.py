"""Prints the mean reward of each collection of a run: `python docker/rewards.py CONFIG.toml`.

docker/rl-run calls it in the image at the end of a run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_r3.online.config import Config, read_config


def rewards(config: Config) -> list[str]:
    """A line for each collection whose end the collector noted, in their order."""
    last: dict[int, str] = {}
    for event in config.directory.read_events("collector"):
        if event.get("event") == "collected":
            number = int(event["collection"])
            # an event that was written again after a kill has no time
            took = f" in {event['seconds']:.1f} s" if "seconds" in event else ""
            last[number] = (
                f"collection {number}: policy {event['version']}, reward {event['reward']:.4f}, "
                f"{event['rollouts']} rollouts{took}"
            )
    return [last[number] for number in sorted(last)]


def main() -> int:
    """Print them; 1 where the config cannot be read."""
    try:
        lines = rewards(read_config(Path(sys.argv[1])))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
