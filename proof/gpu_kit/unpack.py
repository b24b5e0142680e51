#!/usr/bin/env python3
"""Puts the kit's parts together on a GPU machine and runs the session: docs/gpu.md.

    python3 run                     # beside at least one part
    python3 run --rehearse          # tiny, on the CPU

`make gpu-kit` writes a copy of this file, with the table of the parts filled in, as
`build/gpu-kit/run`. The file stands alone: it needs Python 3.11 or newer with pip, and nothing else
of the kit. The parts may come one by one: each call takes those that lie beside it into a folder
outside (--into), and does what has become possible. A later call goes on where this one stopped.

Exit status: 0 every step has a result and none failed; 1 a step failed or ran out of time; 2 an
error (a damaged part, no CUDA device); 3 parts are missing; 4 steps are left for another call.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# `make gpu-kit` replaces this line. {"parts": {name: sha256}, "digest": sha256 of the parts' table}
KIT: dict[str, Any] = {}

MISSING = 3


class KitError(Exception):
    """What the user must know and can mend; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    """Take parts; when all are there unpack and install once, then run the session."""
    started = time.time()
    args = _arguments(argv)
    into = args.into.expanduser().resolve()
    try:
        with _alone(into) as lock:
            missing = take_parts(Path(__file__).resolve().parent, into, KIT)
            if missing and not (into / "kit").is_dir():
                there = len(KIT["parts"]) - len(missing)
                print(f"{into} has {there} of {len(KIT['parts'])} parts")
                print(f"missing: {', '.join(missing)}: bring them, and call this again")
                return MISSING
            unpack(into, KIT)
            # those of Transformer Engine are installed with what is compiled (proof/gpu_kit/te.py)
            install(into / "kit" / "packages" / "site", into / "site")
            _start_session(into, args, started, lock)
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run", description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--into",
        type=Path,
        default=Path("~/megatron-r3-gpu-kit"),
        help="keeps parts, packages and results between the calls (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="a folder that gets a copy of all results so far")
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.5,
        help="how long this call may take: a step whose time limit does not fit into the rest is "
        "left for another call (default: %(default)s)",
    )
    parser.add_argument("--rehearse", action="store_true", help="every step tiny, on the CPU")
    args = parser.parse_args(argv)
    if not KIT:
        parser.error(
            "this is the source of the kit's script: make gpu-kit writes build/gpu-kit/run"
        )
    return args


@contextmanager
def _alone(into: Path) -> Iterator[int]:
    """Hold the folder's lock, an open file, which the system frees however this process ends."""
    into.mkdir(parents=True, exist_ok=True)
    with (into / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KitError(f"{into}: another call is at work there: wait for its end") from None
        yield file.fileno()


def take_parts(beside: Path, into: Path, kit: dict[str, Any]) -> list[str]:
    """Copy the parts that lie in `beside` to `into`/parts; return the names of those still missing.

    Raises:
        KitError: a part is not what was built, or `into` holds another kit. A damaged part is not
            kept.
    """
    _refuse_another_kit(into, kit)
    parts = into / "parts"
    parts.mkdir(exist_ok=True)
    for name, sha256 in kit["parts"].items():
        source, target = beside / name, parts / name
        if target.exists() or not source.exists():
            continue
        copy = parts / f"{name}.copy"
        shutil.copyfile(source, copy)
        _check(copy, source, sha256)
        copy.rename(target)  # so that a part that is there is whole
        print(f"took {name}", flush=True)
    return [name for name in kit["parts"] if not (parts / name).exists()]


def _refuse_another_kit(into: Path, kit: dict[str, Any]) -> None:
    digest = into / "digest"
    if not digest.exists():
        digest.write_text(kit["digest"])
    if digest.read_text() != kit["digest"]:
        raise KitError(f"{into} holds parts of another kit: remove it, or name another with --into")


def _check(file: Path, source: Path, sha256: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        file.unlink()
        raise KitError(f"{source} is damaged: its sha256 is {found}, not {sha256}: bring it again")


def unpack(into: Path, kit: dict[str, Any]) -> None:
    """Put the parts together, and unpack them as `into`/kit; nothing if that was done before.

    Raises:
        KitError: a part changed on the disk, or what the parts hold is no archive.
    """
    if (into / "kit").is_dir():
        return
    whole, folder = into / "kit.tar", into / "kit.new"
    with whole.open("wb") as target:
        for name, sha256 in kit["parts"].items():
            _check(into / "parts" / name, into / "parts" / name, sha256)
            with (into / "parts" / name).open("rb") as part:
                shutil.copyfileobj(part, target, 1 << 20)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _extract(whole, folder)
        for archive in sorted(folder.glob("*.tar.gz")):
            _extract(archive, folder / archive.name.removesuffix(".tar.gz"))
            archive.unlink()
    except (tarfile.TarError, EOFError) as error:
        raise KitError(f"{whole} cannot be unpacked: {error}: build the kit again") from None
    whole.unlink()
    folder.rename(into / "kit")  # last, so that a kit that is there is whole
    print(f"unpacked {into / 'kit'}", flush=True)


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def install(packages: Path, target: Path) -> None:
    """Install the wheels of a folder into `target` with pip; nothing if that was done before.

    Without wheels, as in a kit that was built for a rehearsal, `target` is an empty folder.

    Raises:
        KitError: pip refuses, for example because the wheels are for another Python.
    """
    if target.is_dir():
        return
    new = target.with_name(f"{target.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    wheels = sorted(map(str, packages.glob("*.whl")))
    if wheels:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        command += ["--no-cache-dir", "--disable-pip-version-check", "--target", str(new), *wheels]
        pip = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if pip.returncode:
            raise KitError(f"pip cannot install {packages}: {' '.join(pip.stdout.split()[-40:])}")
    new.rename(target)
    print(f"installed {len(wheels)} packages into {target}", flush=True)


def _start_session(into: Path, args: argparse.Namespace, started: float, lock: int) -> NoReturn:
    """Become the session: a process that is killed then leaves no session behind it."""
    kit = into / "kit"
    paths = [kit / "checkout", kit / "tree", into / "site"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "proof.gpu_kit.session", "--into", str(into)]
    command += ["--until", str(started + 60 * args.minutes)]
    command += ["--rehearse"] if args.rehearse else []
    command += ["--out", str(args.out.resolve())] if args.out else []
    os.set_inheritable(lock, True)  # the session holds the folder's lock until it ends
    sys.stdout.flush()
    # in the checkout: what a step imports, and what it opens by a relative path, is the kit's
    os.chdir(kit / "checkout")
    os.execve(sys.executable, command, env)


if __name__ == "__main__":
    sys.exit(main())
