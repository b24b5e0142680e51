"""Samples: what a rollout engine made of one prompt, and the file that carries many of them.

Shape suffixes: N tokens, G response tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_r3.engines.shape import EngineError
from megatron_r3.routes import Routes, RoutesError, id_dtype

__all__ = ["EngineError", "Sample", "Source", "read_samples", "read_source", "write_samples"]


@dataclass(frozen=True)
class Sample:
    """One sampled sequence.

    Attributes:
        tokens_N: int32, prompt and response.
        prompt_length: how many of them are the prompt.
        logprobs_G: float32, the engine's log-probability of each response token.
        routes: `[L, N - 1, K]`: the last token was never forwarded.
        group: the samples of one prompt share it.
    """

    tokens_N: np.ndarray
    prompt_length: int
    logprobs_G: np.ndarray
    routes: Routes
    group: int = 0

    @property
    def response_length(self) -> int:
        """G, the sampled tokens."""
        return len(self.tokens_N) - self.prompt_length

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
        finite_G = np.isfinite(self.logprobs_G)
        if not finite_G.all():
            token = self.prompt_length + int(np.argmin(finite_G))
            raise EngineError(f"{where}: the log-prob of token {token} is not finite")
        if self.routes.num_rows != num_tokens - 1:
            raise EngineError(
                f"{where}: {self.routes.num_rows} rows of routes for {num_tokens} tokens; "
                f"expected {num_tokens - 1}"
            )


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
    "prompt_lengths",
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
        prompt_lengths=np.array([s.prompt_length for s in samples], np.int64),
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
    lengths, prompts = arrays["lengths"], arrays["prompt_lengths"]
    num_experts = int(arrays["num_experts"])
    expected = {
        "tokens": int(lengths.sum()),
        "logprobs": int((lengths - prompts).sum()),
        "prompt_lengths": len(lengths),
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
    token = response = row = 0
    samples = []
    for index, length in enumerate(arrays["lengths"].tolist()):
        prompt = int(arrays["prompt_lengths"][index])
        where = f"{path}: sample {index}"
        ids_LTK = arrays["routes"][:, row : row + length - 1]
        try:
            routes = Routes.from_array(ids_LTK, num_experts, where=where)
        except RoutesError as error:
            raise EngineError(str(error)) from error
        sample = Sample(
            arrays["tokens"][token : token + length],
            prompt,
            arrays["logprobs"][response : response + length - prompt],
            routes,
            int(arrays["group"][index]),
        )
        sample.check(where)
        samples.append(sample)
        token, response, row = token + length, response + length - prompt, row + length - 1
    return samples
