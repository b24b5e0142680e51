"""The tables of a run's config (config.py): their fields, types, bounds and defaults.

docs/online.md has an example.
"""

from __future__ import annotations

from typing import Annotated, Literal

try:
    from pydantic import BaseModel, ConfigDict, Field
    from pydantic import ValidationError as ValidationError  # for config.py
except ModuleNotFoundError as missing:
    raise ValueError("a run's config needs pydantic: pip install 'megatron-r3[loop]'") from missing

NotNegative = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Table(BaseModel):
    """A table of the config; an unknown field, or a value of another type, is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunTable(Table):
    """The run: its directory, its length, and how its parts (sampler, collector, trainer) wait.

    Attributes:
        directory: all parts read and write here.
        collections: how many collections are sampled and trained on.
        lag: policy c - lag samples collection c; policy 0 samples the first ones.
        seed: the seeds of all samples derive from this one.
        wait: seconds that a part waits for another part.
        restarts: how often `rl run` restarts a part that dies.
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
        model: the policy as a transformers directory. Its config and tokenizer files are copied
            into each published policy.
        checkpoint: the same policy as a Megatron checkpoint.
        keep: how many published policies stay on disk; 0 keeps all.
    """

    model: str
    checkpoint: str
    keep: NotNegative = 0


class SamplerTable(Table):
    """The engine, and how it samples.

    Attributes:
        engine: embedded, sglang or vllm.
        host, port: where the engine listens.
        command: the words of the command that starts sglang or vllm; {model}, {host}, {port} and
            {version} are filled in. Empty: the user starts the server, which must then take new
            weights in place.
        environment: environment variables of `command`.
        in_place: True loads new weights into the running server, False starts a new server for
            each policy.
        push: the words of a command of the user that hands new weights to the running server.
            {model}, {version} and {url} are filled in. Empty: the server itself loads the weights
            from the policy's directory.
        examine: how many rollouts of each shard the truth test examines before the shard is
            stored; 0 examines none.
        degrade: module:function that makes the embedded sampler's model less exact, for experiments
            (`EmbeddedSampler`); empty for none.
        max_tokens, temperature, top_p, top_k: as the options of `rollouts collect`.
        shard_size: rollouts of a shard. 0 stores a collection as one shard, whole or not at all.
        concurrency: how many requests run at a time. The embedded sampler ignores it: its samples
            are asked for together.
        timeout: seconds for a request. A request to load weights, and the embedded sampler's
            request, may take [run] wait instead.
    """

    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 30000
    command: list[str] = []
    environment: dict[str, str] = {}
    in_place: bool = True
    push: list[str] = []
    examine: NotNegative = 0
    degrade: str = ""
    max_tokens: Count = 1024
    temperature: Above0 = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NotNegative = 0
    shard_size: NotNegative = 0
    concurrency: Count = 64
    timeout: Above0 = 600.0

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://{self.host}:{self.port}"


class PromptsTable(Table):
    """The prompts of a collection, and how their samples are rewarded.

    Attributes:
        file: the prompts, JSON lines as `rollouts collect` reads them. Each collection takes the
            next `per_collection` prompts; after the last prompt the first one follows.
        per_collection: prompts of a collection.
        samples: samples of each prompt.
        reward: module:function; Python looks for the module in the config's folder first. Only a
            config with a [collector] agent may leave it out.
    """

    file: str
    per_collection: Count
    samples: Count
    reward: str = ""


class CollectorTable(Table):
    """What the collector does with a prompt.

    Attributes:
        agent: module:function, an async function that takes a client and the prompt's line, and
            returns the reward; None leaves the reward to [prompts] reward. Without an agent each
            sample is one response to the prompt.
    """

    agent: str = ""


class TrainerTable(Table):
    """How the trainer is started.

    Attributes:
        megatron: a patched Megatron-LM tree.
        script: the training script, which calls pretrain(); {megatron} is filled in. Empty runs
            megatron_r3.train.pretrain_gpt.
        processes: how many processes torchrun starts on this host.
        launch: the words of the command that runs the script in all processes. The default is
            torchrun on one host.
        arguments: Megatron's arguments: model, layout, batch sizes, learning rate, loss. Each text
            is split into words as a shell does it. `rl trainer` adds the loop's own arguments.
        steps: optimizer steps on a collection: mini-steps times epochs.
        checkpoint_every: collections from one checkpoint to the next; the last collection always
            has one. A killed trainer repeats the steps after its newest checkpoint.
        environment: environment variables of the trainer.
    """

    megatron: str
    arguments: list[str]
    script: str = ""
    processes: Count = 1
    launch: list[str] = []
    steps: Count = 1
    checkpoint_every: Count = 1
    environment: dict[str, str] = {}
