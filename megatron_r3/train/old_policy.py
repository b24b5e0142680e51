"""What the old policy gave for the tokens of a collection: log-probs and, for R2, its routes.

The old policy is the trainer as it was before the first optimizer step on the collection. A pass
over the collection (`old_pass.py`) fills an `OldPolicy`; the updates read it by row id. Each rank
keeps what its own tokens and layers need, on the host.

Because the weights change between the pass and the last update, a training that is resumed in the
middle of a collection cannot repeat the pass. So the record is written beside the checkpoints, into
a folder for each collection, one file a rank. Files are read by row ids, so a training may be
resumed with another number of ranks, in another layout.

Shape suffixes (docs/glossary.md): B, K, S, T.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from megatron_r3.data.store.schema import StoreError
from megatron_r3.data.whole_file import write_whole

FOLDER = "old-policy"


class OldPolicy:
    """The old policy's log-probs and routes of one collection, by row id, on the host.

    Attributes:
        collection: the collection's number; None before the first collection.
    """

    def __init__(self) -> None:
        self.collection: int | None = None
        self._changed = threading.Condition()
        self._ready = -1  # the last collection with a whole record
        self._cancelled = False
        self._logprobs: list[tuple[Tensor, Tensor]] = []  # rows and values, until `finish`
        self._routes: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._logprob_table = _Table(np.zeros(0, np.int64), np.zeros(0, np.float32))
        self._route_tables: dict[int, _Table] = {}

    def begin(self, collection: int) -> None:
        """Forget the record of the last collection, and begin the record of this one."""
        self.collection = collection
        self._logprobs, self._routes, self._route_tables = [], {}, {}
        self._logprob_table = _Table(np.zeros(0, np.int64), np.zeros(0, np.float32))

    def add_logprobs(self, rows_BS: Tensor, logprobs_BS: Tensor) -> None:
        """Take the log-probs of a micro-batch, without a wait.

        Args:
            rows_BS: row ids on the host; -1 for padding.
            logprobs_BS: float32, on the device.
        """
        self._logprobs.append((rows_BS.reshape(-1), logprobs_BS.detach().reshape(-1)))

    def add_routes(self, rows_T: Tensor, ids: dict[int, Tensor]) -> None:
        """Take the routes of a micro-batch, without a wait.

        Args:
            rows_T: row ids on the host, in the router's order; -1 for padding.
            ids: for each layer number the expert ids `[T, K]`, on the device.
        """
        for layer, ids_TK in ids.items():
            self._routes.setdefault(layer, []).append((rows_T, ids_TK.detach()))

    def finish(self) -> None:
        """Copy what was added to the host. Afterwards the record is whole."""
        if self._logprobs:
            self._logprob_table = _Table.of(self._logprobs)
        self._route_tables = {layer: _Table.of(parts) for layer, parts in self._routes.items()}
        self._logprobs, self._routes = [], {}
        self._announce_whole()

    def wait_for(self, collection: int) -> None:
        """Return when the record of a collection is whole; called by the lookahead's thread.

        Example: while the last update on collection 3 runs, the lookahead prepares the first
        micro-batch of collection 4, whose routes the next pass will record.

        Raises:
            CancelledError: the training ends.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._cancelled or self._ready >= collection)
            if self._cancelled:
                raise CancelledError

    def cancel(self) -> None:
        """End all waits, because the training ends."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def _announce_whole(self) -> None:
        assert self.collection is not None
        with self._changed:
            self._ready = self.collection
            self._changed.notify_all()

    def logprobs(self, rows_BS: Tensor) -> Tensor:
        """The log-probs `[B, S]` of these rows, float32 on the host; 0 for padding."""
        return torch.from_numpy(self._logprob_table.of_rows(rows_BS.numpy(), "old log-probs"))

    def routes(self, layer: int, rows_T: np.ndarray) -> np.ndarray:
        """The expert ids `[T, K]` that the old policy chose for these rows; zeros for padding."""
        return self._route_tables[layer].of_rows(rows_T, f"old routes of layer {layer}")

    def write(self, folder: Path, rank: int, about: dict[str, str], number: str) -> None:
        """Write this rank's record into the folder of the collection.

        A file gets its name only when it is complete.

        Args:
            about: the options and rollouts of the record, which `read` compares.
            number: names the pass: the same text on all ranks, and another text for each pass.
        """
        tensors = {"logprob_rows": self._logprob_table.rows, "logprobs": self._logprob_table.values}
        for layer, table in self._route_tables.items():
            tensors |= {f"route_rows.{layer}": table.rows, f"routes.{layer}": table.values}
        data = save(tensors, metadata=about | {"pass": number})
        write_whole(folder / f"rank-{rank:05d}.safetensors", data, sync=False)

    def read(
        self,
        folder: Path,
        collection: int,
        rows: np.ndarray,
        layers: Sequence[int],
        about: dict[str, str],
        number: str,
    ) -> None:
        """Take in what the ranks of an interrupted training wrote for some rows.

        Args:
            rows: int64, sorted: the row ids that this rank will ask for.
            layers: the layers of which this rank will ask for routes.
            about: must be equal to the `about` with which the files were written.
            number: names the pass. Files of other passes are ignored: an earlier training may have
                left such files in the folder, for the same rollouts and from other weights.

        Raises:
            StoreError: a file is missing or damaged, or was written for other options or rollouts.
        """
        self.begin(collection)
        logprobs: list[_Table] = []
        routes: dict[int, list[_Table]] = {layer: [] for layer in layers}
        for file in sorted(folder.glob("rank-*.safetensors")):
            tensors = _tensors_of(file, about, number)
            if tensors is None:
                continue
            logprobs.append(_Table(tensors["logprob_rows"], tensors["logprobs"]).only(rows))
            for layer in layers:
                if (name := f"route_rows.{layer}") in tensors:
                    table = _Table(tensors[name], tensors[f"routes.{layer}"])
                    routes[layer].append(table.only(rows))
        if not logprobs:
            raise StoreError(
                f"{folder}: has no record of the old policy that belongs to the checkpoint. The "
                "checkpoint was saved in the middle of a collection, and the remaining updates on "
                "that collection need the old policy's log-probs: bring the folder back, load a "
                "checkpoint from between two collections, or begin anew with --finetune"
            )
        self._logprob_table = _Table.joined(logprobs)
        self._route_tables = {layer: _Table.joined(parts) for layer, parts in routes.items()}
        self._check_all_there(folder, rows)
        self._announce_whole()

    def _check_all_there(self, folder: Path, rows: np.ndarray) -> None:
        tables = {f"routes of layer {layer}": table for layer, table in self._route_tables.items()}
        for what, table in {"log-probs": self._logprob_table, **tables}.items():
            if missing := len(np.setdiff1d(rows, table.rows)):
                raise StoreError(
                    f"{folder}: {missing} of {len(rows)} tokens have no {what} here: the file of a "
                    "rank is missing; bring it back, or begin anew with --finetune"
                )


class _Table:
    """Values by row id, in ascending order of the ids."""

    def __init__(self, rows: np.ndarray, values: np.ndarray) -> None:
        self.rows, self.values = rows, values

    @classmethod
    def of(cls, parts: list[tuple[Tensor, Tensor]]) -> _Table:
        """A table of the rows and values of micro-batches; padding is left out."""
        rows = torch.cat([rows for rows, _ in parts]).numpy()
        values = torch.cat([values for _, values in parts]).cpu().numpy()
        return cls.joined([cls(rows[rows >= 0], values[rows >= 0])])

    @classmethod
    def joined(cls, tables: list[_Table]) -> _Table:
        """The tables of several ranks as one table with each row once; empty if there are none."""
        if not tables:
            return cls(np.zeros(0, np.int64), np.zeros(0, np.float32))
        rows, first = np.unique(np.concatenate([t.rows for t in tables]), return_index=True)
        return cls(rows, np.concatenate([t.values for t in tables])[first])

    def only(self, rows: np.ndarray) -> _Table:
        """The entries of this table for the row ids in `rows`."""
        keep = np.isin(self.rows, rows)
        return _Table(self.rows[keep], self.values[keep])

    def of_rows(self, rows: np.ndarray, what: str) -> np.ndarray:
        """The values of these rows, in the shape of `rows`; zeros for the row -1."""
        flat = rows.reshape(-1)
        place = np.searchsorted(self.rows, flat)
        place = np.minimum(place, max(len(self.rows) - 1, 0))
        real = flat >= 0
        assert len(self.rows) or not real.any(), f"no {what}: the old-policy pass did not run"
        result = np.zeros((len(flat), *self.values.shape[1:]), self.values.dtype)
        if len(self.rows):
            wrong = real & (self.rows[place] != flat)
            assert not wrong.any(), f"no {what} of row {flat[wrong][:1]}"
            result[real] = self.values[place[real]]
        return result.reshape(*rows.shape, *self.values.shape[1:])


def _tensors_of(file: Path, about: dict[str, str], number: str) -> dict[str, np.ndarray] | None:
    """The tensors of a rank's file; None if another pass wrote the file."""
    try:
        with safe_open(file, framework="np") as held:
            told = held.metadata() or {}
            if told.pop("pass", "") != number:
                return None
            if told != about:
                raise StoreError(
                    f"{file}: was written for other options or rollouts: "
                    f"{_difference(told, about)}: give the options and rollouts of the interrupted "
                    "training again, or begin anew with --finetune"
                )
            return {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StoreError(
            f"{file}: cannot be read: {error}: bring the file back, or begin anew with --finetune"
        ) from error


def collection_folder(directory: str | Path, began_at: int) -> Path:
    """The folder, beside checkpoints, for the collection that began at an iteration."""
    return Path(directory) / FOLDER / f"iter_{began_at:07d}"


def remove_unneeded(
    directory: str | Path, checkpoints: Sequence[str], began_at: int, steps: int
) -> None:
    """Remove the records of earlier collections that no checkpoint needs.

    A checkpoint that was saved in the middle of a collection needs the record of that collection.
    Example with 4 steps a collection: `iter_0000006` needs the record of iteration 4, and
    `iter_0000008` needs none.

    Args:
        directory: its folder `old-policy` has the records.
        checkpoints: all directories in which checkpoints of the training lie.
        began_at: the iteration at which the newest collection began.
        steps: optimizer steps of a collection.
    """
    saved = [number for folder in checkpoints for number in _iterations(Path(folder))]
    for number, path in _iterations(Path(directory) / FOLDER).items():
        is_needed = any(number < iteration < number + steps for iteration in saved)
        if number < began_at and not is_needed:
            shutil.rmtree(path, ignore_errors=True)


def _iterations(directory: Path) -> dict[int, Path]:
    paths = directory.glob("iter_*")
    return {int(path.name[5:]): path for path in paths if re.fullmatch(r"iter_\d+", path.name)}


def _difference(told: dict[str, str], expected: dict[str, str]) -> str:
    return ", ".join(
        f"{name} {json.dumps(told.get(name))} there, {json.dumps(value)} here"
        for name, value in expected.items()
        if told.get(name) != value
    )
