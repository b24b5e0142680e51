"""Convert an engine's recorded responses, JSON lines, into a new store.

Shape suffixes (docs/glossary.md): C.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_r3.collect.prompt_plan import Model
from megatron_r3.collect.prompts import prompt_digest
from megatron_r3.collect.request_fields import left_out, refuse_defaults, settings_of
from megatron_r3.collect.reward import (
    RewardError,
    RewardFunction,
    RewardSample,
    checked_reward,
    score,
)
from megatron_r3.collect.writing import new_store, writing
from megatron_r3.data.engines import decode_increments
from megatron_r3.data.engines.body import most_tokens, prompt_contents
from megatron_r3.data.engines.said import Said
from megatron_r3.data.engines.shape import EngineError
from megatron_r3.data.rollout import Rollout
from megatron_r3.data.store import write_shard
from megatron_r3.data.store.schema import SamplingSettings
from megatron_r3.data.untrusted import read_json
from megatron_r3.data.values import wrong_name
from megatron_r3.replay.words import quoted, said

# The most bytes of a line. Expert ids of one byte each, of 16 samples of 32,768 tokens, 94 layers
# and top-8, take half of these bytes in base64.
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Recording:
    """A file of recorded responses, with facts that are not in the file.

    Attributes:
        path: JSON lines `{"request": ..., "response": ..., "reward"?: ..., "group"?: ...}`.
        engine, engine_version: the engine that sampled, and its version.
        model: the model that the engine ran.
        policy_version: which policy sampled. None takes the version that each response reports, or
            0 where a response reports no whole number.
        reward: the function that rewards the lines without a `reward`. None refuses such lines.
    """

    path: Path
    engine: str
    engine_version: str
    model: Model
    policy_version: int | None = None
    reward: RewardFunction | None = None


def convert_responses(
    recording: Recording, out: Path, shard_size: int, skip_refused: bool = False
) -> tuple[int, list[str], list[str]]:
    """Write a new store that has each choice of each response as a rollout.

    A line's group is its `group`. If no line has that field, each prompt of each request is a group
    of its own. A group's samples are numbered in the order of the lines. If the lines of a group
    follow each other, the group is in one shard.

    Args:
        shard_size: rollouts of a shard, or a few more, so that groups stay whole.
        skip_refused: leave out lines with a response that cannot be decoded, with a request that is
            refused, with other sampling settings or another model than the first line, or with
            another policy version than `recording` says. False raises an error for such a line. A
            wrong group or reward always raises one.

    Returns:
        The number of rollouts in the store; the reason for each line that was left out; and notes
        for the user.

    Raises:
        EngineError: the file cannot be read; a line has no request and response, has a wrong group,
            or is refused and `skip_refused` is False; or there is nothing to store.
        RewardError: a line has no reward or a wrong one, or the reward function failed.
        StoreError: `out` exists already or cannot be written, or a name in the new store's header
            is longer than 200 characters or has control characters.
    """
    skipped: list[str] = []
    count = 0
    info = recording.model.store_info(recording.engine, recording.engine_version)
    info.check("the header of the new store")
    reader = _Reader(recording)

    def write(folder: Path, rollouts: list[Rollout]) -> int:
        with writing(out):
            write_shard(folder, replace(info, sampling=reader.sampling), rollouts)
        return len(rollouts)

    with new_store(out) as folder:
        batch: list[Rollout] = []
        for rollouts, refused in reader.lines():
            if refused and not skip_refused:
                raise EngineError(refused)
            skipped += [refused] if refused else []
            if len(batch) >= shard_size and rollouts and rollouts[0].group != batch[-1].group:
                count += write(folder, batch)
                batch = []
            batch += rollouts
        if not batch:
            raise EngineError(f"{recording.path}: no responses to store")
        count += write(folder, batch)
    return count, skipped, reader.notes()


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line that is not blank: its name in errors, and its JSON object.

    Raises:
        EngineError: the file cannot be read, or a line is not `{"request": {}, "response": ...}`.
    """
    try:
        with path.open("rb") as file:
            number = 0
            # One byte more than allowed, so that `read_json` refuses a line that is too long.
            while data := file.readline(_MOST_BYTES + 1):
                number += 1
                if data.strip():
                    where = f"{path}, line {number}"
                    yield where, _line(data, where)
    except OSError as error:
        raise EngineError(f"{path}: cannot be read ({error.strerror or error})") from error


