"""From recorded responses of an engine, JSON lines, to a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_r3.engines import body as bodies
from megatron_r3.engines.shape import EngineError, naming
from megatron_r3.engines.vllm import joined_stream
from megatron_r3.rollout import Rollout
from megatron_r3.rollouts.prompts import prompt_digest
from megatron_r3.rollouts.requests import answer_of, decoder
from megatron_r3.rollouts.resume import new_store, writing
from megatron_r3.rollouts.reward import RewardError, RewardFunction, RewardSample, score
from megatron_r3.rollouts.verify import Model
from megatron_r3.store import StoreInfo, write_shard
from megatron_r3.store.schema import SamplingSettings
from megatron_r3.untrusted import quoted, read_json, said
from megatron_r3.values import wrong_name, wrong_reward, wrong_text


@dataclass(frozen=True)
class Recording:
    """Responses that were recorded.

    Attributes:
        path: JSON lines `{"request": ..., "response": ..., "reward"?: ..., "group"?: ...}`.
        engine, engine_version: what sampled.
        model: that it ran.
        policy_version: which policy sampled.
        reward: for lines without one; None: each has it.
    """

    path: Path
    engine: str
    engine_version: str
    model: Model
    policy_version: int = 0
    reward: RewardFunction | None = None


def convert_responses(
    recording: Recording, out: Path, shard_size: int, skip_refused: bool = False
) -> tuple[int, list[str]]:
    """Write a new store of every choice of every response.

    A line's group is its `group`; without, each prompt of each request is a group. Samples of a
    group count on from line to line; where its lines follow each other, they are in one shard.

    Args:
        shard_size: rollouts of a shard, or more.
        skip_refused: leave responses out that cannot be decoded or were sampled in another way
            than the first, instead of refusing the file.

    Returns:
        How many rollouts it has, and why which lines were left out.

    Raises:
        EngineError: a line that is no response, one that cannot be decoded, or one that was sampled
            in another way than the first.
        RewardError: a line without a reward, or a reward function that failed.
        StoreError: `out` is there already, or cannot be written.
    """
    skipped: list[str] = []
    count = 0
    info, reader = _info(recording), _Reader(recording)
    with new_store(out) as folder:
        batch: list[Rollout] = []
        for rollouts, refused in reader.lines():
            if refused and not skip_refused:
                raise EngineError(refused)
            skipped += [refused] if refused else []
            if len(batch) >= shard_size and rollouts and rollouts[0].group != batch[-1].group:
                _write(out, folder, replace(info, sampling=reader.sampling), batch)
                count += len(batch)
                batch = []
            batch += rollouts
        if batch:
            _write(out, folder, replace(info, sampling=reader.sampling), batch)
        count += len(batch)
        if not count:
            raise EngineError(f"{recording.path}: no responses to store")
    return count, skipped


def _info(recording: Recording) -> StoreInfo:
    names = {"--engine-version": recording.engine_version, "--model": recording.model.name}
    for option, name in names.items():
        if wrong := wrong_text(name):
            raise EngineError(f"{option} {quoted(name)}: what a store calls it is {wrong}")
    shape = recording.model.shape
    return StoreInfo.of_model(
        shape,
        recording.engine,
        recording.engine_version,
        model=recording.model.name,
        router_fingerprint=recording.model.router_fingerprint,
        policy_stamp=recording.model.policy_stamp,
        vocab_size=shape.vocab_size or 0,
    )


def _write(out: Path, folder: Path, info: StoreInfo, rollouts: list[Rollout]) -> None:
    with writing(out):
        write_shard(folder, info, rollouts)


class _Reader:
    """Reads a recording line by line; counts the prompts, and the samples of each group.

    Attributes:
        sampling: of the first line that was decoded.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.decode = recording, decoder(recording.engine)
        self.sampling, self.sampled_first = SamplingSettings(), ""
        self.samples: Counter[int] = Counter()
        self.digests: dict[int, tuple[int, str]] = {}  # of each group's prompt, and who said it
        self.prompts = 0
        self.named: bool | None = None

    def lines(self) -> Iterator[tuple[list[Rollout], str]]:
        """The rollouts of each line, or why it has none."""
        for where, line in read_lines(self.recording.path):
            yield self._decoded(line, where)

    def _decoded(self, line: dict[str, Any], where: str) -> tuple[list[Rollout], str]:
        response, request = line["response"], line["request"]
        try:
            # how long a response may get differs from turn to turn of an agent, and moves no
            # probability
            settings = replace(settings_of(request, where), max_tokens=None)
            decoded = self.decode(response, request, self.recording.model.shape, where)
            answers = answers_of(response, len(decoded), where)
            digests = digests_of(self.recording.engine, request, where)
            self._refuse_other_settings(settings, where)
        except EngineError as error:
            return [], str(error)
        # the decoders refuse whatever they know to be wrong; this is the net below them
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            return [], f"{where}: the response cannot be read ({said(repr(error))})"
        return list(self._rollouts(line, decoded, answers, digests, where)), ""

    def _refuse_other_settings(self, settings: SamplingSettings, where: str) -> None:
        """A store has one way of sampling: that of its first response."""
        if not self.sampled_first:
            self.sampling, self.sampled_first = settings, where
        for name, first in vars(self.sampling).items():
            given = getattr(settings, name)
            if given != first:
                raise EngineError(
                    f"{where}: {name} {_or_not_said(given)}, and {_or_not_said(first)} in "
                    f"{self.sampled_first}: a store has one way of sampling; convert such lines "
                    "into a store of their own"
                )

    def _rollouts(
        self,
        line: dict[str, Any],
        decoded: list[Rollout],
        answers: list[tuple[str, str]],
        digests: list[int],
        where: str,
    ) -> Iterator[Rollout]:
        version = self.recording.policy_version
        first = self._first_group(line, 1 + max(one.group for one in decoded), where)
        for index, (one, (text, reason)) in enumerate(zip(decoded, answers, strict=True)):
            group = first + one.group
            sample = self.samples[group]
            if wrong := wrong_name(version, group, sample):
                raise EngineError(f"{where}: {wrong}")
            self._refuse_other_prompt(group, digests[one.group], where)
            self.samples[group] += 1
            tokens, length = one.tokens_N.tolist(), one.prompt_length
            seen = RewardSample(line, tokens[:length], tokens[length:], text, reason, group, sample)
            reward = self._reward(line, index, len(decoded), seen, where)
            yield replace(
                one,
                reward=reward,
                group=group,
                sample=sample,
                policy_version=version,
                prompt_digest=digests[one.group],
            )

    def _first_group(self, line: dict[str, Any], prompts: int, where: str) -> int:
        """The group of the line's first prompt."""
        given = line.get("group")
        if self.named not in (None, given is not None):
            raise EngineError(f"{where}: either every line has a `group` or none")
        self.named = given is not None
        if given is None:
            self.prompts += prompts
            return self.prompts - prompts
        if prompts > 1 or isinstance(given, bool) or not isinstance(given, int):
            raise EngineError(f"{where}: `group` is a whole number, of a request with one prompt")
        return given

    def _refuse_other_prompt(self, group: int, digest: int, where: str) -> None:
        """Advantages are normalised over a group: its rollouts answer one prompt."""
        known, said_by = self.digests.setdefault(group, (digest, where))
        if known != digest:
            raise EngineError(
                f"{where}: group {group} has another prompt in {said_by}; each prompt has a group "
                "of its own"
            )

    def _reward(
        self, line: dict[str, Any], index: int, count: int, sample: RewardSample, where: str
    ) -> float:
        """The line's own: a number, or a list with one for each choice; else the function's."""
        given, function = line.get("reward"), self.recording.reward
        if given is None:
            if function is None:
                raise RewardError(f"{where}: no `reward`; --reward module:function says one")
            return score(function, sample, f"{where}, choice {index}")
        values = given if isinstance(given, list) else [given]
        if len(values) != count:
            raise RewardError(f"{where}: {len(values)} rewards for {count} samples")
        if wrong := wrong_reward(values[index]):
            raise RewardError(
                f"{where}, choice {index}: `reward` is {quoted(values[index])}; {wrong}"
            )
        return float(values[index])


