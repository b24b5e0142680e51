"""Forked ranks: their results, their failures, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from proof.fidelity.rig import forkserver
from proof.fidelity.rig.forkserver import run_ranks
from proof.fidelity.rig.rank_process import RankError, RankTimeout


def gone(pid: int) -> bool:
    """Whether a process ends within a moment (a zombie has ended)."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_results_come_in_rank_order() -> None:
    def case(rank: int) -> Any:
        dist.init_process_group("gloo")
        total = torch.tensor([rank])
        dist.all_reduce(total)
        return rank, total, os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]

    results = run_ranks(case, 3, timeout_s=60)
    assert results == [(rank, torch.tensor([3]), str(rank), "3") for rank in range(3)]


def test_environment_and_logs(tmp_path: Path) -> None:
    def case(rank: int) -> str:
        print(f"out {rank}")
        print(f"err {rank}", file=sys.stderr)
        os.system("echo from a child")
        return os.environ["GREETING"]

    assert run_ranks(case, 2, timeout_s=60, env={"GREETING": "hi"}, log_dir=tmp_path) == ["hi"] * 2
    log = (tmp_path / "rank1.log").read_text()
    assert all(line in log for line in ("out 1", "err 1", "from a child"))


def test_an_exception_comes_with_its_rank_traceback_and_log() -> None:
    def fail_here(rank: int) -> None:
        print("what it said before")
        if rank == 1:
            raise ValueError("the reason")
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(RankError) as error:
        run_ranks(fail_here, 2, timeout_s=60)
    assert time.monotonic() - begin < 20  # the other rank is not waited for
    assert error.value.rank == 1
    for text in ("in fail_here", "ValueError: the reason", "what it said before"):
        assert text in str(error.value)


def test_the_cause_is_reported_and_not_what_it_led_to() -> None:
    def case(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 1:
            time.sleep(0.5)
            raise ValueError("the reason")
        dist.barrier()

    with pytest.raises(RankError, match="the reason"):
        run_ranks(case, 2, timeout_s=60)
    lost = RankError(0, "RuntimeError: Connection closed by peer")
    assert forkserver._to_blame([lost, RankError(1, "the reason")]).rank == 1
    assert forkserver._to_blame([lost]).rank == 0


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda: os._exit(7), "exit status 7"),
        # in this thread: a signal of os.kill may reach another one, after the result was sent
        (lambda: signal.raise_signal(signal.SIGSEGV), "SIGSEGV"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: open, None),
        (lambda: lambda: 1, "pickle"),
    ],
)
def test_other_ends(end: Any, text: str | None) -> None:
    if text is None:
        assert run_ranks(lambda rank: end(), 1, timeout_s=60) == [open]
        return
    with pytest.raises(RankError, match=text):
        run_ranks(lambda rank: end(), 1, timeout_s=60)


def test_a_script_that_exits_well_has_no_result() -> None:
    assert run_ranks(lambda rank: sys.exit(0), 2, timeout_s=60) == [None, None]


def test_a_hang_is_reported_with_its_stack() -> None:
    def hang_here(rank: int) -> None:
        if rank > 0:
            time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(RankTimeout, match=r"ranks 1, 2 ran past 0.5 s") as error:
        run_ranks(hang_here, 3, timeout_s=0.5)
    assert "hang_here" in str(error.value)
    assert time.monotonic() - begin < 20


def start_sleepers(folder: Path) -> Any:
    """A case whose ranks start processes of their own and write down all process ids."""

    def case(rank: int) -> None:
        child = subprocess.Popen(["sleep", "60"])
        (folder / f"{rank}.tmp").write_text(f"{os.getpid()} {child.pid}")
        (folder / f"{rank}.tmp").rename(folder / f"{rank}.pids")
        time.sleep(60)

    return case


def pids_in(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


def test_no_process_is_left_after_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(RankTimeout):
        run_ranks(start_sleepers(tmp_path), 2, timeout_s=5)
    pids = pids_in(tmp_path)
    assert len(pids) == 4
    assert all(gone(pid) for pid in pids)