def _line(data: bytes, where: str) -> dict[str, Any]:
    try:
        line = read_json(data, where, _MOST_BYTES)
    except ValueError as error:
        raise EngineError(str(error)) from error
    if not isinstance(line, dict) or not {"request", "response"} <= line.keys():
        raise EngineError(f"{where}: an object with `request` and `response` is expected")
    if not isinstance(line["request"], dict):
        raise EngineError(f"{where}: `request` must be the JSON object that was sent")
    return line


class _Reader:
    """Reads a recording line by line, and numbers the groups and the samples of each group.

    Attributes:
        sampling: the settings of the first line that could be decoded.
        left_out: the settings that at least one request left to the engine.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.sampling = SamplingSettings()
        self.defaults = recording.model.sampling_defaults
        self.left_out: set[str] = set()
        self._first_line = ""  # the line that `sampling` comes from; empty before that line
        self._first: dict[str, Any] = {}  # the settings and the model of that line
        self._samples: Counter[int] = Counter()  # how many each group has so far
        # for each group the digest of its prompt, its max_tokens, and the name of its first line
        self._prompt_of: dict[int, tuple[int, int | None, str]] = {}
        self._prompts = 0  # the number of the next group, if the lines have no `group`
        self._lines_name_groups: bool | None = None  # None before the first line

    def notes(self) -> list[str]:
        """Notes on settings that the store does not record; call it after the last line."""
        if not self.left_out:
            return []
        return [
            f"requests leave out {', '.join(sorted(self.left_out))}: {self.recording.engine} took "
            "its own values, or those of the model's generation_config.json; the store does not "
            "record them"
        ]

    def lines(self) -> Iterator[tuple[list[Rollout], str]]:
        """Yield for each line its rollouts and ""; for a refused line [] and the reason."""
        for where, line in read_lines(self.recording.path):
            yield self._decoded(line, where)

    def _decoded(self, line: dict[str, Any], where: str) -> tuple[list[Rollout], str]:
        response, request = line["response"], line["request"]
        try:
            # The turns of an agent may have different limits of tokens, and a limit changes no
            # token's probability. So limits are compared only within a group, by
            # `_refuse_other_prompt`.
            settings = replace(settings_of(request, where), max_tokens=None)
            refuse_defaults(self.recording.engine, request, self.defaults, where)
            engine, shape = self.recording.engine, self.recording.model.shape
            choices = decode_increments(engine, response, request, shape, where)
            decoded = [(choice.whole(), choice.said) for choice in choices]
            digests = [prompt_digest(one) for one in prompt_contents(engine, request)]
            if any(choice.kept is not None for choice in choices):
                settings = replace(settings, logprobs_of="processed")
            self._refuse_other_settings(settings, request.get("model"), where)
            self.left_out.update(left_out(engine, request))
            versions = [self._version(*both, i, where) for i, both in enumerate(decoded)]
        except EngineError as error:
            return [], str(error)
        # A decoder may raise these errors for a response that no engine sends.
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
            return [], f"{where}: the response cannot be read ({said(repr(error))})"
        return list(self._rollouts(line, decoded, digests, versions, where)), ""

    def _refuse_other_settings(self, settings: SamplingSettings, model: Any, where: str) -> None:
        """Refuse a line with other sampling settings or another model than the first line has.

        Servers name LoRA adapters as models, so another name may stand for other weights.
        """
        given = {**vars(settings), "model": model}
        if not self._first_line:
            self.sampling, self._first_line, self._first = settings, where, given
        for name, first in self._first.items():
            if given[name] != first:
                raise EngineError(
                    f"{where}: {name} is {_or_not_given(given[name])} here and "
                    f"{_or_not_given(first)} in {self._first_line}: a store has one model and one "
                    "value of each setting; convert such lines into a store of their own"
                )

    def _rollouts(
        self,
        line: dict[str, Any],
        decoded: list[tuple[Rollout, Said]],
        digests: list[int],
        versions: list[int],
        where: str,
    ) -> Iterator[Rollout]:
        # The decoder numbers the prompts of a request from 0 on; `first` is the group of prompt 0.
        first = self._first_group(line, 1 + max(choice.group for choice, _ in decoded), where)
        for index, (choice, says) in enumerate(decoded):
            group, digest = first + choice.group, digests[choice.group]
            version = versions[index]
            sample = self._samples[group]
            if wrong := wrong_name(version, group, sample):
                raise EngineError(f"{where}: {wrong}")
            self._refuse_other_prompt(group, digest, most_tokens(line["request"]), where)
            self._samples[group] += 1
            seen = RewardSample.of(choice, line, says, group, sample)
            reward = self._reward(line, index, len(decoded), seen, where)
            yield replace(
                choice,
                reward=reward,
                group=group,
                sample=sample,
                policy_version=version,
                prompt_digest=digest,
            )

    def _version(self, choice: Rollout, says: Said, index: int, where: str) -> int:
        """The policy version of one choice: that of its first span, else --policy-version, else
        what the response reports if that is a whole number, else 0.
        """
        given = self.recording.policy_version
        if choice.versions_C2 is not None:
            if given not in (None, choice.policy_version):
                raise EngineError(
                    f"{where}, choice {index}: the engine's versions "
                    f"{choice.versions_C2[:, 1].tolist()[:20]} sampled it, and --policy-version "
                    f"says {given}: leave --policy-version out to store the engine's versions"
                )
            return choice.policy_version
        if given is not None:
            return given
        whole = len(says.policies) == 1 and re.fullmatch("[0-9]{1,18}", says.policies[0])
        return int(says.policies[0]) if whole else 0

    def _first_group(self, line: dict[str, Any], prompts: int, where: str) -> int:
        """The group of the line's first prompt."""
        given = line.get("group")
        if self._lines_name_groups not in (None, given is not None):
            raise EngineError(
                f"{where}: some lines have a `group` and some have none: give one to all or to none"
            )
        self._lines_name_groups = given is not None
        if given is None:
            self._prompts += prompts
            return self._prompts - prompts
        if prompts > 1 or isinstance(given, bool) or not isinstance(given, int):
            raise EngineError(
                f"{where}: `group` must be a whole number, and the line's request must have only "
                "one prompt"
            )
        return given

    def _refuse_other_prompt(self, group: int, digest: int, most: int | None, where: str) -> None:
        """Refuse a rollout with another prompt or another limit of tokens than its group has.

        Rewards are normalised over a group, so all its responses must answer one prompt within one
        limit. Otherwise a response that was cut off at 8 tokens would be compared with one of 1000.
        """
        known, limit, first_line = self._prompt_of.setdefault(group, (digest, most, where))
        if known != digest:
            raise EngineError(
                f"{where}: group {group} has another prompt in {first_line}; give each prompt a "
                "group of its own"
            )
        if limit != most:
            raise EngineError(
                f"{where}: max_tokens is {_or_not_given(most)} here and {_or_not_given(limit)} in "
                f"{first_line}, of the same group {group}: give each limit a group of its own"
            )

    def _reward(
        self, line: dict[str, Any], index: int, count: int, sample: RewardSample, where: str
    ) -> float:
        """The reward of one choice: the line's, if the line has one, else the function's.

        A line's `reward` is a list with a number for each choice. A line with one choice may have
        a number in place of the list.
        """
        given, function = line.get("reward"), self.recording.reward
        if given is None:
            if function is None:
                raise RewardError(
                    f"{where}: the line has no `reward`: add one, or give --reward module:function"
                )
            return score(function, sample, f"{where}, choice {index}")
        values = given if isinstance(given, list) else [given]
        if len(values) != count:
            raise RewardError(
                f"{where}: `reward` has {len(values)} numbers for {count} "
                "choices: give one for each"
            )
        return checked_reward(values[index], f"{where}, choice {index}: `reward` is")


def _or_not_given(value: Any) -> str:
    if value is None:
        return "not given"
    return f"{value:g}" if isinstance(value, (int, float)) else quoted(value)
