"""A store that grows: the first rank looks for new shards and announces them to all ranks.

The first rank broadcasts what its first look finds. Its later looks run in a thread. The thread
writes what a look finds into a torch TCPStore (a small server of keys and values) under the key
`0`, then `1`, and so on. Ranks, their lookahead threads and dataloader workers read the next key to
hear of new shards. So all processes take the same shards in the same order, and only the first rank
lists the directory.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_r3.data.store.files import POLL_S, allow_most_files
from megatron_r3.data.store.follow import FollowedStore, Lookout, News
from megatron_r3.data.store.index import Index
from megatron_r3.data.store.schema import StoreError
from megatron_r3.train.one_look import told_by_first

ANSWER_S = 60.0  # how many seconds the first rank may take to answer
END_S = 10.0  # how many seconds the end of the process waits for the thread


def follow_together(directory: Path, wait_s: float, lookout: Lookout) -> FollowedStore:
    """Open a store that grows, with the same shards on all ranks. All ranks call this together.

    If the directory or the server of the announcements cannot be used, all ranks end.

    Args:
        directory: the directory of the store.
        wait_s: how many seconds to wait for the next shard.
        lookout: looks at the directory; used on the first rank only.
    """

    def look() -> tuple[Index, Arriving]:
        global _announcer
        index, waiting = lookout.news()
        if _announcer is not None:  # the announcer of an earlier training in this process
            _announcer.end()
        _announcer = Announcer(lookout, waiting)
        return Index.of([directory], []) if index is None else index, _announcer.arriving

    index, arriving = told_by_first(look)
    return FollowedStore(directory, wait_s, arriving, index)


def _with_opened(index: Index) -> Index:
    """Put the shards that this process has opened already into an announced index.

    The first rank has opened all shards of the index. A dataloader worker that was forked from the
    first rank has the shards that were open at the fork. Other processes have none.
    """
    looked = [] if _announcer is None else _announcer.lookout.shards
    numbers = zip(index.table["number"].tolist(), index.identities(), strict=True)
    for place, (number, identity) in enumerate(numbers):
        # the Announcer of an earlier training in this process may have another directory's shards
        if (
            number < len(looked)
            and looked[number].identity == identity
            and str(looked[number].path.parent) == index.directories[0]
        ):
            index.made[place] = looked[number]
    return index


class Arriving:
    """Hears of new shards, in any process of the training.

    Args:
        host, port: the address of the first rank's server.
        waiting: words for a message, from the first look: which shard is missing although a later
            shard is there; "" if no shard is missing.
    """

    def __init__(self, host: str, port: int, waiting: str = "") -> None:
        self.host, self.port, self._waiting = host, port, waiting
        self._heard = 0  # how many announcements this process has read
        self._client: tuple[int, Any] | None = None  # a process id, and that process's connection

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned process, without the connection: the process opens its own."""
        return {**vars(self), "_client": None}

    def news(self) -> News:
        """The next announced shards, or None; and words that name a missing shard, or "".

        Raises:
            StoreError: the first rank has found a shard that cannot be used, can no longer look
                for shards, or does not answer. After one of the first two, each later call raises
                again.
        """
        index: Index | None = None
        try:
            client = self._connected()
            while index is None and client.check([str(self._heard)]):
                text, _, packed = client.get(str(self._heard)).partition(b"\n")
                said = json.loads(text)
                if said["wrong"]:
                    raise StoreError(said["wrong"])
                index = _with_opened(Index.unpacked(packed)) if packed else None
                self._waiting, self._heard = said["waiting"], self._heard + 1
        except RuntimeError as error:  # torch raises it when it cannot reach the server
            raise StoreError(
                f"the first rank, at {self.host}, which looks for new shards, does not answer "
                f"({str(error).splitlines()[0]}): did it end?"
            ) from error
        return index, self._waiting

    def _connected(self) -> Any:
        # A forked worker must not use the client of its parent, which still uses the connection.
        if self._client is None or self._client[0] != os.getpid():
            client = torch.distributed.TCPStore(
                self.host, self.port, is_master=False, timeout=timedelta(seconds=ANSWER_S)
            )
            self._client = os.getpid(), client
        return self._client[1]


_announcer: Announcer | None = None  # stays None in processes that are not the first rank


@atexit.register
def end() -> None:
    """End the Announcer's thread before Python exits, as `lookahead.end_all` ends its threads."""
    if _announcer is not None:
        _announcer.end()


class Announcer:
    """Looks for new shards in a thread of the first rank, and announces them.

    Args:
        lookout: looks at the directory.
        waiting: see `Arriving`.

    Attributes:
        lookout: the argument.
        arriving: receives the announcements; sent to all ranks.

    Raises:
        StoreError: no server can be made at MASTER_ADDR, or at this host if it is not set.
    """

    def __init__(self, lookout: Lookout, waiting: str = "") -> None:
        self.lookout, self._waiting, self._announced = lookout, waiting, 0
        # the other ranks have already found the first rank at this address (torch's env://)
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        allow_most_files()  # each rank and each of its workers has a connection
        try:
            self._server = torch.distributed.TCPStore(
                host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_S)
            )
        except RuntimeError as error:
            raise StoreError(
                f"no server for the announcements of new shards can be reached at {host} "
                f"({str(error).splitlines()[0]}): a free port of the first rank must be open to "
                "all ranks, and MASTER_ADDR must be the first rank's address"
            ) from error
        self.arriving = Arriving(host, self._server.port, waiting)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron_r3 announcer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Have the thread end after its current look; wait for the end, at most END_S."""
        self._end.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                index, waiting = self.lookout.news()
                if index is not None or waiting != self._waiting:
                    self._announce(index, waiting)
                self._end.wait(POLL_S)
        except ValueError as error:  # a shard is refused: every rank that asks gets this error
            self._announce(None, wrong=str(error))
        except Exception as error:  # else no rank would learn that the thread has ended
            traceback.print_exc()
            self._announce(None, wrong=f"the first rank cannot look for new shards: {error!r}")

    def _announce(self, index: Index | None, waiting: str = "", wrong: str = "") -> None:
        # No pickle: anyone who reaches the port can set a key, and unpickling would run code.
        text = json.dumps({"waiting": waiting, "wrong": wrong}).encode()
        announced = text + b"\n" + (b"" if index is None else index.packed())
        self._server.set(str(self._announced), announced)  # type: ignore[arg-type]  # takes bytes
        self._announced, self._waiting = self._announced + 1, waiting
