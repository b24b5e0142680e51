"""One shard: opened, checked, read, and verified to the last byte.

What each rollout has once (its reward, its lengths) is kept in memory. Tokens and routes stay in
the open file and are read where they are asked for.

Shape suffixes (docs/glossary.md): E, K, L, M, T, U.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from zlib_ng import zlib_ng

from megatron_r3.rollout import sampled_tokens, wrong_logprobs
from megatron_r3.routes import Origin, RoutesError, check_ids, id_dtype
from megatron_r3.store.expert_load import StoredLoad
from megatron_r3.store.extras import Extras, optional_in_memory
from megatron_r3.store.files import HeldFile
from megatron_r3.store.header import DTYPES, EXPERT_LOAD, PER_ROLLOUT, PER_TOKEN, read_header
from megatron_r3.store.schema import StoreError
from megatron_r3.values import MOST_TOKEN_ID, wrong_count, wrong_name, wrong_reward, wrong_token

_PIECE = 1 << 24  # bytes of an unknown tensor that are in memory at a time


class Shard:
    """A shard's tensors by name (docs/rollout-store.md), and what its store says.

    All reads are from the file that was opened, even if another file has its name by then. Each
    rollout that is read whole is compared with its checksums; `verify` compares everything.

    Attributes:
        info: what its store says.
        identity: 16 hex digits that differ for shards of different content; the shard's number is
            part of the content.
        has_blocks: whether each rollout has checksums of its own, as from version 3 on.
        token_start_M, row_start_M, turn_start_M: `[M + 1]`, where each rollout's tokens, rows and
            turns begin in the shard's tensors, and where the last rollout's end.
        extras: what only some rollouts have.
        bytes_read: the bytes of routes that this process has read so far.

    Raises:
        StoreError: naming the file, and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self.file = HeldFile(path)
        self.header = read_header(self.file)
        self.info, self.identity = self.header.info, self.header.identity
        self.has_blocks = "block_crc32" in self.header.tensors
        names = ["turns", *PER_ROLLOUT]
        if self.has_blocks:
            names += ["prompt_digest", "block_crc32", *optional_in_memory(self.header)]
        self._memory = {name: self._read_whole(name) for name in names}
        self.file.check_unchanged()
        for name, tensor in self._memory.items():
            if zlib_ng.crc32(tensor.data) != self.header.crc32[name]:
                raise self.file.damaged(f"checksum of {name!r}")
        self._memory.setdefault("prompt_digest", np.zeros(self.num_rollouts, np.int64))
        self._check_rollouts()
        num_tokens_M, num_turns_M = self._memory["num_tokens"], self._memory["num_turns"]
        self.token_start_M, self.row_start_M, self.turn_start_M = (
            np.concatenate([[0], np.cumsum(count_M)])
            for count_M in (num_tokens_M, num_tokens_M - 1, num_turns_M)
        )
        self.extras = Extras(self.file, self.header, self._memory, self.token_start_M)
        self._load = StoredLoad(self.file, self.header, self.row_start_M)

    def __reduce__(self) -> Any:
        """Let another process open the file for itself, and find the same file there."""
        return _reopened, (self.path, self.identity, self.file.state)

    def _check_rollouts(self) -> None:
        """Refuse impossible counts, names and rewards."""
        entries = self.header.entries
        for count, least, total in (
            ("num_tokens", 2, entries["tokens"].shape[0]),
            ("num_turns", 0, entries["turns"].shape[0] // 2),
        ):
            if wrong := wrong_count(self._memory[count], least, total):
                raise StoreError(f"{self.path}: {count}: {wrong}")
        columns = ("reward", "policy_version", "group", "sample", "prompt_digest")
        values = zip(*(self._memory[name].tolist() for name in columns), strict=True)
        for rollout, (reward, version, group, sample, digest) in enumerate(values):
            where = f"{self.path}: rollout {rollout}"
            if wrong := wrong_reward(reward):
                raise StoreError(f"{where}: reward {reward}: {wrong}")
            if wrong := wrong_name(version, group, sample):
                raise StoreError(f"{where}: {wrong}")
            if digest < 0:
                raise StoreError(f"{where}: prompt_digest must not be negative")

    @property
    def tensors(self) -> Mapping[str, np.ndarray]:
        """All tensors but the routes; those of PER_TOKEN are read when they are asked for."""
        return _Tensors(self, self._memory)

    @property
    def num_rollouts(self) -> int:
        """How many rollouts, M."""
        return len(self._memory["num_tokens"])

    @property
    def num_rows(self) -> int:
        """How many rows of routes all rollouts have together, T."""
        return self.header.entries["routes"].shape[1]

    @property
    def dtype(self) -> np.dtype:
        """The type of an expert id."""
        return id_dtype(self.info.num_experts)

    def locate_token(self, token: int) -> tuple[int, int]:
        """The rollout of a token of this shard, and the token's place in it."""
        return _locate(self.token_start_M, token)

    def locate_row(self, row: int) -> tuple[int, int]:
        """The rollout of a row of this shard, and the row's token in it."""
        return _locate(self.row_start_M, row)

    def turns(self, rollout: int) -> np.ndarray:
        """First token and end of each of a rollout's turns, int32 `[U, 2]`."""
        bounds = slice(2 * self.turn_start_M[rollout], 2 * self.turn_start_M[rollout + 1])
        return self._memory["turns"][bounds].reshape(-1, 2).copy()

    # Reading

    def expert_load(self) -> np.ndarray:
        """How many recorded rows of each rollout take each expert, int64 `[M, L, E]`.

        No route is read, but in a shard whose writer did not count them.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        load_MLE = self._load.read()
        if load_MLE is not None:
            return load_MLE
        recorded_T, all_rows = self.tensors["recorded"].astype(bool), np.arange(self.num_rows)
        loads = [
            self._load.of_layer(layer, self.read_routes(all_rows, [layer])[0], recorded_T)
            for layer in range(len(self.info.moe_layers))
        ]
        return np.stack(loads, axis=1)

    def _read_whole(self, name: str) -> np.ndarray:
        """A tensor as it lies in the file; the caller compares its checksum."""
        entry = self.header.entries[name]
        tensor: np.ndarray = np.empty(entry.shape, DTYPES[entry.dtype])
        self.file.read(tensor, entry.begin)
        return tensor

    def _starts(self, name: str) -> np.ndarray:
        """Where each rollout begins in a tensor of PER_TOKEN: `recorded` has rows, not tokens."""
        return self.row_start_M if name == "recorded" else self.token_start_M

    def read_per_token(self, name: str) -> np.ndarray:
        """One of the tensors PER_TOKEN, each rollout's part compared with its checksum.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        tensor = self._read_whole(name)
        self.file.check_unchanged()
        self._compare(name, 0, 0, tensor, self._starts(name).tolist())
        return tensor

    def read_tokens(self, rollout: int) -> dict[str, np.ndarray]:
        """tokens, response, logprobs `[N]` and recorded `[N - 1]` of a rollout, as stored.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        parts = {}
        for name in PER_TOKEN:
            begin, end = self._starts(name)[rollout : rollout + 2].tolist()
            entry = self.header.entries[name]
            part: np.ndarray = np.empty(end - begin, DTYPES[entry.dtype])
            self.file.read(part, entry.begin + begin * part.itemsize)
            parts[name] = part
        self.file.check_unchanged()
        for name, part in parts.items():
            self._compare(name, 0, rollout, part, [0, len(part)])
        return parts

    def read_recorded(self, rows_T: np.ndarray) -> np.ndarray:
        """Whether the engine returned routes for these rows, bool `[T]`; see `read_routes`."""
        return self._read_rows("recorded", rows_T, [0], 1)[0, :, 0].astype(bool)

    def read_routes(self, rows_T: np.ndarray, layers: Sequence[int]) -> np.ndarray:
        """The routes `[len(layers), T, K]` of some rows: these bytes are read, and no others.

        Args:
            rows_T: ascending, without repeats.
            layers: indices into `info.moe_layers`.

        Raises:
            StoreError: the file is damaged, or was changed since it was opened.
        """
        ids_LTK = self._read_rows("routes", rows_T, layers, self.info.topk)
        self.bytes_read += ids_LTK.nbytes
        return ids_LTK

    def _read_rows(
        self, name: str, rows_T: np.ndarray, layers: Sequence[int], items: int
    ) -> np.ndarray:
        """`[len(layers), T, items]` of a tensor that has rows; one read for each run of rows.

        Example: of the rows 4 5 6 9 10 the runs are 4 5 6 and 9 10. If rollout 1 has the rows 4 5
        and rollout 2 the rows 6 7 8, then the first run covers all of rollout 1, so rollout 1 is
        compared with its checksum. Rollout 2 is not read whole, so it cannot be compared.
        """
        entry = self.header.entries[name]
        read: np.ndarray = np.empty((len(layers), len(rows_T), items), DTYPES[entry.dtype])
        if not len(rows_T):
            return read
        row_bytes = items * read.itemsize
        cuts = (np.flatnonzero(np.diff(rows_T) != 1) + 1).tolist()
        runs = [*pairwise([0, *cuts, len(rows_T)])]
        for index, layer in enumerate(layers):
            for start, end in runs:
                row = layer * self.num_rows + int(rows_T[start])
                self.file.read(read[index, start:end], entry.begin + row * row_bytes)
        self.file.check_unchanged()
        for start, end in runs:
            begin = int(rows_T[start])
            # the rollouts all of whose rows lie in this run: from `first` to before `last`
            first = int(np.searchsorted(self.row_start_M, begin, side="left"))
            last = int(np.searchsorted(self.row_start_M, begin + end - start, side="right")) - 1
            if last > first:
                bounds = (self.row_start_M[first : last + 1] - begin).tolist()
                for layer, rows in zip(layers, read[:, start:end], strict=True):
                    self._compare(name, layer, first, rows, bounds)
        return read

    def _compare(
        self, name: str, layer: int, rollout: int, part: np.ndarray, bounds: Sequence[int]
    ) -> None:
        """Refuse rollouts that are not as they were stored. Shards of version 2 have no such sums.

        Args:
            layer: of `routes`; 0 for any other tensor.
            rollout: the first of the rollouts that lie in `part` between the `bounds`.
        """
        if not self.has_blocks:
            return
        column = layer
        if name != "routes":  # `block_crc32` has the layers first, then the tensors PER_TOKEN
            column = len(self.info.moe_layers) + [*PER_TOKEN].index(name)
        sums = [zlib_ng.crc32(part[start:end].data) for start, end in pairwise(bounds)]
        stored = self._memory["block_crc32"][rollout : rollout + len(sums), column].tolist()
        if sums != stored:
            wrong = rollout + next(i for i, crc32 in enumerate(sums) if crc32 != stored[i])
            part_name = f"the routes of MoE layer {layer}" if name == "routes" else repr(name)
            raise self.file.damaged(f"rollout {wrong}: checksum of {part_name}")

    # Verifying

    def verify(self, counts_load: bool = True) -> None:
        """Read everything; check all sums and values, and that each row has distinct ids in range.

        Args:
            counts_load: whether the load of the experts is counted from the routes and compared
                with the stored one. Counting takes three times as long as all the rest.

        Raises:
            ValueError: naming the file, and for a wrong value or id the rollout, layer and token.
        """
        per_token = {name: self.tensors[name] for name in PER_TOKEN}
        # the tensors whose sums nothing has compared yet: those that a newer megatron-r3 added, and
        # those that have no sums by rollout in version 2. `routes` follow layer by layer, and the
        # sum of the load is compared where the load is read.
        whole = self.header.entries.keys() - {*self.tensors, "routes", EXPERT_LOAD}
        if not self.has_blocks:
            whole |= {*PER_TOKEN}
        for name in sorted(whole):
            if self._crc32_of(name) != self.header.crc32[name]:
                raise self.file.damaged(f"checksum of {name!r}")
        self._check_values(per_token)
        load_MLE = self._load.read()
        recorded_T = per_token["recorded"].astype(bool)
        self._verify_routes(recorded_T, load_MLE if counts_load else None)

    def _verify_routes(self, recorded_T: np.ndarray, load_MLE: np.ndarray | None) -> None:
        crc32, all_rows = 0, np.arange(self.num_rows)
        wrong_layer: int | None = None
        for layer in range(len(self.info.moe_layers)):
            ids_LTK = self.read_routes(all_rows, [layer])
            crc32 = crc32 if self.has_blocks else zlib_ng.crc32(ids_LTK.data, crc32)
            try:
                check_ids(ids_LTK, self.info.num_experts, recorded_T)
            except RoutesError:
                wrong_layer = layer if wrong_layer is None else wrong_layer
                continue
            if load_MLE is not None:
                counted_ME = self._load.of_layer(layer, ids_LTK[0], recorded_T)
                self._load.compare(layer, load_MLE[:, layer], counted_ME)
        # damaged bytes make wrong ids too: an id is blamed only when all bytes are as stored
        if not self.has_blocks and crc32 != self.header.crc32["routes"]:
            raise self.file.damaged("checksum of 'routes'")
        if wrong_layer is None:
            return
        for rollout, (begin, end) in enumerate(pairwise(self.row_start_M.tolist())):
            rows_T = np.arange(begin, end)
            check_ids(  # the same error again, with the rollout and the token inside it
                self.read_routes(rows_T, [wrong_layer]),
                self.info.num_experts,
                recorded_T[rows_T],
                f"{self.path}: rollout {rollout}",
                Origin(layer=wrong_layer),
            )

    def _crc32_of(self, name: str) -> int:
        """The checksum of a tensor of any type, with little of it in memory."""
        entry = self.header.entries[name]
        crc32 = 0
        for begin in range(entry.begin, entry.end, _PIECE):
            piece = np.empty(min(_PIECE, entry.end - begin), np.uint8)
            self.file.read(piece, begin)
            crc32 = zlib_ng.crc32(piece.data, crc32)
        self.file.check_unchanged()
        return crc32

    def _check_values(self, per_token: dict[str, np.ndarray]) -> None:
        for name in ("response", "recorded"):
            if (per_token[name] > 1).any():
                raise StoreError(f"{self.path}: {name} must be 0 or 1")
        self.check_tokens(self.info.vocab_size or MOST_TOKEN_ID + 1)
        response = per_token["response"].astype(bool)
        wrong_M = response[self.token_start_M[:-1]]
        if wrong_M.any():
            raise StoreError(
                f"{self.path}: rollout {int(wrong_M.argmax())}: its first token cannot be sampled: "
                "nothing predicts it"
            )
        if wrong := wrong_logprobs(per_token["logprobs"], response):
            rollout, token = self.locate_token(wrong[0])
            raise StoreError(f"{self.path}: rollout {rollout}: token {token}: {wrong[1]}")
        sampled = self._sampled()
        if sampled is None or not np.array_equal(sampled, response):
            raise StoreError(f"{self.path}: its `turns` and its `response` name different tokens")
        self.extras.check(per_token, self.info.vocab_size)

    def _sampled(self) -> np.ndarray | None:
        """The tokens of the shard that the turns name, bool; None if a turn leaves its rollout."""
        starts_U = np.repeat(self.token_start_M[:-1], self._memory["num_turns"])
        ends_U = np.repeat(self.token_start_M[1:], self._memory["num_turns"])
        turns_U2 = self._memory["turns"].reshape(-1, 2) + starts_U[:, None]
        if (turns_U2[:, 0] < starts_U).any() or (turns_U2[:, 1] > ends_U).any():
            return None
        return sampled_tokens(turns_U2, int(self.token_start_M[-1]))

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse token ids outside a vocabulary.

        Raises:
            StoreError: naming the file, the rollout and the token.
        """
        if wrong := wrong_token(self.tensors["tokens"], vocab_size):
            rollout, token = self.locate_token(wrong[0])
            raise StoreError(f"{self.path}: rollout {rollout}: token {token} {wrong[1]}")
        self.extras.check_kept_ids(vocab_size)


class _Tensors(Mapping[str, np.ndarray]):
    """A shard's tensors by name: in memory, or read when they are asked for."""

    def __init__(self, shard: Shard, in_memory: Mapping[str, np.ndarray]) -> None:
        self.shard, self.in_memory = shard, in_memory

    def __getitem__(self, name: str) -> np.ndarray:
        return self.shard.read_per_token(name) if name in PER_TOKEN else self.in_memory[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.in_memory, *PER_TOKEN])

    def __len__(self) -> int:
        return len(self.in_memory) + len(PER_TOKEN)


def _locate(start_M: np.ndarray, place: int) -> tuple[int, int]:
    rollout = int(np.searchsorted(start_M, place, side="right")) - 1
    return rollout, place - int(start_M[rollout])


def _reopened(path: Path, identity: str, state: tuple[int, int, int]) -> Shard:
    """The shard that another process had opened; the inode may differ between two machines."""
    shard = Shard(path)
    if shard.identity != identity or shard.file.state[:2] != state[:2]:
        raise StoreError(
            f"{path}: was changed or replaced while it is in use: put the old file back, "
            "and start again"
        )
    return shard
