"""Samples: what a rollout engine made of one prompt, and the file that carries many of them.

Shape suffixes: N tokens, G sampled tokens, U turns, L MoE layers, K top-k.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_r3.engines.body import npy_array
from megatron_r3.engines.shape import EngineError
from megatron_r3.routes import Routes, RoutesError, id_dtype
from megatron_r3.untrusted import quoted, said
from megatron_r3.values import wrong_count, wrong_logprob, wrong_text, wrong_token


def _lengths(turns: np.ndarray) -> np.ndarray:
    """Tokens of each turn, int64: the difference of two int32 may not fit one."""
    return np.asarray(np.diff(turns.astype(np.int64), axis=1)[:, 0])


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
        return int(_lengths(self.turns).sum())

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
        """Refuse parts that do not belong together, and values that no rollout has.

        Raises:
            EngineError: naming `where` and what is wrong, and the token where there is one.
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
        wrong = wrong_logprob(self.logprobs_G)
        if wrong is not None:
            token = np.flatnonzero(self.response_N)[wrong[0]]
            raise EngineError(f"{where}: the log-prob of token {token} {wrong[1]}")
        wrong = wrong_token(self.tokens_N)
        if wrong is not None:
            raise EngineError(f"{where}: token {wrong[0]} {wrong[1]}")


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


# of each array of a file: its dtypes, and how many axes it has
_ARRAYS: dict[str, tuple[tuple[str, ...], int]] = {
    "tokens": (("int32",), 1),
    "lengths": (("int64",), 1),
    "turns": (("int32",), 2),
    "num_turns": (("int64",), 1),
    "logprobs": (("float32",), 1),
    "routes": (("uint8", "uint16"), 3),
    "group": (("int64",), 1),
    "num_experts": (("int64",), 0),
    "moe_layers": (("int64",), 1),
    "engine": (("str",), 1),
}


def write_samples(
    path: str | Path,
    samples: Sequence[Sample],
    moe_layers: Sequence[int],
    engine: str,
    version: str,
) -> None:
    """Write one uncompressed `.npz`, whole or not at all.

    It has flat tokens and log-probs, and routes `[L, sum(N - 1), K]`.

    Raises:
        EngineError: no samples, samples that do not belong together, or a file that cannot be
            written.
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
    whole = Path(path)
    part = whole.with_name(f".{whole.name}-{os.getpid()}.npz")
    try:
        np.savez(
            part,
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
        os.replace(part, whole)
    except OSError as error:
        raise EngineError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with suppress(OSError):  # what was not written is not there
            part.unlink()


def _load(path: str | Path) -> dict[str, np.ndarray]:
    """The arrays of a file, each of its dtype and axes; in memory they are as large as the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            missing = [name for name in _ARRAYS if f"{name}.npy" not in names]
            if missing:
                raise EngineError(f"{path}: not a file of samples: {missing} missing")
            return {name: _array(archive, name, path) for name in _ARRAYS}
    except EngineError:
        raise
    except Exception as error:  # zipfile's are of many kinds, struct.error and RuntimeError too
        raise EngineError(f"{path}: not a readable file of samples ({said(str(error))})") from error


def _array(archive: zipfile.ZipFile, name: str, path: str | Path) -> np.ndarray:
    """One array, not unpickled: no more memory is asked for than the file has bytes."""
    member = archive.getinfo(f"{name}.npy")
    size = os.stat(path).st_size
    if member.compress_type != zipfile.ZIP_STORED or member.file_size > size:
        raise EngineError(f"{path}: {name} is compressed; samples are stored as they are")
    data = bytearray(archive.read(member))  # of a bytearray an array can be written to
    array = npy_array(data, f"{path}: not a readable file of samples: {name}", "iufU")
    dtypes, axes = _ARRAYS[name]
    kind = "str" if array.dtype.kind == "U" and array.dtype.isnative else str(array.dtype)
    if kind not in dtypes or array.ndim != axes:
        raise EngineError(
            f"{path}: {name} are {' or '.join(dtypes)} of {axes} axes; got {kind} {array.shape}"
        )
    return array


def read_source(path: str | Path) -> Source:
    """What sampled the samples of a file, and from which layers.

    Raises:
        EngineError: naming the file and the array.
    """
    return _source(_load(path), path)


def _source(arrays: dict[str, np.ndarray], path: str | Path) -> Source:
    if (arrays["engine"].view(np.uint32) > sys.maxunicode).any():
        raise EngineError(f"{path}: engine: not a text")
    texts = [str(text) for text in arrays["engine"]]
    if len(texts) != 2:
        raise EngineError(f"{path}: engine has {len(texts)} texts; expected name and version")
    for name, text in zip(("engine", "version"), texts, strict=True):
        if wrong := wrong_text(text):
            raise EngineError(f"{path}: {name} is {wrong}")
    try:
        dtype = id_dtype(int(arrays["num_experts"]))
    except RoutesError as error:
        raise EngineError(f"{path}: {error}") from error
    source = Source(
        texts[0],
        texts[1],
        tuple(arrays["moe_layers"].tolist()),
        int(arrays["num_experts"]),
        arrays["routes"].shape[-1],
    )
    if arrays["routes"].dtype != dtype:
        raise EngineError(
            f"{path}: {arrays['routes'].dtype} routes of {source.num_experts} experts"
        )
    layers = source.moe_layers
    if layers != tuple(sorted(set(layers))) or not layers or layers[0] < 0:
        raise EngineError(f"{path}: moe_layers {quoted(list(layers))} are not ascending from 0 on")
    return source


