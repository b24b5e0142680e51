"""What only some rollouts of a shard have: kept sets, version spans, an advantage.

Version spans and advantages are a few numbers of each rollout and are in memory. Kept sets stay in
the file; those of one rollout are read at a time, and compared with the checksums of that rollout.

Shape suffixes (docs/glossary.md): C, M, N, V.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.data.kept import KeptSets
from megatron_r3.data.lazy import lazy
from megatron_r3.data.rollout import wrong_versions
from megatron_r3.data.store.header import OPTIONAL, Header
from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.store.shard_file import ShardFile
from megatron_r3.data.values import wrong_count, wrong_reward

# The optional tensors that stay in the file.
IN_FILE = ("kept_sizes", "kept_ids", "kept_crc32")


def optional_in_memory(header: Header) -> list[str]:
    """The optional tensors of a shard that are read when it is opened."""
    names = [name for together in OPTIONAL.values() for name in together]
    return [name for name in names if name in header.tensors and name not in IN_FILE]


def newest_versions(memory: Mapping[str, np.ndarray]) -> np.ndarray:
    """The newest policy version of each rollout, int64 `[M]`: that of its last span.

    Args:
        memory: policy_version, and num_versions and versions where rollouts have spans.
    """
    newest_M = memory["policy_version"].copy()
    counts_M = memory.get("num_versions", np.zeros_like(newest_M))
    if counts_M.any():
        # versions of all spans one behind the other: a rollout's last one is before its end
        has_M = counts_M > 0
        newest_M[has_M] = memory["versions"][1::2][np.cumsum(counts_M)[has_M] - 1]
    return newest_M


class Extras:
    """The optional tensors of one shard, rollout by rollout.

    Args:
        opened: the shard's file.
        in_memory: the tensors that were read and compared with their checksums.
        token_start_M: `[M + 1]`, where each rollout's tokens begin.
    """

    def __init__(
        self, opened: ShardFile, in_memory: Mapping[str, np.ndarray], token_start_M: np.ndarray
    ) -> None:
        self._opened, self._memory = opened, in_memory
        self._token_start_M = token_start_M

    def check_counts(self) -> None:
        """Refuse counts or advantages that cannot be; once, when the shard is looked at.

        Raises:
            StoreError: naming the file, and the rollout.
        """
        for count, name, width in (("num_kept", "kept_ids", 1), ("num_versions", "versions", 2)):
            if count in self._memory:
                total = self._opened.header.entries[name].shape[0] // width
                if wrong := wrong_count(self._memory[count], 0, total):
                    raise StoreError(f"{self._opened.path}: {count}: {wrong}")
        for rollout, value in enumerate(self._memory.get("advantage", np.zeros(0)).tolist()):
            if not np.isnan(value) and wrong_reward(value):
                raise StoreError(
                    f"{self._opened.path}: rollout {rollout}: advantage {value}: must be finite, "
                    "or NaN for a rollout that has none"
                )

    @lazy
    def _kept_start_M(self) -> np.ndarray:
        return self._starts("num_kept")

    @lazy
    def _span_start_M(self) -> np.ndarray:
        return self._starts("num_versions")

    def _starts(self, count: str) -> np.ndarray:
        """Where each rollout's part begins; all 0 in a shard that lacks the tensors."""
        counts_M = self._memory.get(count)
        if counts_M is None:
            return np.zeros_like(self._token_start_M)
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
        file, entries, parts = self._opened.file, self._opened.header.entries, []
        for name, start, stop in (("kept_sizes", first, last), ("kept_ids", begin, end)):
            part: np.ndarray = np.empty(stop - start, np.int32)
            file.read(part, entries[name].begin + start * part.itemsize)
            parts.append(part)
        self._opened.after_read()
        if [zlib_ng.crc32(part.data) for part in parts] != self._kept_crc32[rollout].tolist():
            raise file.damaged(f"rollout {rollout}: checksum of the kept sets")
        return KeptSets(*parts)

    @lazy
    def _kept_crc32(self) -> np.ndarray:
        """The sums of all kept sets, `[M, 2]`; the header that was read has theirs.

        So what is read is what was written, also if another shard was written over the file.
        """
        header, file = self._opened.header, self._opened.file
        sums: np.ndarray = np.empty(header.entries["kept_crc32"].shape, np.uint32)
        file.read(sums, header.entries["kept_crc32"].begin)
        if zlib_ng.crc32(sums.data) != header.crc32["kept_crc32"]:
            file.check_unchanged()
            raise file.damaged("checksum of 'kept_crc32'")
        return sums

    def versions_C2(self, rollout: int) -> np.ndarray | None:
        """First token and policy version of each span, int64; None if one policy sampled all."""
        begin, end = self._span_start_M[rollout : rollout + 2].tolist()
        if begin == end:
            return None
        return self._memory["versions"][2 * begin : 2 * end].reshape(-1, 2).copy()

    @lazy
    def newest_version_M(self) -> np.ndarray:
        """The newest policy version of each rollout, int64 `[M]`: that of its last span.

        The oldest one is the rollout's `policy_version`. Where one policy sampled all of a rollout,
        the two are the same.
        """
        return newest_versions(self._memory)

    def advantages_M(self) -> np.ndarray:
        """The advantage of each rollout, float32 `[M]`.

        Raises:
            StoreError: a rollout has none; the message names the file and the rollout.
        """
        none = np.full(len(self._token_start_M) - 1, np.nan, np.float32)
        advantage_M = self._memory.get("advantage", none)
        for rollout in np.flatnonzero(np.isnan(advantage_M))[:1]:
            raise StoreError(
                f"{self._opened.path}: rollout {rollout} has no advantage: give every rollout of "
                "the store one, or work advantages out of the rewards"
            )
        return advantage_M

    def advantage(self, rollout: int) -> float | None:
        """The advantage of a rollout; None if it has none."""
        value = float(self._memory["advantage"][rollout]) if "advantage" in self._memory else np.nan
        return None if np.isnan(value) else value

    def check(self, rollouts: range, per_token: Mapping[str, np.ndarray], vocab_size: int) -> None:
        """Refuse kept sets and version spans that no rollout can have.

        Args:
            rollouts: which to look at.
            per_token: tokens, response and logprobs of these rollouts.
            vocab_size: of the sampler; 0 where nobody knows it.

        Raises:
            StoreError: naming the file, the rollout, and the token where there is one.
        """
        begin = int(self._token_start_M[rollouts.start])
        for rollout in rollouts:
            first, end = self._token_start_M[rollout : rollout + 2].tolist()
            tokens = slice(first - begin, end - begin)
            sampled_N = per_token["response"][tokens].astype(bool)
            wrong, versions_C2, kept = None, self.versions_C2(rollout), self.kept(rollout)
            if versions_C2 is not None:
                version = int(self._memory["policy_version"][rollout])
                wrong = wrong_versions(versions_C2, sampled_N, version)
            if wrong is None and kept is not None:
                tokens_N, logprobs_N = (per_token[name][tokens] for name in ("tokens", "logprobs"))
                wrong = kept.wrong(tokens_N, sampled_N, logprobs_N, vocab_size)
            elif wrong is None and "kept_sizes" in self._opened.header.entries:
                wrong = self._wrong_sizes(rollout, first, len(sampled_N))
            if wrong is not None:
                raise StoreError(f"{self._opened.path}: rollout {rollout}: {wrong}")

    def _wrong_sizes(self, rollout: int, first: int, num_tokens: int) -> str | None:
        """Why a rollout without kept ids cannot have these sizes, which must all be 0."""
        sizes_N = np.empty(num_tokens, np.int32)
        begin = self._opened.header.entries["kept_sizes"].begin
        self._opened.file.read(sizes_N, begin + first * 4)
        if zlib_ng.crc32(sizes_N.data) != int(self._kept_crc32[rollout, 0]):
            raise self._opened.file.damaged(f"rollout {rollout}: checksum of the kept sets")
        return "kept sets without ids" if sizes_N.any() else None

    def check_kept_ids(self, rollouts: range, vocab_size: int) -> None:
        """Refuse kept ids of some rollouts outside a vocabulary.

        Raises:
            StoreError: naming the file, the rollout and the token.
        """
        for rollout in rollouts:
            if (kept := self.kept(rollout)) is None:
                continue
            place = int(kept.ids_V.argmax())
            if kept.ids_V[place] >= vocab_size:
                token = int(np.searchsorted(kept.offsets, place, side="right")) - 1
                raise StoreError(
                    f"{self._opened.path}: rollout {rollout}: token {token}: its kept set has id "
                    f"{kept.ids_V[place]}; the vocabulary has ids 0 to {vocab_size - 1}"
                )
