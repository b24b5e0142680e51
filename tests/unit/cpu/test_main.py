"""`python -m megatron_r3.cpu`: what it says and how it ends where nothing can be run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_r3.cpu import CPU_ARGS, InstallError
from megatron_r3.cpu import __main__ as cli
from megatron_r3.cpu.attention import zigzag
from megatron_r3.cpu.errors import is_users_mistake
from proof.fidelity.rig.forkserver import run_ranks
from proof.fidelity.rig.rank_process import RankError
from proof.fidelity.rig.worker import TreeWorker


def ended(folder: Path, *argv: str, **variables: str) -> tuple[str, str]:
    """How a process ends that runs the command with these arguments: its status, and what it says.

    The process is a fork of one that has torch, which costs nothing to start.
    """

    def case(rank: int) -> None:
        os.chdir(folder)
        os.environ.update(variables)
        cli.main([*argv])

    with pytest.raises(RankError) as caught:
        run_ranks(case, 1, timeout_s=60)
    _, status, rest = caught.value.text.partition("exit status ")
    return status + rest[:1], caught.value.text.partition("--- log of rank 0\n")[2]


def test_no_script_is_a_usage_error(tmp_path: Path) -> None:
    assert ended(tmp_path) == ("exit status 2", cli.USAGE.rstrip())


def test_help_lists_the_arguments_that_megatron_needs(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    text = capsys.readouterr().out
    assert all(argument in text for argument in CPU_ARGS)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    status, text = ended(tmp_path, "no_such.py")
    assert status == "exit status 2"
    assert text.startswith("error: no such script: no_such.py\n\nusage: ")


def test_no_megatron(tmp_path: Path) -> None:
    """In a process of its own, as a user starts it."""
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_r3.cpu", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: Megatron-LM is not importable: put its tree on PYTHONPATH"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("ranks", "variable", "threads"),
    [(1, "1", 1), (1, "3,2", 3), (1, None, 8), (1, "", 8), (2, "1", 4), (16, None, 1)],
)
def test_only_a_rank_that_is_alone_takes_the_threads_that_the_user_chose(
    ranks: int, variable: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "usable_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert cli.threads_of_a_rank() == threads


def test_threads_that_are_no_number_are_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    assert ended(tmp_path, "script.py", OMP_NUM_THREADS="many") == (
        "exit status 2",
        "error: OMP_NUM_THREADS='many': expected a whole number above 0",
    )


def test_a_worker_says_so_too(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="Megatron-LM is not importable"):
        TreeWorker(tmp_path)


def caught(error_from: object, *args: object) -> Exception:
    with pytest.raises(Exception) as caught:
        error_from(*args)  # type: ignore[operator]
    return caught.value


def test_whose_mistake_it_is() -> None:
    assert is_users_mistake(caught(zigzag, 3, 2, 0))
    assert not is_users_mistake(caught(int, "x"))  # raised outside of this package
    assert not is_users_mistake(caught(zigzag, "3", 2, 0))  # a TypeError is a fault of the program


def ends_with(error: Exception, *argv: str) -> str:
    """What a rank says that ends with this error."""

    def case(rank: int) -> None:
        sys.argv = ["script.py", *argv]
        sys.modules.setdefault("megatron.training.arguments", sys)  # of a pretrain script
        cli._report(error)

    with pytest.raises(RankError, match="exit status 1") as caught:
        run_ranks(case, 1, timeout_s=60)
    return caught.value.text.partition("--- log of rank 0\n")[2]


def test_a_users_mistake_is_one_line() -> None:
    error = caught(zigzag, 3, 2, 0)
    assert ends_with(error) == f"error: {error}"


def no_nccl() -> None:
    raise RuntimeError("Distributed package doesn't have NCCL built in")


def test_another_error_has_its_traceback_and_names_the_argument_that_it_lacks() -> None:
    text = ends_with(caught(no_nccl), "--transformer-impl", "local", CPU_ARGS[1], *CPU_ARGS[3:])
    assert text.startswith("Traceback")
    assert text.splitlines()[-1] == (
        "hint: a Megatron pretrain script on the CPU also needs: --distributed-backend=gloo"
    )
    full = ends_with(caught(no_nccl), *CPU_ARGS)
    assert "hint" not in full
    assert "RuntimeError: Distributed package" in full
