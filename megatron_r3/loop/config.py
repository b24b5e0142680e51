"""The config of a run: one TOML file that every part reads.

docs/online.md has an example with each field. What is not there has the default of its field here;
what is there and is not a field is an error.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from megatron_r3.loop.config_tables import (
    Degrading,
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

# the file by whose patch Megatron trains on rollouts
_PATCHED = "megatron/training/training.py"


class ConfigError(ValueError):
    """A config that cannot be used; the message names the file and the field."""


class Config(Table):
    """A whole config; paths in it are relative to the folder of its file."""

    file: Path
    run: RunTable
    policy: PolicyTable
    sampler: SamplerTable
    prompts: PromptsTable
    trainer: TrainerTable
    degrade: Degrading = Degrading()

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
    if "file" in tables:  # which is a field of Config, and no table
        raise ConfigError(f"{file}: [file] is no table of a run")
    try:
        config = Config(file=file.resolve(), **tables)
    except ValidationError as error:
        raise ConfigError(f"{file}: {_said(error)}") from error
    if host is not None:
        sampler = config.sampler.model_copy(update={"host": host})
        config = config.model_copy(update={"sampler": sampler})
    _check(config)
    return config


# what pydantic calls a wrong type, and what was expected
_EXPECTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list of texts",
    "dict_type": "a table of texts",
    "model_type": "a table",
}


def _said(invalid: ValidationError) -> str:
    """What is wrong with a config, as this project says it.

    A name that is no field is said first: a field that is missing may be the one that was meant.
    """
    errors: list[Any] = [*invalid.errors()]
    error = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    table, *fields = (str(part) for part in error["loc"])
    kind, given, bounds = error["type"], quoted(error["input"]), error.get("ctx", {})
    where = " ".join([f"[{table}]", *fields])
    if kind == "extra_forbidden":
        known = Config.model_fields
        if not fields:
            return f"{where} is no table of a run; they are {', '.join([*known][1:])}"
        of_table: Any = known[table].annotation
        return f"{where}: no such field; there are {', '.join(of_table.model_fields)}"
    if kind == "missing":
        return f"{where} is missing"
    if kind in _EXPECTED:
        return f"{where}: expected {_EXPECTED[kind]}; got {given}"
    must = {
        "greater_than_equal": f"be {bounds.get('ge', 0):g} or more",
        "greater_than": f"be above {bounds.get('gt', 0):g}",
        "less_than_equal": f"be at most {bounds.get('le', 0):g}",
        "finite_number": "be finite",
        "literal_error": f"be one of {bounds.get('expected')}",
    }
    return f"{where} {given}: it must {must.get(kind) or error['msg']}"


def _check(config: Config) -> None:
    run, sampler, prompts, trainer = config.run, config.sampler, config.prompts, config.trainer
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
