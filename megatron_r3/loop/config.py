"""The config of a run: one TOML file that every part reads.

docs/online.md has an example with each field. What is not there has the default of its field here;
what is there and is not a field is an error.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from megatron_r3.loop.config_tables import (
    ENGINES,
    Degrading,
    PolicyTable,
    PromptsTable,
    RunTable,
    SamplerTable,
    TrainerTable,
)
from megatron_r3.loop.run_directory import RunDirectory
from megatron_r3.replay.ending import not_patched
from megatron_r3.replay.words import one_line, quoted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
# the file by whose patch Megatron trains on rollouts
_PATCHED = "megatron/training/training.py"


class ConfigError(ValueError):
    """A config that cannot be used; the message names the file and the field."""


@dataclass(frozen=True)
class Config:
    """A whole config; paths in it are relative to the folder of its file."""

    file: Path
    run: RunTable
    policy: PolicyTable
    sampler: SamplerTable
    prompts: PromptsTable
    trainer: TrainerTable
    degrade: Degrading = field(default_factory=Degrading)

    @property
    def directory(self) -> RunDirectory:
        """Where the parts meet."""
        return RunDirectory(self.path(self.run.directory))

    @property
    def rollouts_per_collection(self) -> int:
        """Prompts times samples."""
        return self.prompts.per_collection * self.prompts.samples

    def path(self, name: str) -> Path:
        """A path of the config, absolute.

        `$NAME` and `${NAME}` stand for variables of the environment, and ~ for the home folder, so
        that one file serves hosts whose folders have other names: "$SHARED/prompts.jsonl".

        Raises:
            ConfigError: a variable is not set.
        """

        def value(found: re.Match[str]) -> str:
            variable = found[1] or found[2]
            if variable not in os.environ:
                raise ConfigError(
                    f"{self.file}: {quoted(name)}: the variable {variable} is not set: export it, "
                    "or write the path"
                )
            return os.environ[variable]

        expanded = re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, name)
        return (self.file.parent / Path(expanded).expanduser()).resolve()

    def version_of(self, collection: int) -> int:
        """The policy that samples a collection."""
        return max(0, collection - self.run.lag)


def read_config(file: Path, host: str | None = None) -> Config:
    """Read a config and check what can be checked without starting anything.

    Args:
        host: in the place of [sampler] host; None takes the config's.

    Raises:
        ConfigError: naming the field, what was expected, and what to do.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: not readable ({error.strerror})") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file}: not TOML ({one_line(str(error), 200)})") from error
    names = ("run", "policy", "sampler", "prompts", "trainer", "degrade")
    if unknown := sorted(tables.keys() - {*names}):
        raise ConfigError(
            f"{file}: [{unknown[0]}] is no table of a run; they are {', '.join(names)}"
        )
    config = Config(
        file=file.resolve(),
        run=_table(file, "run", RunTable, tables),
        policy=_table(file, "policy", PolicyTable, tables),
        sampler=_table(file, "sampler", SamplerTable, tables),
        prompts=_table(file, "prompts", PromptsTable, tables),
        trainer=_table(file, "trainer", TrainerTable, tables),
        degrade=_table(file, "degrade", Degrading, tables),
    )
    if host is not None:
        config = replace(config, sampler=replace(config.sampler, host=host))
    _check(config)
    return config


