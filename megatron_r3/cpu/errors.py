"""What may go wrong with Megatron on the CPU."""

from __future__ import annotations


class InstallError(RuntimeError):
    """Megatron cannot run on the CPU in this process; the message says what to do."""


class NotEmulated(RuntimeError):
    """A call that has no meaning on the CPU; raised so that nothing returns junk silently."""


class RankError(RuntimeError):
    """A rank raised, or ended without a result; the message has its traceback and its log."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


class RankTimeout(RankError):
    """Ranks did not end in time; the message has the stacks of the first one."""


class WorkerError(RuntimeError):
    """A tree's worker has ended by itself; the message has the end of its log."""
