"""The directory of a run, which sampler, collector and trainer share: its paths, events, locks."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_r3.data.json_lines import append_line, whole_lines
from megatron_r3.data.whole_file import write_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class RunDirectory:
    """The paths of a run.

    Attributes:
        path: the directory.
        policies: what the trainer publishes and the sampler loads.
        rollouts: the store that the collector fills and the trainer follows.
        checkpoints: Megatron's checkpoints of the trainer.
        metrics: what the trainer measured, one JSON line for each step.
        config: the copy of the config (`keep_config`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.policies, self.rollouts = path / "policies", path / "rollouts"
        self.checkpoints, self.metrics = path / "checkpoints", path / "metrics.jsonl"
        self.config = path / "config.toml"

    def events(self, part: str) -> Path:
        """What a part did, one JSON line for each event."""
        return self.path / "events" / f"{part}.jsonl"

    def log(self, part: str) -> Path:
        """The output of a part that the supervisor started."""
        return self.path / "logs" / f"{part}.log"

    def keep_config(self, file: Path) -> None:
        """Keep a copy of the run's config. A later config may differ only by more collections.

        Raises:
            ValueError: `file` differs from the copy in something else, or has fewer collections.
        """
        content = file.read_bytes()
        if not self.config.exists() or self._is_longer(content):
            write_whole(self.config, content)
        if self.config.read_bytes() != content:
            raise ValueError(
                f"{file}: {self.path} has a run of another config ({self.config}): give another "
                "[run] directory, or that config; only [run] collections may be raised"
            )

    def _is_longer(self, content: bytes) -> bool:
        """Whether a config differs from the kept copy only in having more collections."""
        now, before = (tomllib.loads(text.decode()) for text in (content, self.config.read_bytes()))
        lengths = now["run"].pop("collections"), before["run"].pop("collections")
        return now == before and lengths[0] > lengths[1]

    def note(self, writer: str, event: str, **fields: Any) -> None:
        """Append an event of the part `writer`, with its `time` in seconds since 1970."""
        append_line(self.events(writer), {"time": time.time(), "event": event, **fields})

    @contextmanager
    def only(self, part: str) -> Iterator[None]:
        """Lock the directory for one process of a part while the block runs.

        Raises:
            ValueError: another process of the part runs already.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / f".{part}.lock").open("w") as file:
            try:
                # The kernel frees the lock when this process ends, even if it is killed.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"{self.path}: a {part} of this run is running: wait until it ends, or stop it"
                ) from error
            yield

    def read_events(self, part: str, *kinds: str) -> Iterator[dict[str, Any]]:
        """The events of a part so far; if `kinds` are given, only the events of these kinds."""
        events = whole_lines(self.events(part))
        return (event for event in events if not kinds or event.get("event") in kinds)
