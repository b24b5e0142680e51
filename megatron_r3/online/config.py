"""The config of a run: one TOML file that every part reads.

docs/online.md has an example with each field. What is not there has the default of its field here;
what is there and is not a field is an error.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from megatron_r3.policies.run_directory import RunDirectory
from megatron_r3.untrusted import one_line, quoted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINES = ("embedded", "sglang", "vllm")
T = TypeVar("T")


class ConfigError(ValueError):
    """A config that cannot be used; the message names the file and the field."""


@dataclass(frozen=True)
class RunTable:
    """What the run is.

    Attributes:
        directory: where its parts meet.
        collections: how many collections are sampled and trained on.
        lag: collection c is sampled by policy c - lag, or by policy 0.
        seed: the seed of every sample is made from it.
        wait: seconds that a part waits for another one.
        restarts: how often `rl run` starts a part that died again.
    """

    directory: str
    collections: int
    lag: int = 0
    seed: int = 0
    wait: float = 3600.0
    restarts: int = 3


@dataclass(frozen=True)
class PolicyTable:
    """The policy with which the run begins.

    Attributes:
        model: its transformers directory. Published policies get its config and tokenizer files.
        checkpoint: its Megatron checkpoint.
        keep: how many published policies stay on disk; 0 keeps all.
    """

    model: str
    checkpoint: str
    keep: int = 0


@dataclass(frozen=True)
class SamplerTable:
    """The engine, and how it samples.

    Attributes:
        engine: embedded, sglang or vllm.
        host, port: where it listens.
        command: how sglang or vllm is started, word by word; {model}, {host}, {port} and {version}
            are filled in. Empty: somebody else starts the server, which then takes new weights in
            place.
        in_place: whether new weights are loaded into the running server; else it is started anew.
        max_tokens, temperature, top_p, top_k: as of `rollouts collect`.
        shard_size: rollouts of a shard. 0 stores a collection as one shard, whole or not at all.
        concurrency: requests under way at a time.
        timeout: seconds for one request.
    """

    engine: str = "embedded"
    host: str = "127.0.0.1"
    port: int = 30000
    command: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    in_place: bool = True
    max_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    shard_size: int = 0
    concurrency: int = 64
    timeout: float = 600.0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class PromptsTable:
    """What a collection asks.

    Attributes:
        file: the prompts, JSON lines as of `rollouts collect`. Collection c has the next
            `per_collection` of them; after the last one the first one comes again.
        per_collection: prompts of a collection.
        samples: of each prompt.
        reward: module:function.
    """

    file: str
    per_collection: int
    samples: int
    reward: str


@dataclass(frozen=True)
class TrainerTable:
    """How the trainer is started.

    Attributes:
        megatron: a patched tree.
        script: which calls pretrain(); {megatron} is filled in.
        processes: of torchrun on this host.
        launch: the command that runs the script in all processes, word by word. The default is
            torchrun on one host.
        arguments: Megatron's arguments: model, layout, batch sizes, learning rate, loss. Each text
            is split into words as a shell does it. `rl trainer` adds those of the loop.
        steps: optimizer steps on a collection: mini-steps times epochs.
        environment: variables.
    """

    megatron: str
    arguments: list[str]
    script: str = ""
    processes: int = 1
    launch: list[str] = field(default_factory=list)
    steps: int = 1
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Degrading:
    """What the embedded sampler computes worse on purpose (degrade.py), for experiments.

    Attributes:
        router_noise: the standard deviation of the gaussian noise on every router logit.
        fp8: round the weights of linear layers and experts to float8 (e4m3, a scale for each output
            row), and the inputs of linear layers and of the experts (a scale for each token).
    """

    router_noise: float = 0.0
    fp8: bool = False

    def __post_init__(self) -> None:
        """Refuse a noise that is no standard deviation."""
        if not 0 <= self.router_noise < float("inf"):
            raise ValueError(f"router_noise {self.router_noise:g}: it must be 0 or more")


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
        """A path of the config, absolute."""
        return (self.file.parent / Path(name).expanduser()).resolve()

    def version_of(self, collection: int) -> int:
        """The policy that samples a collection."""
        return max(0, collection - self.run.lag)


def read_config(file: Path) -> Config:
    """Read a config and check what can be checked without starting anything.

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
        ("[sampler] shard_size", sampler.shard_size, 0),
        ("[sampler] concurrency", sampler.concurrency, 1),
        ("[prompts] per_collection", prompts.per_collection, 1),
        ("[prompts] samples", prompts.samples, 1),
        ("[trainer] processes", trainer.processes, 1),
        ("[trainer] steps", trainer.steps, 1),
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
    if sampler.engine == "vllm" and sampler.in_place:
        raise ConfigError(
            f"{config.file}: [sampler] in_place: vLLM is started anew for each policy here; give "
            "in_place = false and a command"
        )
    if config.degrade != Degrading() and sampler.engine != "embedded":
        raise ConfigError(f"{config.file}: [degrade] is of the embedded sampler alone")
    if 0 < config.policy.keep < run.lag + 2:
        raise ConfigError(
            f"{config.file}: [policy] keep {config.policy.keep}: with lag {run.lag} the sampler "
            f"may need older ones; give {run.lag + 2} or more, or 0 for all"
        )
