"""The config of a run: one TOML file that every part reads.

docs/online.md has an example. A field that the file leaves out has its default from
config_tables.py; a name in the file that is no field is an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_r3.loop.config_tables import (
    CollectorTable,
    PolicyTable,
    PromptsTable,
    RunTable,
    SamplerTable,
    Table,
    TrainerTable,
    ValidationError,
)
from megatron_r3.loop.run_directory import RunDirectory
from megatron_r3.replay.ending import not_patched
from megatron_r3.replay.words import one_line, quoted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A patch makes this file of Megatron import megatron_r3. If the file does not name megatron_r3,
# the tree is refused as not patched.
_PATCHED = "megatron/training/training.py"


class ConfigError(ValueError):
    """A config that cannot be used; the message names the file, and the field if one is wrong."""


class Config(Table):
    """A whole config; paths in it are relative to the folder of its file."""

    file: Path
    run: RunTable
    policy: PolicyTable
    sampler: SamplerTable
    prompts: PromptsTable
    trainer: TrainerTable
    collector: CollectorTable = CollectorTable()

    @property
    def directory(self) -> RunDirectory:
        """The run's directory, which sampler, collector and trainer share."""
        return RunDirectory(self.path(self.run.directory))

    @property
    def rollouts_per_collection(self) -> int:
        """The rollouts of a collection: its prompts times the samples of each prompt."""
        return self.prompts.per_collection * self.prompts.samples

    def path(self, name: str) -> Path:
        """A path of the config, absolute.

        `$NAME` and `${NAME}` stand for environment variables, and ~ for the home folder, so that
        one config works on hosts with different folders: "$SHARED/prompts.jsonl".

        Raises:
            ConfigError: a variable is not set.
        """

        def value(found: re.Match[str]) -> str:
            variable = found[1] or found[2]
            if variable not in os.environ:
                raise ConfigError(
                    f"{self.file}: {quoted(name)}: the variable {variable} is not set: export it, "
                    "or write the path without it"
                )
            return os.environ[variable]

        expanded = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, name)
        return (self.file.parent / Path(expanded).expanduser()).resolve()

    def version_of(self, collection: int) -> int:
        """The version of the policy that samples a collection."""
        return max(0, collection - self.run.lag)


def read_config(file: Path, host: str | None = None) -> Config:
    """Read a config; check the folders that it names, and the rules between its fields.

    Args:
        host: replaces [sampler] host; None keeps the config's.

    Raises:
        ConfigError: the file cannot be read, or is not TOML; a field is wrong, or fields exclude
            each other; a folder is missing, the tree is not patched, or a path has a variable that
            is not set.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: not readable ({error.strerror})") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: not TOML ({one_line(str(error), 200)})") from error
    if "file" in tables:  # `file` is a field of Config, and not a table of the file
        raise ConfigError(f"{file}: [file]: no such table")
    try:
        config = Config(file=file.resolve(), **tables)
    except ValidationError as error:
        raise ConfigError(f"{file}: {_said(error)}") from error
    if host is not None:
        sampler = config.sampler.model_copy(update={"host": host})
        config = config.model_copy(update={"sampler": sampler})
    _check(config)
    return config


def _said(invalid: ValidationError) -> str:
    """The text for the first name that is no field or, without one, for the first wrong field.

    If a field is misspelt, pydantic reports the unknown name and also the missing field.
    """
    errors: list[Any] = [*invalid.errors()]
    error = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    table, *fields = (str(part) for part in error["loc"])
    where = " ".join([f"[{table}]", *fields])
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] != "extra_forbidden":
        return f"{where} is {quoted(error['input'])}: {error['msg']}"
    of_table: Any = Config.model_fields[table].annotation if fields else Config
    known = [name for name in of_table.model_fields if name != "file"]
    return f"{where}: no such name; there are {', '.join(known)}"


def _check(config: Config) -> None:
    """Refuse missing folders, an unpatched tree, and fields that exclude each other."""
    for name, folder, inside in (
        ("[trainer] megatron", config.trainer.megatron, "megatron/core"),
        ("[trainer] megatron", config.trainer.megatron, _PATCHED),
        ("[policy] model", config.policy.model, "config.json"),
        ("[policy] checkpoint", config.policy.checkpoint, ""),
    ):
        path = config.path(folder)
        if not (path / inside).exists():
            lacking = f"{path} has no {inside}" if inside else f"there is no {path}"
            raise ConfigError(f"{config.file}: {name}: {lacking}")
    tree = config.path(config.trainer.megatron)
    if b"megatron_r3" not in (tree / _PATCHED).read_bytes():
        raise ConfigError(f"{config.file}: [trainer] megatron: {not_patched(tree)}")
    for words in (*_refused(config), *_refused_command(config.sampler)):
        raise ConfigError(f"{config.file}: {words}")


def _refused(config: Config) -> Iterator[str]:
    """Yield an error's text for each broken rule between fields."""
    sampler, samples = config.sampler, config.prompts.samples
    embedded = sampler.engine == "embedded"
    if not config.prompts.reward and not config.collector.agent:
        yield "[prompts] reward is missing: give module:function, or a [collector] agent"
    if embedded and sampler.shard_size:
        yield (
            "[sampler] shard_size: the embedded sampler stores a collection as one shard; leave it "
            "out"
        )
    if 0 < sampler.shard_size < samples:
        yield (
            f"[sampler] shard_size {sampler.shard_size}: the {samples} samples of a prompt must "
            f"lie in one shard; give {samples} or more"
        )
    if sampler.push and (embedded or not sampler.in_place):
        yield (
            "[sampler] push hands weights to a running sglang or vllm: leave push out with the "
            "embedded sampler, and with in_place = false"
        )
    if sampler.degrade and not embedded:
        yield '[sampler] degrade works with engine = "embedded" only: leave it out'
    # A trainer that resumes reads the routers of the policies that sampled its rollouts, and
    # compares the policies that it publishes again with their files. Example: 40 collections, lag
    # 4, a checkpoint every 20. Killed between policy 40 and its checkpoint, the trainer resumes
    # with collection 20, which policy 16 sampled: policies 16 to 40 are needed, which are 25.
    fewest = config.run.lag + 1 + config.trainer.checkpoint_every
    if 0 < config.policy.keep < fewest:
        yield (
            f"[policy] keep {config.policy.keep}: with lag {config.run.lag} and a checkpoint after "
            f"every {config.trainer.checkpoint_every} collections the sampler and a resumed "
            f"trainer need older policies; give {fewest} or more, or 0 for all"
        )


def _refused_command(sampler: SamplerTable) -> Iterator[str]:
    """Yield an error's text for each broken rule of [sampler] command."""
    command, in_place = sampler.command, sampler.in_place
    names_version = any("{version}" in word for word in command)
    if sampler.engine == "embedded" and command:
        yield (
            "[sampler] command: the embedded sampler needs none: leave it out, or give engine = "
            '"sglang" or "vllm"'
        )
    if not in_place and not command:
        yield (
            "[sampler] in_place false needs a command, with which the server is started anew for "
            "each policy"
        )
    if in_place and names_version:
        yield (
            "[sampler] command: with in_place = true the command must not name {version}: a "
            "restarted server would report that version, as if the policy had been loaded"
        )
    if not in_place and not names_version:
        yield (
            "[sampler] command: with in_place = false the command must name {version}, so that the "
            "server reports its policy (--served-model-name of vLLM, --weight-version of SGLang)"
        )
