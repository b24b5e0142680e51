"""A shard taken apart and put together again with right checksums, as a hostile writer would do it.

This is written after docs/rollout-store.md and the safetensors format, and uses nothing of the code
under test. A shard is a safetensors file:

    8 bytes        how long the header is, little-endian
    the header     JSON: {"tokens": {"dtype": "I32", "shape": [9], "data_offsets": [0, 36]}, ...,
                   "__metadata__": {"megatron_r3": the shard's own header, as text, "crc32": ...}}
    the tensors    one after the other; the offsets count from here
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

_DTYPES = {
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "I32": "<i4",
    "I64": "<i8",
    "F32": "<f4",
}
_PER_TOKEN = ("tokens", "response", "logprobs", "recorded")  # in the order of `block_crc32`
_SINCE_3 = ("prompt_digest", "block_crc32", "expert_load", "part_crc32")
_EXTRAS = (
    "num_kept",
    "kept_sizes",
    "kept_ids",
    "kept_crc32",
    "num_versions",
    "versions",
    "advantage",
)
_INFO_OF_2 = (
    "num_experts", "topk", "moe_layers", "engine", "engine_version", "model", "router_fingerprint",
)  # fmt: skip


@dataclass
class ShardFile:
    """The parts of a shard. Change them, then ask for the `file`.

    Attributes:
        tensors: the tensors by name, in the order in which they lie in the file.
        body: the shard's own header.
        entries: fields of a tensor's entry in the safetensors header that are to be lies.
        edit_header: changes the safetensors header after all checksums were put into it.
        edit_text: changes the bytes of the safetensors header.
    """

    tensors: dict[str, np.ndarray]
    body: dict[str, Any]
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    edit_header: Callable[[dict[str, Any]], None] = lambda header: None
    edit_text: Callable[[bytes], bytes] = lambda text: text

    @classmethod
    def of(cls, data: bytes) -> ShardFile:
        """The parts of a shard that is whole."""
        begin = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:begin])
        body = json.loads(header.pop("__metadata__")["megatron_r3"])
        tensors = {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = (begin + offset for offset in entry["data_offsets"])
            flat = np.frombuffer(data[first:last], _DTYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"]).copy()
        return cls(tensors, body)

    def file(self) -> bytes:
        """The bytes of the shard, with the lengths, offsets and checksums of its parts."""
        self._sum_blocks()
        self.body["crc32"] = {
            name: zlib.crc32(self.tensors[name].tobytes())
            for name in self.body.get("crc32", {})
            if name in self.tensors
        }
        return self.file_of(json.dumps(self.body, sort_keys=True))

    def file_of(self, text: str) -> bytes:
        """The bytes of the shard with this text as its own header, and the checksum of the text."""
        sum_of_text = str(zlib.crc32(text.encode(errors="surrogatepass")))
        header: dict[str, Any] = {"__metadata__": {"megatron_r3": text, "crc32": sum_of_text}}
        end, kinds = 0, {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
        for name, tensor in self.tensors.items():
            begin, end = end, end + tensor.nbytes
            entry = {"dtype": kinds[tensor.dtype], "shape": [*tensor.shape]}
            header[name] = {**entry, "data_offsets": [begin, end], **self.entries.get(name, {})}
        self.edit_header(header)
        written = self.edit_text(json.dumps(header).encode())
        written = written.ljust(-(-len(written) // 8) * 8)
        data = b"".join(tensor.tobytes() for tensor in self.tensors.values())
        return len(written).to_bytes(8, "little") + written + data

    def _sum_blocks(self) -> None:
        """Sum up what each rollout has of each tensor, as `block_crc32` does from version 3 on.

        Its columns are the MoE layers of `routes`, then the tensors of `_PER_TOKEN`. A rollout of N
        tokens has N - 1 rows of routes and of `recorded`, which is the last one, and N of the rest.
        """
        if not {"block_crc32", "num_tokens", "routes", *_PER_TOKEN} <= self.tensors.keys():
            return
        counts = [int(count) for count in self.tensors["num_tokens"].reshape(-1)]
        sliced = [*self.tensors["routes"], *(self.tensors[name] for name in _PER_TOKEN)]
        sums = self.tensors["block_crc32"]
        for column, tensor in enumerate(sliced[: sums.shape[1]]):
            per_row = column < len(self.tensors["routes"]) or column == len(sliced) - 1
            bounds = pairwise(accumulate([0, *(count - per_row for count in counts)]))
            for row, (begin, end) in enumerate([*bounds][: len(sums)]):
                sums[row, column] = zlib.crc32(tensor[begin:end].tobytes())
        self._sum_kept(counts)
        self._sum_parts(counts)

    def _sum_parts(self, counts: list[int]) -> None:
        """Sum up each 64 tokens or rows of a rollout, as `part_crc32` does; see `_sum_blocks`.

        For each rollout, one behind the other, there is a table with the columns of `block_crc32`
        and as many parts as its tokens need. Each sum begins with that of `block_crc32`, and so the
        sum of a part without bytes is that number. The tensor keeps its length, so that it can lie.
        """
        if "part_crc32" not in self.tensors or max(map(abs, counts), default=0) > 2**20:
            return
        start_value = zlib.crc32(self.tensors["block_crc32"].tobytes())
        sums = self.tensors["part_crc32"].reshape(-1)
        found: list[int] = []
        row = token = 0
        for count in counts:
            rows = slice(max(row, 0), max(row + count - 1, 0))
            tokens = slice(max(token, 0), max(token + count, 0))
            columns = [layer[rows] for layer in self.tensors["routes"]]
            columns += [
                self.tensors[name][rows if name == "recorded" else tokens] for name in _PER_TOKEN
            ]
            for column in columns:
                for start in range(0, count, 64):
                    found.append(zlib.crc32(column[start : start + 64].tobytes(), start_value))
            row, token = row + count - 1, token + count
        found = found[: len(sums)]
        sums[: len(found)] = np.array(found, np.uint32)

    def _sum_kept(self, num_tokens: list[int]) -> None:
        """Sum up the kept sets of each rollout: its sizes, one a token, and its ids."""
        if not {"num_kept", "kept_sizes", "kept_ids", "kept_crc32"} <= self.tensors.keys():
            return
        counts = [int(count) for count in self.tensors["num_kept"].reshape(-1)]
        sums = self.tensors["kept_crc32"].reshape(-1)
        for column, (name, lengths) in enumerate(
            (("kept_sizes", num_tokens), ("kept_ids", counts))
        ):
            bounds = [*pairwise(accumulate([0, *lengths]))]
            for row, (begin, end) in enumerate(bounds[: len(sums) // 2]):
                part = self.tensors[name][max(begin, 0) : max(end, 0)]
                sums[2 * row + column] = zlib.crc32(part.tobytes())

    def as_version_2(self) -> bytes:
        """The same rollouts as a shard of version 2, which has no block sums and no prompts."""
        old = ShardFile(
            {n: t for n, t in self.tensors.items() if n not in (*_SINCE_3, *_EXTRAS)}, {}
        )
        info = {name: self.body["info"][name] for name in _INFO_OF_2}
        old.body = {"format": self.body["format"], "version": 2, "info": info}
        old.body["crc32"] = dict.fromkeys(old.tensors, 0)
        return old.file()
