"""Samples: what a rollout engine made of one prompt, and the file that carries many of them.

Shape suffixes: N tokens, G sampled tokens, U turns, L MoE layers, K top-k.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_r3.engines.shape import EngineError
from megatron_r3.routes import Routes, RoutesError, id_dtype

__all__ = ["EngineError", "Sample", "Source", "read_samples", "read_source", "write_samples"]


@dataclass(frozen=True)
class Sample:
    """One sequence, sampled in one turn or in several.

    Attributes:
        tokens_N: int32: the prompt, then sampled tokens and, between turns, given ones.
        prompt_length: how many tokens come before the first sampled one.
        logprobs_G: float32, the engine's log-probability of each sampled token, in order.
        routes: `[L, N - 1, K]`: the last token was never forwarded.
        group: the samples of one prompt share it.
        turns: int32 `[U, 2]`: start and end of each run of tokens that one turn sampled. Left out:
            one turn, all that follows the prompt.
    """

    tokens_N: np.ndarray
    prompt_length: int
    logprobs_G: np.ndarray
    routes: Routes
    group: int = 0
    turns: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))

    def __post_init__(self) -> None:
        """Make the one turn that was left out."""
        turns = np.asarray(self.turns, np.int32).reshape(-1, 2)
        if not len(turns):
            turns = np.array([[self.prompt_length, len(self.tokens_N)]], np.int32)
        object.__setattr__(self, "turns", turns)

    @property
    def response_length(self) -> int:
        """G, the sampled tokens of all turns."""
        return int((self.turns[:, 1] - self.turns[:, 0]).sum())

    @property
    def response_N(self) -> np.ndarray:
        """bool, True on sampled tokens."""
        edges_N1 = np.zeros(len(self.tokens_N) + 1, np.int32)
        np.add.at(edges_N1, self.turns[:, 0], 1)
        np.add.at(edges_N1, self.turns[:, 1], -1)
        return edges_N1.cumsum()[:-1] > 0

    @property
    def logprobs_N(self) -> np.ndarray:
        """float32, 0 on tokens that were not sampled."""
        logprobs_N = np.zeros(len(self.tokens_N), np.float32)
        logprobs_N[self.response_N] = self.logprobs_G
        return logprobs_N

    def check(self, where: str) -> None:
        """Refuse parts that do not belong together.

        Raises:
            EngineError: naming `where` and what is wrong.
        """
        num_tokens = len(self.tokens_N)
        if not 1 <= self.prompt_length < num_tokens:
            raise EngineError(
                f"{where}: {self.prompt_length} prompt tokens of {num_tokens}; a sample has a "
                "prompt and a response"
            )
        if len(self.logprobs_G) != self.response_length:
            raise EngineError(
                f"{where}: {len(self.logprobs_G)} log-probs for {self.response_length} "
                "response tokens"
            )
        if self.routes.num_rows != num_tokens - 1:
            raise EngineError(
                f"{where}: {self.routes.num_rows} rows of routes for {num_tokens} tokens; "
                f"expected {num_tokens - 1}"
            )
        edges = self.turns.ravel()
        if (
            edges[0] != self.prompt_length
            or edges[-1] > num_tokens
            or (self.turns[:, 0] >= self.turns[:, 1]).any()
            or (edges[1:] < edges[:-1]).any()
        ):
            raise EngineError(
                f"{where}: turns {self.turns[:20].tolist()} of {num_tokens} tokens, "
                f"{self.prompt_length} of them the prompt"
            )
        finite_G = np.isfinite(self.logprobs_G)
        if not finite_G.all():
            token = np.flatnonzero(self.response_N)[int(np.argmin(finite_G))]
            raise EngineError(f"{where}: the log-prob of token {token} is not finite")


@dataclass(frozen=True)
class Source:
    """Where the samples of a file come from.

    Attributes:
        engine, version: what sampled them.
        moe_layers: for each trace layer the 0-based hidden layer that it belongs to.
        num_experts: E.
        topk: K.
    """

    engine: str
    version: str
    moe_layers: tuple[int, ...]
    num_experts: int
    topk: int


_ARRAYS = (
    "tokens",
    "lengths",
    "turns",
    "num_turns",
    "logprobs",
    "routes",
    "group",
    "num_experts",
    "moe_layers",
    "engine",
)


def write_samples(
    path: str | Path,
    samples: Sequence[Sample],
    moe_layers: Sequence[int],
    engine: str,
    version: str,
) -> None:
    """Write one uncompressed `.npz`: flat tokens and log-probs, routes `[L, sum(N - 1), K]`.

    Raises:
        EngineError: no samples, or samples that do not belong together.
    """
    if not samples:
        raise EngineError(f"{path}: there are no samples to write")
    first = samples[0].routes
    for index, sample in enumerate(samples):
        sample.check(f"sample {index}")
        routes = sample.routes
        if (routes.num_experts, routes.num_layers, routes.topk) != (
            first.num_experts,
            len(moe_layers),
            first.topk,
        ):
            raise EngineError(f"sample {index}: layers, experts or top-k differ from the others'")
        if not routes.recorded_T.all():
            raise EngineError(f"sample {index}: a row of its routes is missing")
    np.savez(
        path,
        tokens=np.concatenate([s.tokens_N for s in samples]).astype(np.int32),
        lengths=np.array([len(s.tokens_N) for s in samples], np.int64),
        turns=np.concatenate([s.turns for s in samples]),
        num_turns=np.array([len(s.turns) for s in samples], np.int64),
        logprobs=np.concatenate([s.logprobs_G for s in samples]).astype(np.float32),
        routes=np.concatenate([s.routes.ids_LTK for s in samples], axis=1),
        group=np.array([s.group for s in samples], np.int64),
        num_experts=np.int64(first.num_experts),
        moe_layers=np.array(moe_layers, np.int64),
        engine=np.array([engine, version]),
    )


def _load(path: str | Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in _ARRAYS if name not in archive.files]
            if missing:
                raise EngineError(f"{path}: not a file of samples: {missing} missing")
            return {name: archive[name] for name in _ARRAYS}
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{path}: not a readable file of samples ({error})") from error


def read_source(path: str | Path) -> Source:
    """What sampled the samples of a file, and from which layers."""
    arrays = _load(path)
    engine, version = (str(text) for text in arrays["engine"])
    return Source(
        engine,
        version,
        tuple(int(i) for i in arrays["moe_layers"]),
        int(arrays["num_experts"]),
        int(arrays["routes"].shape[-1]),
    )


def read_samples(path: str | Path) -> list[Sample]:
    """The samples of a file that `write_samples` wrote, each checked again.

    Raises:
        EngineError: naming the file and the sample.
    """
    arrays = _load(path)
    lengths, turns, num_turns = arrays["lengths"], arrays["turns"], arrays["num_turns"]
    num_experts = int(arrays["num_experts"])
    if turns.ndim != 2 or turns.shape[1] != 2 or turns.dtype != np.int32 or (num_turns < 1).any():
        raise EngineError(f"{path}: turns are int32 [U, 2], at least one of each sample")
    expected = {
        "tokens": int(lengths.sum()),
        "logprobs": int((turns[:, 1] - turns[:, 0]).sum()),
        "turns": int(num_turns.sum()),
        "num_turns": len(lengths),
        "group": len(lengths),
    }
    for name, count in expected.items():
        if len(arrays[name]) != count:
            raise EngineError(f"{path}: {len(arrays[name])} {name}; expected {count}")
    rows = int((lengths - 1).sum())
    if arrays["routes"].shape[:2] != (len(arrays["moe_layers"]), rows):
        raise EngineError(f"{path}: routes {arrays['routes'].shape} for {rows} rows")
    if arrays["routes"].dtype != id_dtype(num_experts):
        raise EngineError(f"{path}: {arrays['routes'].dtype} routes of {num_experts} experts")
    return _split(arrays, num_experts, str(path))


def _split(arrays: dict[str, np.ndarray], num_experts: int, path: str) -> list[Sample]:
    token = sampled = row = turn = 0
    samples = []
    counts = zip(arrays["lengths"].tolist(), arrays["num_turns"].tolist(), strict=True)
    for index, (length, num_turns) in enumerate(counts):
        where = f"{path}: sample {index}"
        turns = arrays["turns"][turn : turn + num_turns]
        num_sampled = int((turns[:, 1] - turns[:, 0]).sum())
        ids_LTK = arrays["routes"][:, row : row + length - 1]
        try:
            routes = Routes.from_array(ids_LTK, num_experts, where=where)
        except RoutesError as error:
            raise EngineError(str(error)) from error
        sample = Sample(
            arrays["tokens"][token : token + length],
            int(turns[0, 0]),
            arrays["logprobs"][sampled : sampled + num_sampled],
            routes,
            int(arrays["group"][index]),
            turns,
        )
        sample.check(where)
        samples.append(sample)
        token, row = token + length, row + length - 1
        sampled, turn = sampled + num_sampled, turn + num_turns
    return samples
