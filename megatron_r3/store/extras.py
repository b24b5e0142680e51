"""What only some rollouts of a shard have: kept sets, version spans, an advantage.

Version spans and advantages are a few numbers of each rollout and are in memory. Kept sets stay in
the file; those of one rollout are read at a time, and compared with the checksums of that rollout.

Shape suffixes (docs/glossary.md): C, M, N, V.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.kept import KeptSets
from megatron_r3.rollout import wrong_versions
from megatron_r3.store.files import HeldFile
from megatron_r3.store.header import OPTIONAL, Header
from megatron_r3.store.schema import StoreError
from megatron_r3.values import wrong_count, wrong_reward

# The optional tensors that stay in the file.
IN_FILE = ("kept_sizes", "kept_ids")


def optional_in_memory(header: Header) -> list[str]:
    """The optional tensors of a shard that are read when it is opened."""
    names = [name for together in OPTIONAL.values() for name in together]
    return [name for name in names if name in header.tensors and name not in IN_FILE]


class Extras:
    """The optional tensors of one shard, rollout by rollout.

    Args:
        file, header: of the shard.
        in_memory: the tensors that were read and compared with their checksums.
        token_start_M: `[M + 1]`, where each rollout's tokens begin.

    Raises:
        StoreError: counts or advantages that cannot be.
    """

    def __init__(
        self,
        file: HeldFile,
        header: Header,
        in_memory: Mapping[str, np.ndarray],
        token_start_M: np.ndarray,
    ) -> None:
        self._file, self._header, self._memory = file, header, in_memory
        self._token_start_M = token_start_M
        self._kept_start_M = self._starts("num_kept", "kept_ids", 1)
        self._span_start_M = self._starts("num_versions", "versions", 2)
        for rollout, value in enumerate(in_memory.get("advantage", np.zeros(0)).tolist()):
            if not np.isnan(value) and wrong_reward(value):
                raise StoreError(
                    f"{file.path}: rollout {rollout}: advantage {value}: must be finite, or NaN "
                    "for a rollout that has none"
                )

    def _starts(self, count: str, name: str, width: int) -> np.ndarray:
        """Where each rollout begins in the tensor `name`; all 0 in a shard that lacks it."""
        counts_M = self._memory.get(count)
        if counts_M is None:
            return np.zeros_like(self._token_start_M)
        if wrong := wrong_count(counts_M, 0, self._header.entries[name].shape[0] // width):
            raise StoreError(f"{self._file.path}: {count}: {wrong}")
        return np.concatenate([[0], np.cumsum(counts_M)])

    @property
    def num_kept_M(self) -> np.ndarray:
        """How many kept ids each rollout has; 0 if it has no kept sets."""
        return np.diff(self._kept_start_M)

    def kept(self, rollout: int) -> KeptSets | None:
        """The kept sets of a rollout's tokens; None if it has none.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        begin, end = self._kept_start_M[rollout : rollout + 2].tolist()
        if begin == end:
            return None
        first, last = self._token_start_M[rollout : rollout + 2].tolist()
        parts = []
        for name, start, stop in (("kept_sizes", first, last), ("kept_ids", begin, end)):
            part: np.ndarray = np.empty(stop - start, np.int32)
            self._file.read(part, self._header.entries[name].begin + start * part.itemsize)
            parts.append(part)
        self._file.check_unchanged()
        sums = [zlib_ng.crc32(part.data) for part in parts]
        if sums != self._memory["kept_crc32"][rollout].tolist():
            raise self._file.damaged(f"rollout {rollout}: checksum of the kept sets")
        return KeptSets(*parts)

    def versions_C2(self, rollout: int) -> np.ndarray | None:
        """First token and policy version of each span, int64; None if one policy sampled all."""
        begin, end = self._span_start_M[rollout : rollout + 2].tolist()
        if begin == end:
            return None
        return self._memory["versions"][2 * begin : 2 * end].reshape(-1, 2).copy()

    @cached_property
    def newest_version_M(self) -> np.ndarray:
        """The newest policy version of each rollout, int64 `[M]`: that of its last span.

        The oldest one is the rollout's `policy_version`. Where one policy sampled all of a rollout,
        the two are the same.
        """
        newest_M = self._memory["policy_version"].copy()
        has_M = np.diff(self._span_start_M) > 0
        if has_M.any():
            # versions of all spans one behind the other: a rollout's last one is before its end
            newest_M[has_M] = self._memory["versions"][1::2][self._span_start_M[1:][has_M] - 1]
        return newest_M

    def advantages_M(self) -> np.ndarray:
        """The advantage of each rollout, float32 `[M]`.

        Raises:
            StoreError: a rollout has none; the message names the file and the rollout.
        """
        none = np.full(len(self._token_start_M) - 1, np.nan, np.float32)
        advantage_M = self._memory.get("advantage", none)
        for rollout in np.flatnonzero(np.isnan(advantage_M))[:1]:
            raise StoreError(
                f"{self._file.path}: rollout {rollout} has no advantage: give every rollout of the "
                "store one, or work advantages out of the rewards"
            )
        return advantage_M

    def advantage(self, rollout: int) -> float | None:
        """The advantage of a rollout; None if it has none."""
        value = float(self._memory["advantage"][rollout]) if "advantage" in self._memory else np.nan
        return None if np.isnan(value) else value

    def check(self, per_token: Mapping[str, np.ndarray], vocab_size: int) -> None:
        """Refuse kept sets and version spans that no rollout can have.

        Args:
            per_token: tokens, response and logprobs of the whole shard.
            vocab_size: of the sampler; 0 where nobody knows it.

        Raises:
            StoreError: naming the file, the rollout, and the token where there is one.
        """
        for rollout, first in enumerate(self._token_start_M[:-1].tolist()):
            tokens = slice(first, int(self._token_start_M[rollout + 1]))
            sampled_N = per_token["response"][tokens].astype(bool)
            wrong, versions_C2, kept = None, self.versions_C2(rollout), self.kept(rollout)
            if versions_C2 is not None:
                version = int(self._memory["policy_version"][rollout])
                wrong = wrong_versions(versions_C2, sampled_N, version)
            if wrong is None and kept is not None:
                tokens_N, logprobs_N = (per_token[name][tokens] for name in ("tokens", "logprobs"))
                wrong = kept.wrong(tokens_N, sampled_N, logprobs_N, vocab_size)
            elif wrong is None and "num_kept" in self._memory:
                wrong = self._wrong_sizes(first, len(sampled_N))
            if wrong is not None:
                raise StoreError(f"{self._file.path}: rollout {rollout}: {wrong}")

    def _wrong_sizes(self, first: int, num_tokens: int) -> str | None:
        """Why a rollout without kept ids cannot have these sizes, which must all be 0."""
        sizes_N = np.empty(num_tokens, np.int32)
        self._file.read(sizes_N, self._header.entries["kept_sizes"].begin + first * 4)
        return "kept sets without ids" if sizes_N.any() else None

    def check_kept_ids(self, vocab_size: int) -> None:
        """Refuse kept ids outside a vocabulary.

        Raises:
            StoreError: naming the file, the rollout and the token.
        """
        for rollout in np.flatnonzero(self.num_kept_M).tolist():
            kept = self.kept(rollout)
            assert kept is not None
            place = int(kept.ids_V.argmax())
            if kept.ids_V[place] >= vocab_size:
                token = int(np.searchsorted(kept.offsets, place, side="right")) - 1
                raise StoreError(
                    f"{self._file.path}: rollout {rollout}: token {token}: its kept set has id "
                    f"{kept.ids_V[place]}; the vocabulary has ids 0 to {vocab_size - 1}"
                )
