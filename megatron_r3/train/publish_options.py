"""Policies that a training publishes: the options, what is refused, the names of the versions."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True)
class PublishOptions:
    """What is published, and when.

    Attributes:
        directory: has a folder for each version.
        interval: optimizer steps from one version to the next.
        like: the transformers directory from which a version gets its config and tokenizer files.
        keep: how many versions stay; 0 keeps all.
    """

    directory: Path
    interval: int
    like: Path
    keep: int

    @classmethod
    def from_args(cls, args: Any) -> PublishOptions | None:
        """Read Megatron's arguments; None if nothing is published.

        Raises:
            ValueError: an option is missing or impossible; the message names the option.
        """
        if args.rollouts_publish is None:
            return None
        # imported here: callers that only want `published` need no torch
        from megatron_r3.train.option_table import value

        steps = value(args, "rollouts_mini_steps") * value(args, "rollouts_epochs")
        interval = args.rollouts_publish_interval or steps
        if interval < 1 or interval % steps:
            raise ValueError(
                f"--rollouts-publish-interval {interval}: it must be a multiple of the {steps} "
                "optimizer steps of a collection (--rollouts-mini-steps times --rollouts-epochs)"
            )
        iterations = args.train_iters or (args.train_samples or 0) // args.global_batch_size
        if iterations and interval > iterations:
            raise ValueError(
                f"--rollouts-publish-interval {interval}: the training ends after {iterations} "
                "optimizer steps, so no policy but the first one would be published: give at most "
                f"{iterations}"
            )
        refuse_folder("--rollouts-publish", Path(args.rollouts_publish))
        if args.rollouts_publish_like is None:
            raise ValueError(
                "--rollouts-publish needs --rollouts-publish-like HF_DIR, the transformers "
                "directory with which training began: its config and tokenizer files are copied "
                "into each published policy"
            )
        like = Path(args.rollouts_publish_like)
        if not (like / "config.json").is_file():
            raise ValueError(
                f"--rollouts-publish-like {like}: no config.json there: name a transformers "
                "directory"
            )
        keep = args.rollouts_publish_keep or 0
        if keep < 0 or keep == 1:
            raise ValueError(
                f"--rollouts-publish-keep {keep}: it must be 2 or more, since a sampler may still "
                "be loading the version before the newest; or 0 to keep all"
            )
        return cls(Path(args.rollouts_publish), interval, like, keep)


def refuse_folder(option: str, folder: Path) -> None:
    """Refuse a folder in which nothing could be written later.

    Raises:
        ValueError: the folder is a file, lies below a file, or is not writable for this user.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        raise ValueError(f"{option} {folder}: {there} is a file: name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: {there} is not writable: name another folder")


def version_name(version: int) -> str:
    """The name of a version's folder; "v000003" for version 3."""
    return f"v{version:06d}"


def published(directory: Path) -> list[int]:
    """The versions that have a folder in a directory, ascending; empty without the directory."""
    if not directory.is_dir():
        return []
    found = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(name[1]) for name in found if name)