def _or_not_said(value: float | None) -> str:
    return "not said" if value is None else f"{value:g}"


# What a recorded request and its response say beside tokens and routes.

# of one line: 16 samples of 32,768 tokens with 94 layers of top-8 as base64 are half of it
_MOST_BYTES = 1 << 30
_MOST = 2.0**31


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line that is not empty: what errors call it, and its object.

    Raises:
        EngineError: the file cannot be read, or a line is no `{"request": {}, "response": ...}`.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while text := file.readline(_MOST_BYTES + 1):
                number += 1
                if text.strip():
                    where = f"{path}, line {number}"
                    yield where, _line(text, where)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error.strerror or error})") from error


def _line(text: bytes, where: str) -> dict[str, Any]:
    try:
        line = read_json(text, where, _MOST_BYTES)
    except ValueError as error:
        raise EngineError(str(error)) from error
    if not isinstance(line, dict) or not {"request", "response"} <= line.keys():
        raise EngineError(f"{where}: an object with `request` and `response` is expected")
    if not isinstance(line["request"], dict):
        raise EngineError(f"{where}: `request` is the body that was sent")
    return line


def settings_of(request: Mapping[str, Any], where: str) -> SamplingSettings:
    """How a request asks for tokens; None for what it does not say.

    What a request leaves out the engine takes from the model's generation_config.json or from its
    own options, which nobody here knows.

    Raises:
        EngineError: naming `where` and the field: another type, a number that cannot be, or prompts
            of one request that are sampled in different ways.
    """
    top_k = _one(request, "top_k", where)
    if top_k is not None and (top_k != int(top_k) or top_k < -1):
        raise EngineError(f"{where}: top_k is a whole number from -1 on; got {quoted(top_k)}")
    with naming(where):
        max_tokens = bodies.most_tokens(request)
    return SamplingSettings(
        temperature=_one(request, "temperature", where),
        top_p=_one(request, "top_p", where, 1.0),
        top_k=None if top_k is None else max(int(top_k), 0),  # -1 and 0: nothing is cut off
        min_p=_one(request, "min_p", where, 1.0),
        max_tokens=max_tokens,
    )


