"""From recorded responses of an engine, JSON lines, to a store."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_r3.engines.sample import Sample
from megatron_r3.engines.shape import EngineError
from megatron_r3.rollouts.dialects import answer_of, decoder
from megatron_r3.rollouts.fresh import new_store
from megatron_r3.rollouts.model import Model
from megatron_r3.rollouts.reward import (
    RewardError,
    RewardFunction,
    RewardSample,
    checked_reward,
    score,
)
from megatron_r3.rollouts.rollout import to_rollout
from megatron_r3.store import Rollout, StoreInfo, write_shard

__all__ = ["Recording", "convert_responses"]


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
        skip_refused: leave responses out that cannot be decoded, instead of refusing the file.

    Returns:
        How many rollouts it has, and why which lines were left out.

    Raises:
        EngineError: a line that is no response, or one that cannot be decoded.
        RewardError: a line without a reward, or a reward function that failed.
        StoreError: `out` is there already.
    """
    shape = recording.model.shape
    skipped: list[str] = []
    count = 0
    info = StoreInfo(
        num_experts=shape.num_experts,
        topk=shape.topk,
        moe_layers=shape.moe_layers,
        engine=recording.engine,
        engine_version=recording.engine_version,
        model=recording.model.name,
        router_fingerprint=recording.model.router_fingerprint,
    )
    with new_store(out) as folder:
        batch: list[Rollout] = []
        for rollouts, refused in _Reader(recording).lines():
            if refused and not skip_refused:
                raise EngineError(refused)
            skipped += [refused] if refused else []
            if len(batch) >= shard_size and rollouts and rollouts[0].group != batch[-1].group:
                write_shard(folder, info, batch)
                count += len(batch)
                batch = []
            batch += rollouts
        if batch:
            write_shard(folder, info, batch)
        count += len(batch)
        if not count:
            raise EngineError(f"{recording.path}: no responses to store")
    return count, skipped


class _Reader:
    """Reads a recording line by line; counts the prompts, and the samples of each group."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.decode = recording, decoder(recording.engine)
        self.samples: Counter[int] = Counter()
        self.prompts = 0
        self.named: bool | None = None

    def lines(self) -> Iterator[tuple[list[Rollout], str]]:
        """The rollouts of each line, or why it has none."""
        path = self.recording.path
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file):
                where = f"{path}, line {number + 1}"
                if text.strip():
                    yield self._decoded(_line(text, where), where)

    def _decoded(self, line: dict[str, Any], where: str) -> tuple[list[Rollout], str]:
        shape = self.recording.model.shape
        try:
            decoded = self.decode(line["response"], line["request"], shape, where)
            answers = [answer_of(line["response"], i, where) for i in range(len(decoded))]
        except EngineError as error:
            return [], str(error)
        except (AttributeError, LookupError, TypeError) as error:
            return [], f"{where}: the response cannot be read ({error!r})"
        return list(self._rollouts(line, decoded, answers, where)), ""

    def _rollouts(
        self,
        line: dict[str, Any],
        decoded: list[Sample],
        answers: list[tuple[str, str]],
        where: str,
    ) -> Iterator[Rollout]:
        first = self._first_group(line, 1 + max(one.group for one in decoded), where)
        for index, (one, (text, reason)) in enumerate(zip(decoded, answers, strict=True)):
            group = first + one.group
            sample = self.samples[group]
            self.samples[group] += 1
            tokens, length = one.tokens_N.tolist(), one.prompt_length
            seen = RewardSample(line, tokens[:length], tokens[length:], text, reason, group, sample)
            reward = self._reward(line, index, len(decoded), seen, where)
            yield to_rollout(one, reward, group, sample, self.recording.policy_version)

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
        return checked_reward(values[index], f"{where}, choice {index}: `reward` is")


def _line(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise EngineError(f"{where}: not JSON ({error})") from error
    if not isinstance(line, dict) or not {"request", "response"} <= line.keys():
        raise EngineError(f"{where}: an object with `request` and `response` is expected")
    if not isinstance(line["request"], dict):
        raise EngineError(f"{where}: `request` is the body that was sent")
    return line
