"""What to collect: prompts, how to sample, which model, what rewards, and where the rollouts go.

`Model`, which is what a store needs to know of a transformers directory, is for `convert` and
`verify` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompts import Prompt
from megatron_r3.collect.reward import RewardFunction
from megatron_r3.data.digest import digest_number
from megatron_r3.data.engines.shape import EngineError, ModelShape
from megatron_r3.data.fingerprint import policy_stamp, router_fingerprint
from megatron_r3.data.store import Rollout, SamplingSettings, StoreInfo
from megatron_r3.data.untrusted import read_json

# The distributions that an engine's log-probs may be of, if a response has no kept sets. The
# response does not say which, so a temperature or a top-p is refused without kept sets.
_MAY_BE_OF = {
    "vllm": "vLLM's are of temperature 1, or of the processed distribution if the server was "
    "started with --logprobs-mode processed_logprobs",
    "sglang": "SGLang's are of this temperature, or of temperature 1 if the server has "
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
}


@dataclass(frozen=True)
class Sampling:
    """How to sample. Each sample has a seed of its own; an agent may ask for fewer tokens.

    Attributes:
        max_tokens: the largest number of tokens of a response.
        temperature: the logits are divided by it; 0 takes the likeliest token.
        top_p: sample from the likeliest tokens that together have this probability; 1 means all.
        top_k: sample from this many of the likeliest tokens; 0 means all.
        seed: each sample's seed is made from this one. None means that the engine chooses.
        logprobs_of: the distribution of the stored log-probs ("raw", "processed" or None), as in
            SamplingSettings. With "processed" and a top-p or top-k, kept sets are stored too.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs_of: str | None = None

    @property
    def settings(self) -> SamplingSettings:
        """The settings as the store records them."""
        return SamplingSettings(
            self.temperature, self.top_p, self.top_k, 0.0, self.max_tokens, self.logprobs_of
        )

    @property
    def wants_kept(self) -> bool:
        """Whether each rollout has to have kept sets."""
        return self.logprobs_of == "processed" and (self.top_p < 1 or self.top_k > 0)

    def seed_of(self, group: int, sample: int, policy_version: int) -> int | None:
        """One sample's seed, which has 31 bits and is the same in each run; None without `seed`."""
        if self.seed is None:
            return None
        # A digest, because some generators mix neighbouring seeds badly.
        name = f"{self.seed} {policy_version} {group} {sample}".encode()
        return digest_number(name, 31)


def sampling_for(engine: str, sampling: Sampling) -> Sampling:
    """The sampling, with `logprobs_of` set to what this engine can return.

    Settings that change no distribution (temperature 1, no cut) are returned as they are.

    Args:
        engine: "vllm", "sglang", "megatron" or "transformers".

    Raises:
        ValueError: the engine does not take requests with these settings, or training cannot use
            the log-probs that the engine returns with them.
    """
    if engine == "megatron":
        _refuse_for_megatron(sampling)
    unknown = sampling.settings.unknown_to_the_loss()
    if not unknown:
        return sampling
    given = ", ".join(unknown)
    if sampling.temperature == 0:
        raise ValueError(
            f"{given}: the likeliest token is taken, so every log-prob of the distribution that is "
            "sampled is 0, and training could learn nothing"
        )
    processed = replace(sampling, logprobs_of="processed")
    if engine == "transformers":
        return processed
    if engine == "megatron":
        raise ValueError(
            f"{given}: Megatron's server returns no kept sets, and does not say which distribution "
            "its log-probs are of: leave these settings out"
        )
    if not sampling.top_k:  # vLLM and SGLang return a mask only if top-k bounds its size
        raise ValueError(
            f"{given}: the response does not say which distribution its log-probs are of: "
            f"{_MAY_BE_OF[engine]}; with a top-k, e.g. 1000, the engine returns kept sets and "
            "log-probs over them"
        )
    return processed


def _refuse_for_megatron(sampling: Sampling) -> None:
    if sampling.seed is not None:
        raise ValueError(
            "--seed: Megatron's server takes no seed with a request; leave it out, and start the "
            "server with another --seed"
        )
    if sampling.top_k > 0 and sampling.top_p < 1:
        raise ValueError(
            "--top-k and --top-p: Megatron's engine takes one of the two, and stops if a request "
            "has both: leave one out"
        )