def _one(request: Mapping[str, Any], name: str, where: str, most: float = _MOST) -> float | None:
    """A number of a request, at its top level or in `sampling_params`, which may be a list."""
    nested = request.get("sampling_params")
    holders = nested if isinstance(nested, list) else [nested]
    values = [one.get(name) if isinstance(one, Mapping) else None for one in holders]
    if request.get(name) is not None:
        values = [request[name]]
    if any(value is not values[0] and value != values[0] for value in values):
        raise EngineError(f"{where}: {name} differs between the prompts of one request")
    value = values[0] if values else None
    if value is None:
        return None
    least = -1.0 if name == "top_k" else 0.0
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise EngineError(
            f"{where}: {name} is a number from {least:g} to {most:g}; got {quoted(value)}"
        )
    return float(value)


def answers_of(response: Any, count: int, where: str) -> list[tuple[str, str]]:
    """Text and finish reason of each choice of a response that was decoded.

    Raises:
        EngineError: the engine gave a choice up half-way, or what it says is no text.
    """
    streamed = response.get("_raw_text") if isinstance(response, Mapping) else response
    if isinstance(streamed, str):
        with naming(where):
            response = joined_stream(streamed)
    answers = [answer_of(response, i, where) for i in range(count)]
    for index, answer in enumerate(answers):
        if not all(isinstance(one, str) for one in answer):
            raise EngineError(
                f"{where}, choice {index}: text and finish reason are {quoted(answer)}; expected "
                "two texts"
            )
    return answers


def digests_of(engine: str, request: Mapping[str, Any], where: str) -> list[int]:
    """The digest of each prompt of a request (`Rollout.prompt_digest`)."""
    fields = import_module(f"megatron_r3.engines.{engine}").PROMPT_FIELDS
    with naming(where):
        contents = bodies.prompt_contents(request, fields)
    return [prompt_digest(content) for content in contents]
