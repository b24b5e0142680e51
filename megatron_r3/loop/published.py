"""The policies directory: each version that a trainer published, and how its files are checked.

    policies/v000003/config.json, tokenizer files, model-*.safetensors, policy.json

A version appears whole or not at all, and is never changed. policy.json has the digest of each
other file, and the probe: what the trainer computes on fixed tokens with these weights (probe.py).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_r3.data.digest import file_digest, short_digest
from megatron_r3.data.untrusted import read_json
from megatron_r3.loop.probe import Probe
from megatron_r3.replay.words import one_line, quoted
from megatron_r3.train.publish_options import published, version_name

MANIFEST = "policy.json"
FORMAT = 1
POLL_S = 0.1  # how long to wait before looking for a version again


class PolicyError(ValueError):
    """A published policy that is missing or cannot be used; the message names its directory."""


@dataclass(frozen=True)
class PublishedPolicy:
    """One version, as its policy.json describes it.

    Attributes:
        path: the transformers directory of this version.
        version: 0 is the policy with which training began.
        iteration: how many optimizer steps this version was trained.
        files: the SHA-256 of each file but policy.json, by name.
        probe: what the trainer computes on fixed tokens with these weights.
    """

    path: Path
    version: int
    iteration: int
    files: dict[str, str]
    probe: Probe

    @property
    def digest(self) -> str:
        """A digest of all files, 16 hex digits."""
        return short_digest(json.dumps(self.files, sort_keys=True))

    @property
    def name(self) -> str:
        """The name by which a sampler reports this policy: v000003-0123456789abcdef.

        The digest distinguishes the policy from version 3 of another run on the same server.
        """
        return f"{version_name(self.version)}-{self.digest}"

    def is_named(self, served: str) -> bool:
        """Whether a server that reports `served` has this policy.

        `rl sampler` adds a random suffix to the name at each start of a server (sampler.py):
        v000003-0123456789abcdef.4a1f. So the collector notices when a server was restarted.
        """
        return served == self.name or served.startswith(f"{self.name}.")

    def to_json(self) -> str:
        """The text of policy.json."""
        return json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "iteration": self.iteration,
                "files": self.files,
                "probe": self.probe.to_json(),
            }
        )

    def check_files(self) -> None:
        """Refuse a directory with other files than those that the trainer wrote.

        Raises:
            PolicyError: the message names the file.
        """
        names = {path.name for path in self.path.iterdir()} - {MANIFEST}
        for name in sorted(names ^ self.files.keys()):
            what = "is missing" if name in self.files else "was not published with this policy"
            raise PolicyError(f"{self.path / name}: {what}; {_PUBLISH_AGAIN}")
        for name, digest in self.files.items():
            try:
                is_same = file_digest(self.path / name) == digest
            except OSError as error:
                raise PolicyError(
                    f"{self.path / name}: cannot be read ({error.strerror})"
                ) from error
            if not is_same:
                raise PolicyError(
                    f"{self.path / name}: its bytes are not those that the trainer wrote; "
                    f"{_PUBLISH_AGAIN}"
                )


_PUBLISH_AGAIN = "remove the directory of this version and start the trainer again"


def read_policy(directory: Path, version: int) -> PublishedPolicy:
    """Read what policy.json says of a version.

    Raises:
        PolicyError: policy.json is missing, cannot be read, or is of another version.
    """
    path = directory / version_name(version)
    file = path / MANIFEST
    try:
        fields = read_json(file.read_bytes(), str(file))
        if fields["format"] != FORMAT or fields["version"] != version:
            raise PolicyError(
                f"{file}: format {quoted(fields['format'])} and version "
                f"{quoted(fields['version'])}; expected {FORMAT} and {version}"
            )
        files = {str(name): str(digest) for name, digest in fields["files"].items()}
        return PublishedPolicy(
            path, version, int(fields["iteration"]), files, Probe.from_json(fields["probe"])
        )
    except PolicyError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise PolicyError(
            f"{file}: cannot be read as the file that a trainer writes "
            f"({one_line(repr(error), 200)})"
        ) from error


def wait_for_policy(directory: Path, version: int, wait_s: float) -> PublishedPolicy:
    """Wait until a version is there.

    Raises:
        PolicyError: the version was not published in time, or cannot be used.
    """
    end = time.monotonic() + wait_s
    while not (directory / version_name(version)).is_dir():
        if time.monotonic() >= end:
            newest = max(published(directory), default=None)
            there = "no policy is there" if newest is None else f"the newest one is {newest}"
            raise PolicyError(
                f"{directory}: policy {version} did not come within {wait_s:g} s ({there}): is the "
                "trainer still running?"
            )
        time.sleep(POLL_S)
    return read_policy(directory, version)
