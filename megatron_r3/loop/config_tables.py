"""The tables of a run's config (config.py), each a dataclass: its fields, their types and defaults.

docs/online.md has an example with each field.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ENGINES = ("embedded", "sglang", "vllm")


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
        environment: variables of that command.
        in_place: whether new weights are loaded into the running server; else it is started anew.
        push: a command of yours that hands new weights to the running server, in the place of the
            server's own loading from a directory; {model}, {version} and {url} are filled in.
        examine: rollouts of each shard that the truth test looks at before the shard is stored; 0
            looks at none.
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
    push: list[str] = field(default_factory=list)
    examine: int = 0
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
        reward: module:function; the module is looked for in the folder of the config first.
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
        checkpoint_every: collections from one checkpoint to the next; the last one is followed by a
            checkpoint in any case. A trainer that was killed repeats what came after the last one.
        environment: variables.
    """

    megatron: str
    arguments: list[str]
    script: str = ""
    processes: int = 1
    launch: list[str] = field(default_factory=list)
    steps: int = 1
    checkpoint_every: int = 1
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
