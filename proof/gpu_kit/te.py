"""Compiles transformer_engine_torch in the background, while steps that do not need it run.

    python -m proof.gpu_kit.te INTO

INTO is the folder of the kit on the machine. The compiled package and the others of Transformer
Engine are then installed into INTO/te. The state is in INTO/te-build: `log`, `state.json` once the
compile has ended, and `lock`, which the process holds as long as it lives. So a compile that was
killed is told from one that goes on, also by a later call.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PACKAGE = "transformer_engine_torch"
PIP = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
OFFLINE = ("--no-index", "--no-deps", "--no-cache-dir")
# cores that the compile leaves to the step that runs meanwhile
SPARED_CORES = 4
# what shows that all parts of it fit together
TRIAL = "import transformer_engine.pytorch; import transformer_engine_torch"


@dataclass(frozen=True)
class Build:
    """How far the compile is.

    Attributes:
        status: absent (never started), running, passed, failed or killed.
        seconds: how long it took; 0 unless it passed or failed.
        reason: why it failed; else empty.
    """

    status: str
    seconds: float = 0.0
    reason: str = ""


def state(into: Path) -> Build:
    """How far the compile of the kit in `into` is."""
    folder = into / "te-build"
    if (folder / "state.json").exists():
        return Build(**json.loads((folder / "state.json").read_text()))
    if not (folder / "lock").exists():
        return Build("absent")
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return Build("running")
    return Build("killed", reason="the compile was killed; a later call starts it again")


def start(into: Path, env: dict[str, str]) -> None:
    """Start the compile in a session of its own, which goes on when this call of the kit ends."""
    folder = into / "te-build"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("a") as lock, (folder / "log").open("a") as log:
        # The child inherits the open file, and the lock with it: there is no moment without a lock.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        subprocess.Popen(
            [sys.executable, "-m", "proof.gpu_kit.te", str(into)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[lock.fileno()],
            start_new_session=True,
        )


def main(argv: list[str]) -> int:
    """Compile, install, try to import; write state.json."""
    into = Path(argv[0])
    started = time.monotonic()
    os.nice(19)  # the steps that run meanwhile are measured
    reason = compiled(into)
    status = "failed" if reason else "passed"
    build = Build(status, round(time.monotonic() - started, 1), reason)
    new = into / "te-build" / "state.json.new"
    new.write_text(json.dumps(asdict(build)) + "\n")
    new.rename(into / "te-build" / "state.json")
    print(build, flush=True)
    return 1 if reason else 0


def compiled(into: Path) -> str:
    """Compile and install the package; return why it failed, or nothing."""
    sources = sorted((into / "kit" / "packages" / "source").glob(f"{PACKAGE}-*.tar.gz"))
    if len(sources) != 1:
        return "the kit has no sources of transformer_engine_torch: it was built for a rehearsal"
    folder = into / "te-build"
    wheels = folder / "wheels"
    wheel = [*PIP, "wheel", "-v", *OFFLINE, "--no-build-isolation", "-w", str(wheels)]
    if not _ran([*wheel, str(sources[0])], compiler_environment()):
        return f"it does not compile; the log: {folder / 'log'}"
    if not installed(into, wheels):
        return f"it cannot be installed; the log: {folder / 'log'}"
    paths = [into / "te", into / "site"]
    if not _ran([sys.executable, "-c", TRIAL], {"PYTHONPATH": os.pathsep.join(map(str, paths))}):
        return f"it cannot be imported; the log: {folder / 'log'}"
    return ""


def installed(into: Path, compiled_wheels: Path) -> bool:
    """Install the compiled wheel and those of the kit, all at once, into `into`/te; False if not.

    All at once, since three of them put files into the folder transformer_engine, and pip leaves a
    folder of a target that is there already as it is: a wheel that comes later loses its files.
    """
    shutil.rmtree(into / "te", ignore_errors=True)
    folders = (into / "kit" / "packages" / "te", compiled_wheels)
    wheels = [str(path) for folder in folders for path in sorted(folder.glob("*.whl"))]
    return _ran([*PIP, "install", *OFFLINE, "--target", str(into / "te"), *wheels])


def _ran(command: list[str], env: dict[str, str] | None = None) -> bool:
    print(f"$ {' '.join(command)}", flush=True)
    run = subprocess.run(command, env={**os.environ, **(env or {})}, check=False)
    return run.returncode == 0


def compiler_environment() -> dict[str, str]:
    """Where CUDA's headers are, and how many files are compiled at once.

    The toolkit has the headers of CUDA, but often not those of cuDNN and NCCL. The packages that
    torch came with have them, each in a folder of its own; the compiler looks there last.
    """
    from torch.utils.cpp_extension import CUDA_HOME

    includes: list[str] = []
    for path in map(Path, sys.path):
        includes += sorted(map(str, (path / "nvidia").glob("*/include")))
    jobs = os.environ.get("MAX_JOBS") or str(max(1, (os.cpu_count() or 1) - SPARED_CORES))
    env = {
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # it would try to download a wheel first
        "MAX_JOBS": jobs,
        "CPATH": os.pathsep.join(filter(None, [os.environ.get("CPATH"), *includes])),
    }
    if CUDA_HOME:
        env["CUDA_HOME"] = str(CUDA_HOME)
        env["PATH"] = os.pathsep.join([str(Path(CUDA_HOME) / "bin"), os.environ["PATH"]])
    else:
        env["NVTE_BUILD_USE_NVIDIA_WHEELS"] = "1"
    return env


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