def _table(file: Path, name: str, kind: type[T], tables: Mapping[str, Any]) -> T:
    where, given = f"{file}: [{name}]", tables.get(name, {})
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be a table")
    hints = get_type_hints(kind)
    for key, value in given.items():
        if key not in hints:
            raise ConfigError(f"{where} {key}: no such field; there are {', '.join(hints)}")
        if not _fits(value, str(hints[key])):
            raise ConfigError(f"{where} {key}: expected {_words(hints[key])}; got {quoted(value)}")
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        needed = one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
        if needed and one.name not in given:
            raise ConfigError(f"{where} {one.name} is missing")
    values = {key: float(value) if hints[key] is float else value for key, value in given.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ConfigError(f"{where} {error}") from error


def _fits(value: Any, hint: str) -> bool:
    plain = {"<class 'str'>": str, "<class 'int'>": int, "<class 'bool'>": bool}
    if hint in plain:
        return type(value) is plain[hint]
    if hint == "<class 'float'>":
        return type(value) in (int, float)
    if hint == "list[str]":
        return isinstance(value, list) and all(isinstance(word, str) for word in value)
    return isinstance(value, dict) and all(isinstance(word, str) for word in value.values())


def _words(hint: Any) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(hint) or ("a list of texts" if "list" in str(hint) else "a table of texts")


def _check(config: Config) -> None:
    run, sampler, prompts, trainer = config.run, config.sampler, config.prompts, config.trainer
    least = [
        ("[run] collections", run.collections, 1),
        ("[run] lag", run.lag, 0),
        ("[run] restarts", run.restarts, 0),
        ("[policy] keep", config.policy.keep, 0),
        ("[sampler] max_tokens", sampler.max_tokens, 1),
        ("[sampler] examine", sampler.examine, 0),
        ("[sampler] shard_size", sampler.shard_size, 0),
        ("[sampler] concurrency", sampler.concurrency, 1),
        ("[prompts] per_collection", prompts.per_collection, 1),
        ("[prompts] samples", prompts.samples, 1),
        ("[trainer] processes", trainer.processes, 1),
        ("[trainer] steps", trainer.steps, 1),
        ("[trainer] checkpoint_every", trainer.checkpoint_every, 1),
    ]
    for name, value, lowest in least:
        if value < lowest:
            raise ConfigError(f"{config.file}: {name} {value}: it must be {lowest} or more")
    above = [
        ("[run] wait", run.wait),
        ("[sampler] timeout", sampler.timeout),
        ("[sampler] temperature", sampler.temperature),
        ("[sampler] top_p", sampler.top_p),
    ]
    for name, number in above:
        if not 0 < number < float("inf"):
            raise ConfigError(f"{config.file}: {name} {number:g}: it must be above 0")
    if sampler.top_p > 1 or sampler.top_k < 0:
        raise ConfigError(
            f"{config.file}: [sampler] top_p {sampler.top_p:g}, top_k {sampler.top_k}: top_p is at "
            "most 1, top_k 0 or more"
        )
    if sampler.shard_size and sampler.engine == "embedded":
        raise ConfigError(
            f"{config.file}: [sampler] shard_size: the embedded sampler stores a collection as one "
            "shard; leave it out"
        )
    if 0 < sampler.shard_size < prompts.samples:
        raise ConfigError(
            f"{config.file}: [sampler] shard_size {sampler.shard_size}: the {prompts.samples} "
            "samples of a prompt lie in one shard; give that many or more"
        )
    places = [
        ("[trainer] megatron", trainer.megatron, "megatron/core"),
        ("[trainer] megatron", trainer.megatron, _PATCHED),
        ("[policy] model", config.policy.model, "config.json"),
        ("[policy] checkpoint", config.policy.checkpoint, ""),
    ]
    for name, folder, inside in places:
        if not (config.path(folder) / inside).exists():
            raise ConfigError(
                f"{config.file}: {name}: {config.path(folder)} has no {inside}"
                if inside
                else f"{config.file}: {name}: there is no {config.path(folder)}"
            )
    tree = config.path(trainer.megatron)
    if b"megatron_r3" not in (tree / _PATCHED).read_bytes():
        raise ConfigError(f"{config.file}: [trainer] megatron: {not_patched(tree)}")
    if not 1 <= sampler.port <= 65535:
        raise ConfigError(f"{config.file}: [sampler] port {sampler.port}: it must be 1 to 65535")
    if sampler.engine not in ENGINES:
        raise ConfigError(
            f"{config.file}: [sampler] engine {quoted(sampler.engine)}: it must be one of "
            f"{', '.join(ENGINES)}"
        )
    if sampler.engine == "embedded" and sampler.command:
        raise ConfigError(
            f"{config.file}: [sampler] command: the embedded sampler has no command of yours"
        )
    if not sampler.in_place and not sampler.command:
        raise ConfigError(
            f"{config.file}: [sampler] in_place false needs a command, with which the server is "
            "started anew for each policy"
        )
    names_version = any("{version}" in word for word in sampler.command)
    if sampler.command and names_version == sampler.in_place:
        raise ConfigError(
            f"{config.file}: [sampler] command: with in_place = "
            + (
                "true it must not name {version}: a server that was started again could not be "
                "told from the one that was given a policy"
                if sampler.in_place
                else "false it must name {version}, by which the server says which policy it has "
                "(--served-model-name of vLLM, --weight-version of SGLang)"
            )
        )
    if sampler.push and (sampler.engine == "embedded" or not sampler.in_place):
        raise ConfigError(
            f"{config.file}: [sampler] push hands weights to a running sglang or vllm: leave it "
            "out with the embedded sampler, and with in_place = false"
        )
    if config.degrade != Degrading() and sampler.engine != "embedded":
        raise ConfigError(f"{config.file}: [degrade] is of the embedded sampler alone")
    # A trainer that goes on from a checkpoint trains again on what older policies sampled, and asks
    # their files whether it has published them. Example: lag 4, checkpoints after 20 and 40
    # collections, killed when policy 40 was published: it goes on with collection 20, which policy
    # 16 sampled, so 25 policies are needed.
    fewest = run.lag + 1 + config.trainer.checkpoint_every
    if 0 < config.policy.keep < fewest:
        raise ConfigError(
            f"{config.file}: [policy] keep {config.policy.keep}: with lag {run.lag} and a "
            f"checkpoint after every {config.trainer.checkpoint_every} collections the sampler and "
            f"a trainer that goes on need older ones; give {fewest} or more, or 0 for all"
        )
