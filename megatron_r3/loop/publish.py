"""Publishes the policy from inside training, for the sampler of the next collection.

Version v is the policy after v * interval optimizer steps. Each version is published just before
the step that follows it, so after its checkpoint if one is due; the last version, which no step
follows, is published after its own step. All ranks write a version together into a temporary
folder, which is renamed when it is complete. A resumed training reaches versions that are published
already: it compares their bytes, and refuses to go on if they differ.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_r3.loop.probe import Probe
from megatron_r3.loop.probe_pass import ProbePass
from megatron_r3.loop.published import (
    MANIFEST,
    PublishedPolicy,
    published,
    read_policy,
    version_name,
)
from megatron_r3.loop.run_directory import RunDirectory
from megatron_r3.train.options import RolloutOptions
from megatron_r3.train.publish_options import PublishOptions
from megatron_r3.train.refuse import refuse
from megatron_r3.weights.all_ranks import everyones, on_first_rank
from megatron_r3.weights.bridge import VARIABLE, choice_of_environment, chosen_family
from megatron_r3.weights.directory import CONFIG, dtype_of, read_config
from megatron_r3.weights.family import Family
from megatron_r3.weights.write_policy import write_policy


class Publisher:
    """Writes the versions of one training.

    Args:
        options: the options of publishing.
        training: the options of the training.
        observe: as in `ProbePass`.

    Raises:
        ValueError: config.json of `options.like` has no vocab_size, or a dtype in which no weights
            are written; or MEGATRON_R3_HF_BRIDGE has an unknown value.
    """

    def __init__(
        self,
        options: PublishOptions,
        training: RolloutOptions,
        observe: Callable[[Any, int], None],
    ) -> None:
        self.options, self._training, self._observe = options, training, observe
        self._events = RunDirectory(options.directory.parent)
        self._models: list[Any] = []
        self._done = -1  # the last iteration that was published
        self._probe: ProbePass | None = None
        config, file = read_config(options.like), options.like / CONFIG
        size = config.get("vocab_size")
        if type(size) is not int or size < 1:
            raise ValueError(f"{file}: no vocab_size: expected a whole number above 0")
        self.vocab_size = size
        self._dtype = dtype_of(config, file)
        self._bridge = choice_of_environment()
        self._family: Family | None = None  # chosen when the models are known

    def begin(self, models: list[Any], iteration: int) -> None:
        """Publish the policy after `iteration` steps, if that is a multiple of the interval.

        Called when the model is loaded, and before each step.
        """
        self._models = models
        if iteration % self.options.interval == 0 and iteration != self._done:
            self._publish(iteration)

    def end(self, iteration: int) -> None:
        """Publish the last version, after the last step."""
        if iteration % self.options.interval == 0:
            self._publish(iteration)

    def _publish(self, iteration: int) -> None:
        started, self._done = time.monotonic(), iteration
        version = iteration // self.options.interval
        if self._probe is None:
            self._probe = ProbePass(self._training, self.vocab_size, self._observe)
        probe = self._probe.run(self._models)
        try:
            size = self._write(version, iteration, probe)
        except ValueError as error:
            refuse(f"--rollouts-publish {self.options.directory}: {error}")
        if torch.distributed.get_rank() == 0:
            fields = {"version": version, "iteration": iteration, "device": _device()}
            if size:
                fields |= {"bytes": size, "seconds": time.monotonic() - started}
            # A training that was killed may have written this version without its event.
            noted = self._events.read_events("trainer", "published")
            if size or version not in {event.get("version") for event in noted}:
                self._events.note("trainer", "published", **fields)
            if size:
                self._remove_old()

    def _write(self, version: int, iteration: int, probe: Probe | None) -> int:
        """Write a version; if it was published before, compare its bytes with the current weights.

        Returns:
            The size of the weights in bytes; 0 if the version was published before.
        """
        directory = self.options.directory
        target, again = directory / version_name(version), None
        if any(everyones(target.exists())):
            again = directory / f".{version_name(version)}.again"
            # left over from a training that was killed while it compared
            on_first_rank(partial(shutil.rmtree, again, ignore_errors=True))

        def finish(folder: Path, files: dict[str, str]) -> None:
            assert probe is not None, "rank 0 has the probe"
            made = PublishedPolicy(target, version, iteration, files, probe)
            if again is None:
                (folder / MANIFEST).write_text(made.to_json() + "\n")
            else:
                _refuse_other(read_policy(directory, version), made)

        if self._family is None:
            self._family = chosen_family(self._bridge, self.options.like, self._models, VARIABLE)
        size = write_policy(
            self._models,
            target if again is None else again,
            family=self._family,
            like=self.options.like,
            dtype=self._dtype,
            vocab_size=self.vocab_size,
            finish=finish,
        )
        if again is None:
            return size
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(again)
        return 0

    def _remove_old(self) -> None:
        keep = self.options.keep
        for version in published(self.options.directory)[:-keep] if keep else []:
            shutil.rmtree(self.options.directory / version_name(version), ignore_errors=True)


def _device() -> str:
    """The device on which this rank trains, in words, for the report."""
    if torch.version.cuda is None:
        return "CPU"
    return str(torch.cuda.get_device_name())


def _refuse_other(before: PublishedPolicy, now: PublishedPolicy) -> None:
    """Refuse to go on if a version was published before with other bytes: it may have sampled."""
    if before.files == now.files:
        return
    names = [n for n in now.files if before.files.get(n) != now.files[n]]
    raise ValueError(
        f"{now.path}: policy {now.version} was published before, with other bytes in "
        f"{', '.join(names) or 'its files'}: the resumed training has not reproduced this version, "
        "so rollouts of the version were sampled with other weights. Save a checkpoint at each "
        "version (--save-interval), or begin anew in another directory"
    )
