"""What all rollouts of a store share: the sampler, the model, and how tokens were drawn."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from megatron_r3.data.values import wrong_text
from megatron_r3.replay.routes import MoEShape
from megatron_r3.replay.words import must_be, quoted, wrong_whole

FORMAT = "megatron-r3 rollouts"
FORMAT_VERSION = 6  # grows with every change of the format in docs/rollout-store.md

_DIGEST = re.compile("[0-9a-f]{16}")


class StoreError(ValueError):
    """A store that cannot be used; most messages name the file and what to do."""


@dataclass(frozen=True)
class SamplingSettings:
    """How the engine drew tokens; None stands for a setting that is not known.

    Attributes:
        temperature: what the logits were divided by.
        top_p, top_k, min_p: the settings that cut tokens off; top_k 0 cuts nothing off.
        max_tokens: the number of sampled tokens at which a response was ended.
        logprobs_of: which log-probs the store has. "raw" log-probs are at temperature 1 and over
            the whole vocabulary. "processed" ones are of the distribution from which tokens were
            drawn: logits divided by the temperature, normalised over the kept tokens.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    logprobs_of: str | None = None

    def check(self, where: str) -> None:
        """Refuse settings that no engine has.

        Raises:
            StoreError: naming `where` and the setting.
        """
        for name, most in (("temperature", 1e4), ("top_p", 1.0), ("min_p", 1.0)):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 <= value <= most):
                expected = f"a number from 0 to {most:g}"
                raise StoreError(f"{where}: {must_be(f'sampling.{name}', expected, value)}")
        for name, least in (("top_k", 0), ("max_tokens", 1)):
            value = getattr(self, name)
            if value is not None and (
                wrong := wrong_whole(f"sampling.{name}", value, least, 2**31 - 1)
            ):
                raise StoreError(f"{where}: {wrong}")
        if self.logprobs_of not in (None, "raw", "processed"):
            expected = "raw, processed or None"
            raise StoreError(
                f"{where}: {must_be('sampling.logprobs_of', expected, self.logprobs_of)}"
            )

    def unknown_to_the_loss(self, has_kept: bool = False) -> list[str]:
        """The settings, as words, with which the policy loss would be wrong.

        The loss divides the trainer's probability of a token by the sampler's; both must be of the
        same distribution. So a temperature other than 1 needs "processed" log-probs, and a setting
        that cuts tokens off needs kept sets too. Example: `["temperature 0.7", "top_k 20"]`.

        Args:
            has_kept: whether every rollout has kept sets.
        """
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        if self.logprobs_of == "processed":
            plain.pop("temperature")
            plain = {} if has_kept else plain
        given = {name: getattr(self, name) for name in plain}
        return [
            f"{name} {value:g}"
            for name, value in given.items()
            if value is not None and value != plain[name]
        ]


@dataclass(frozen=True)
class StoreInfo(MoEShape):
    """What all rollouts of a store share; each shard carries it.

    All shards must agree; if policies are mixed, the fields of `policy` may differ.

    The fields of `MoEShape` come first; `of_model` takes them from the shape of the sampler.

    Attributes:
        engine, engine_version: the engine that sampled.
        model: a name for people.
        router_fingerprint: for each MoE layer a digest of the sampler's router weights
            (`megatron_r3.data.fingerprint`); empty if not known.
        policy_stamp: a digest of all of the sampler's weights, which differs between policies that
            have the same routers. Empty if not known.
        engine_policy: the version of the weights as the engine itself reports it, or empty.
        vocab_size: rows of the sampler's output layer; 0 if not known.
        sampling: how the engine drew tokens.
    """

    engine: str
    engine_version: str
    model: str = ""
    router_fingerprint: tuple[str, ...] = ()
    policy_stamp: str = ""
    engine_policy: str = ""
    vocab_size: int = 0
    sampling: SamplingSettings = SamplingSettings()

    @classmethod
    def of_model(
        cls, shape: MoEShape, engine: str, engine_version: str, **others: Any
    ) -> StoreInfo:
        """The info of a store for rollouts that this engine samples from a model of this shape.

        Args:
            others: values of fields that have a default.
        """
        return cls(
            shape.num_experts, shape.topk, shape.moe_layers, engine, engine_version, **others
        )

    @property
    def policy(self) -> tuple[tuple[str, ...], str, str]:
        """What tells policies apart: router digests, stamp, the engine's version of its weights."""
        return self.router_fingerprint, self.policy_stamp, self.engine_policy

    def check(self, where: str = "StoreInfo") -> None:
        """Refuse values that no store can have.

        Raises:
            StoreError: naming `where` and the field.
        """
        if wrong := self.wrong_shape():
            raise StoreError(f"{where}: {wrong}")
        for name in ("engine", "engine_version", "model", "policy_stamp", "engine_policy"):
            if wrong := wrong_text(getattr(self, name)):
                raise StoreError(f"{where}: {name} must be {wrong}")
        self._check_digests(f"{where}: router_fingerprint")
        if wrong := wrong_whole("vocab_size", self.vocab_size, 0, 2**31):
            raise StoreError(f"{where}: {wrong}")
        if not isinstance(self.sampling, SamplingSettings):
            raise StoreError(f"{where}: {must_be('sampling', 'SamplingSettings', self.sampling)}")
        self.sampling.check(where)

    def _check_digests(self, where: str) -> None:
        digests = self.router_fingerprint
        if not isinstance(digests, tuple) or not all(
            isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests
        ):
            expected = "16 hex digits for each MoE layer, or empty"
            raise StoreError(must_be(where, expected, digests))
        if digests and len(digests) != len(self.moe_layers):
            raise StoreError(
                f"{where}: {len(digests)} router digests; expected one for "
                f"each of {len(self.moe_layers)} layers"
            )


def differences(there: StoreInfo, here: StoreInfo) -> list[str]:
    """How two infos differ: a few words for each field that differs.

    Example: `["topk 4 there, 2 here", "router of layer 3 0f.. there, 1b.. here (and 46 more)"]`.
    """
    different = []
    for field in fields(StoreInfo):
        a, b = getattr(there, field.name), getattr(here, field.name)
        if a == b:
            continue
        if field.name == "sampling":
            settings = [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
            different += [
                f"{name} {_short(x)} there, {_short(y)} here" for name, x, y in settings if x != y
            ]
        elif field.name == "router_fingerprint" and len(a) == len(b) == len(there.moe_layers):
            layers = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
            first = layers[0]
            more = f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
            number = there.moe_layers[first]
            different.append(f"router of layer {number} {a[first]} there, {b[first]} here{more}")
        elif field.name == "router_fingerprint":
            different.append(f"{len(a)} router digests there, {len(b)} here")
        else:
            different.append(f"{field.name} {_short(a)} there, {_short(b)} here")
    return different


def _short(value: Any) -> str:
    return quoted(list(value) if isinstance(value, tuple) else value)
