"""The tables of a run's config (config.py): their fields, types, bounds and defaults.

docs/online.md has an example with each field.
"""

from __future__ import annotations

from typing import Annotated, Literal

try:
    from pydantic import BaseModel, ConfigDict, Field
    from pydantic import ValidationError as ValidationError  # for config.py
except ModuleNotFoundError as missing:
    raise ValueError("a run's config takes pydantic: pip install 'megatron-r3[loop]'") from missing

NotNegative = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Table(BaseModel):
    """A table of the config; what is not a field of it, or has another type, is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunTable(Table):
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
    collections: Count
    lag: NotNegative = 0
    seed: int = 0
    wait: Above0 = 3600.0
    restarts: NotNegative = 3


class PolicyTable(Table):
    """The policy with which the run begins.

    Attributes:
        model: its transformers directory. Published policies get its config and tokenizer files.
        checkpoint: its Megatron checkpoint.
        keep: how many published policies stay on disk; 0 keeps all.
    """

    model: str
    checkpoint: str
    keep: NotNegative = 0


class SamplerTable(Table):
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

    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 30000
    command: list[str] = []
    environment: dict[str, str] = {}
    in_place: bool = True
    push: list[str] = []
    examine: NotNegative = 0
    max_tokens: Count = 1024
    temperature: Above0 = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NotNegative = 0
    shard_size: NotNegative = 0
    concurrency: Count = 64
    timeout: Above0 = 600.0

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"


class PromptsTable(Table):
    """What a collection asks.

    Attributes:
        file: the prompts, JSON lines as of `rollouts collect`. Collection c has the next
            `per_collection` of them; after the last one the first one comes again.
        per_collection: prompts of a collection.
        samples: of each prompt.
        reward: module:function; the module is looked for in the folder of the config first.
    """

    file: str
    per_collection: Count
    samples: Count
    reward: str


class TrainerTable(Table):
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
    processes: Count = 1
    launch: list[str] = []
    steps: Count = 1
    checkpoint_every: Count = 1
    environment: dict[str, str] = {}


class Degrading(Table):
    """What the embedded sampler computes worse on purpose (degrade.py), for experiments.

    Attributes:
        router_noise: the standard deviation of the gaussian noise on every router logit.
        fp8: round the weights of linear layers and experts to float8 (e4m3, a scale for each output
            row), and the inputs of linear layers and of the experts (a scale for each token).
    """

    router_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    fp8: bool = False