def read_samples(path: str | Path) -> list[Sample]:
    """The samples of a file that `write_samples` wrote, each checked again.

    Raises:
        EngineError: naming the file, and the sample where there is one.
    """
    arrays = _load(path)
    source = _source(arrays, path)
    turns, num_samples = arrays["turns"], len(arrays["lengths"])
    if not num_samples or turns.shape[1] != 2:
        raise EngineError(f"{path}: turns are int32 [U, 2], at least one of each sample")
    for name in ("num_turns", "group"):
        if len(arrays[name]) != num_samples:
            raise EngineError(f"{path}: {len(arrays[name])} {name}; expected {num_samples}")
    counts = (
        ("lengths", arrays["lengths"], 2, "tokens", "sample"),
        ("num_turns", arrays["num_turns"], 1, "turns", "sample"),
        ("turns", _lengths(turns), 1, "logprobs", "turn"),
    )
    for name, counts_M, least, counted, of in counts:
        if wrong := wrong_count(counts_M, least, len(arrays[counted])):
            wrong = wrong.replace("rollout", of)
            raise EngineError(f"{path}: {name} count {len(arrays[counted])} {counted}: {wrong}")
    rows = len(arrays["tokens"]) - num_samples
    if arrays["routes"].shape[:2] != (len(source.moe_layers), rows):
        raise EngineError(f"{path}: routes {arrays['routes'].shape} for {rows} rows")
    return _split(arrays, source.num_experts, str(path))


def _split(arrays: dict[str, np.ndarray], num_experts: int, path: str) -> list[Sample]:
    token = sampled = row = turn = 0
    samples = []
    counts = zip(arrays["lengths"].tolist(), arrays["num_turns"].tolist(), strict=True)
    for index, (length, num_turns) in enumerate(counts):
        where = f"{path}: sample {index}"
        turns = arrays["turns"][turn : turn + num_turns]
        num_sampled = int(_lengths(turns).sum())
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


# One sample out of the responses of one conversation.
#
# A response answers a prompt that holds all that was said before. Asked with a start, it
# returns rows
# from that token on only: an increment. The last token of a turn is forwarded in the next turn's
# prefill, so its row arrives there: ask with a start of the previous length - 1, not the length.
#
# Shape suffixes: N tokens, P prompt tokens, G sampled tokens, U turns, L MoE layers, T rows, K
# top-k.


@dataclass(frozen=True)
class Increment:
    """What one response tells of a conversation.

    Attributes:
        tokens_N: int32, all tokens known by then: the response's prompt and what was sampled.
        prompt_length: P, how many of them are its prompt.
        logprobs_G: float32, of the tokens that this response sampled.
        routes: `[L, N - 1 - start, K]`, checked.
        start: the token of the first row.
        group: the samples of one prompt share it.
        where: what errors call the response.
    """

    tokens_N: np.ndarray
    prompt_length: int
    logprobs_G: np.ndarray
    routes: Routes
    start: int = 0
    group: int = 0
    where: str = "response"

    def check(self) -> None:
        """Refuse parts that do not belong together, and values that no rollout has.

        Raises:
            EngineError: naming `where`, and the token where there is one.
        """
        num_tokens = len(self.tokens_N)
        if not 0 <= self.start <= self.prompt_length:
            raise EngineError(
                f"{self.where}: routes start at token {self.start}; from 0 to the prompt's "
                f"{self.prompt_length} tokens"
            )
        if self.routes.num_rows != num_tokens - 1 - self.start:
            raise EngineError(
                f"{self.where}: {self.routes.num_rows} rows of routes for {num_tokens} tokens "
                f"from token {self.start} on; expected {num_tokens - 1 - self.start}"
            )
        if self.prompt_length < 1 or num_tokens - self.prompt_length != len(self.logprobs_G):
            raise EngineError(
                f"{self.where}: {len(self.logprobs_G)} log-probs for "
                f"{num_tokens - self.prompt_length} response tokens"
            )
        wrong = wrong_logprob(self.logprobs_G)
        if wrong is not None:
            token = self.prompt_length + wrong[0]
            raise EngineError(f"{self.where}: the log-prob of token {token} {wrong[1]}")
        wrong = wrong_token(self.tokens_N)
        if wrong is not None:
            raise EngineError(f"{self.where}: token {wrong[0]} {wrong[1]}")

    def whole(self) -> Sample:
        """This response alone as a sample.

        Raises:
            EngineError: its routes start late, or a row is missing.
        """
        if self.start:
            raise EngineError(
                f"{self.where}: routes start at token {self.start}: stitch the conversation's "
                "increments, or ask with start 0"
            )
        return stitch([self], self.where)