@dataclass(frozen=True)
class Model:
    """What a store needs to know of a model.

    Attributes:
        name: the name of its directory.
        shape: its MoE layers, experts and top-k.
        router_fingerprint: a digest of the router weights of each MoE layer; empty if the directory
            has no weights.
        vocab_size: None if the config does not say it.
        policy_stamp: a digest of all weights; empty if the directory has no weights.
        sampling_defaults: what its generation_config.json has; empty if there is no such file.
    """

    name: str
    shape: ModelShape
    router_fingerprint: tuple[str, ...]
    vocab_size: int | None
    policy_stamp: str = ""
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    def store_info(self, engine: str, engine_version: str, **more: Any) -> StoreInfo:
        """The header of a store of rollouts that this model sampled.

        Args:
            engine, engine_version: the name and version of the engine that ran the model.
            more: other fields of StoreInfo.
        """
        return StoreInfo.of_model(
            self.shape,
            engine,
            engine_version,
            model=self.name,
            router_fingerprint=self.router_fingerprint,
            policy_stamp=self.policy_stamp,
            vocab_size=self.vocab_size or 0,
            **more,
        )


def read_model(path: Path, **shape: Any) -> Model:
    """Read a transformers directory, or a config.json alone, which has no weights to digest.

    Args:
        shape: what the config does not say, as in `ModelShape.from_hf_config`.

    Raises:
        EngineError: naming the file that cannot be used.
    """
    folder = (path if path.is_dir() else path.parent).resolve()
    found = ModelShape.from_hf_config(path, **shape)
    defaults = _sampling_defaults(folder / "generation_config.json")
    model = Model(folder.name, found, (), found.vocab_size, sampling_defaults=defaults)
    if not path.is_dir() or not any(path.glob("*.safetensors")):
        return model
    try:
        routers = router_fingerprint(path, found.moe_layers)
        return replace(model, router_fingerprint=routers, policy_stamp=policy_stamp(path))
    except ValueError as error:
        raise EngineError(
            f"{error}; to store no digests of the weights, give --model {path / 'config.json'}"
        ) from error


def _sampling_defaults(path: Path) -> Mapping[str, Any]:
    """The fields of a generation_config.json; empty if there is no such file."""
    try:
        found = read_json(path.read_bytes(), str(path)) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise EngineError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise EngineError(f"{path}: a JSON object is expected")
    return found


@dataclass(frozen=True)
class Plan:
    """What to collect.

    Attributes:
        prompts: the prompts, each of which is a group of the store.
        n: samples of each prompt.
        sampling: how to sample, as `sampling_for` returns it.
        reward: the function that rewards a response; None if an agent gives all rewards.
        model: the model that the engine runs.
        out: the store's directory. Samples of this policy version that the store already has are
            not repeated.
        policy_version: which policy samples.
        shard_size: rollouts of a shard, or a few more, so that groups stay whole. A kill loses the
            rollouts that wait for their shard to be full.
        refused_retries: how often a sample is asked for again after a response that cannot be used.
        all_or_nothing: store nothing until all rollouts are there, then store them as one shard.
        whole_groups: store no group of which a sample was given up. Parts of a group that is larger
            than a shard may have been stored before.
        check: called with the rollouts and the header of a shard before the shard is stored; raises
            ValueError to keep the rollouts out of the store.

    Raises:
        PromptError: a prompt has token ids outside the model's vocabulary.
    """

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    reward: RewardFunction | None
    model: Model
    out: Path
    policy_version: int = 0
    shard_size: int = 128
    refused_retries: int = 2
    all_or_nothing: bool = False
    whole_groups: bool = False
    check: Callable[[Sequence[Rollout], StoreInfo], None] | None = None

    def __post_init__(self) -> None:
        """Refuse prompts with token ids outside the model's vocabulary."""
        for prompt in self.prompts:
            prompt.check_vocabulary(self.model.vocab_size)