def stitch(increments: Sequence[Increment], where: str, *, holes: str = "refuse") -> Sample:
    """One sample of all turns, with the rows of all its tokens but the last.

    The longest response says the tokens; every other one must be a beginning of it, and a row that
    arrives again (a retry, a prefix sent twice) must be the same set of experts.

    Args:
        increments: of one conversation, in any order.
        where: what errors call the conversation.
        holes: of rows that no response brought: "refuse", or "missing" to leave them not recorded.

    Raises:
        EngineError: naming token and layer of what does not agree or is not there.
    """
    if holes not in ("refuse", "missing"):
        raise EngineError(f"{where}: holes are refuse or missing; got {holes!r}")
    if not increments:
        raise EngineError(f"{where}: there are no responses to stitch")
    ordered = sorted(increments, key=lambda one: len(one.tokens_N))  # stable: a retry comes second
    for one in ordered:
        one.check()
    tokens_N = ordered[-1].tokens_N
    for one in ordered[:-1]:
        _refuse_other_tokens(one, tokens_N, ordered[-1].where)
    routes = _joined_rows(ordered, len(tokens_N) - 1, where)
    if holes == "refuse" and not routes.recorded_T.all():
        token = int(np.argmin(routes.recorded_T))
        raise EngineError(
            f"{where}: no response brought the row of token {token} "
            f"({int((~routes.recorded_T).sum())} of {routes.num_rows} rows are missing); ask the "
            "next turn with a start of the previous length - 1"
        )
    turns, logprobs_G = _turns(ordered, len(tokens_N))
    sample = Sample(tokens_N, int(turns[0, 0]), logprobs_G, routes, ordered[0].group, turns)
    sample.check(where)
    return sample


def _refuse_other_tokens(one: Increment, tokens_N: np.ndarray, other: str) -> None:
    differs = one.tokens_N != tokens_N[: len(one.tokens_N)]
    if differs.any():
        token = int(np.argmax(differs))
        raise EngineError(
            f"{one.where}: token {token} is {one.tokens_N[token]}, and {tokens_N[token]} in "
            f"{other}: not one conversation, or its text was tokenized again"
        )


def _joined_rows(ordered: Sequence[Increment], num_rows: int, where: str) -> Routes:
    first = ordered[0].routes
    if len(ordered) == 1 and first.num_rows == num_rows:
        return first
    ids_LTK = np.zeros((first.num_layers, num_rows, first.topk), first.ids_LTK.dtype)
    recorded_T = np.zeros(num_rows, bool)
    for one in ordered:
        routes = one.routes
        if (routes.num_experts, routes.num_layers, routes.topk) != (
            first.num_experts,
            first.num_layers,
            first.topk,
        ):
            raise EngineError(f"{one.where}: layers, experts or top-k differ in one conversation")
        rows = slice(one.start, one.start + routes.num_rows)
        again_T = recorded_T[rows] & routes.recorded_T
        _refuse_other_rows(one, ids_LTK[:, rows], again_T)
        new_T = routes.recorded_T & ~again_T
        ids_LTK[:, rows][:, new_T] = routes.ids_LTK[:, new_T]
        recorded_T[rows] |= new_T
    return Routes.from_array(ids_LTK, first.num_experts, recorded_T, where)


def _refuse_other_rows(one: Increment, known_LTK: np.ndarray, again_T: np.ndarray) -> None:
    """The order inside a row carries no meaning, so it may differ."""
    if not again_T.any():
        return
    before, now = (np.sort(ids[:, again_T], -1) for ids in (known_LTK, one.routes.ids_LTK))
    differs_LT = (before != now).any(-1)
    if differs_LT.any():
        layer, row = (int(i) for i in np.argwhere(differs_LT)[0])
        token = one.start + int(np.flatnonzero(again_T)[row])
        raise EngineError(
            f"{one.where}: the row of token {token} arrived before and differs at MoE layer "
            f"{layer}: {before[layer, row].tolist()}, now {now[layer, row].tolist()} "
            f"({int(differs_LT.sum())} such rows)"
        )


def _turns(ordered: Sequence[Increment], num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Each run of tokens that one response sampled first, and the log-probs of them all."""
    turn_N = np.full(num_tokens, -1, np.int32)
    logprobs_N = np.zeros(num_tokens, np.float32)
    starts: list[int] = []
    for one in ordered:
        span = slice(one.prompt_length, len(one.tokens_N))
        new = turn_N[span] < 0
        if one.prompt_length not in starts:  # else the same turn again, perhaps longer
            starts.append(one.prompt_length)
        turn_N[span][new] = starts.index(one.prompt_length)
        logprobs_N[span][new] = one.logprobs_G[new]
    edges = np.flatnonzero(np.diff(turn_N, prepend=-1, append=-1))
    spans = np.stack([edges[:-1], edges[1:]], 1)
    turns = spans[turn_N[spans[:, 0]] >= 0].astype(np.int32)
    return turns, logprobs_N[turn_N >= 0]
