"""The kit's script: parts that are missing, damaged or of another kit; it unpacks once."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from proof.gpu_kit import build, unpack

# stands where the kit's session is: says how it was called, and from where
SESSION = """
import json, sys
from pathlib import Path
into = Path(sys.argv[sys.argv.index("--into") + 1])
calls = into / "calls.json"
known = json.loads(calls.read_text()) if calls.exists() else []
calls.write_text(json.dumps([*known, {"argv": sys.argv[1:], "cwd": str(Path.cwd())}]))
"""
PART = 6000


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `run` and some parts, as make gpu-kit leaves it; the packages are none."""
    checkout = tmp_path / "checkout"
    (checkout / "proof" / "gpu_kit").mkdir(parents=True)
    # without it Python would take a whole package of this name from further down its path
    (checkout / "proof" / "__init__.py").touch()
    (checkout / "proof" / "gpu_kit" / "session.py").write_text(SESSION)
    # does not compress, so that there are several parts
    noise = bytes((i * i * 7 + i // 251) % 256 for i in range(3 * PART))
    (checkout / "noise").write_bytes(noise)
    work = tmp_path / "work"
    work.mkdir()
    build._pack(checkout, work / "checkout.tar.gz")
    (work / "kit.json").write_text("{}")
    monkeypatch.setattr(build, "PART_BYTES", PART)
    build.write_kit(work, tmp_path / "kit", rehearse=False)
    return tmp_path / "kit"


def call(beside: Path, into: Path, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(beside / "run"), "--into", str(into), *more]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)


def bring(kit: Path, beside: Path, *names: str) -> Path:
    """A folder with `run` and these parts only."""
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for name in ("run", *names):
        shutil.copy(kit / name, beside)
    return beside


def parts_of(kit: Path) -> list[str]:
    return sorted(path.name for path in kit.glob("part-*"))


def test_parts_are_no_larger_than_asked_for_and_make_the_whole(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.write_bytes(bytes(range(250)))
    parts = build.cut(whole, 100)
    files = [whole.with_name(name) for name in parts]
    assert [file.stat().st_size for file in files] == [100, 100, 50]
    assert b"".join(file.read_bytes() for file in files) == whole.read_bytes()
    assert list(parts) == ["part-1of3", "part-2of3", "part-3of3"]
    whole.write_bytes(b"")
    assert list(build.cut(whole, 100)) == ["part-1of1"]


def test_parts_that_come_one_by_one(kit: Path, tmp_path: Path) -> None:
    first, second, *rest = parts_of(kit)
    assert rest
    into = tmp_path / "into"
    done = call(bring(kit, tmp_path / "brought", second), into)
    assert done.returncode == unpack.MISSING
    assert f"missing: {first}, {rest[0]}" in done.stdout
    assert not (into / "kit").exists()
    done = call(bring(kit, tmp_path / "brought", first, *rest), into, "--rehearse")
    assert done.returncode == 0, done.stderr
    assert (into / "kit/checkout/noise").read_bytes() == (tmp_path / "checkout/noise").read_bytes()
    (only,) = json.loads((into / "calls.json").read_text())
    assert "--rehearse" in only["argv"]
    assert only["cwd"] == str(into / "kit" / "checkout")


def test_a_later_call_needs_no_parts_and_unpacks_nothing_again(kit: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    assert call(kit, into, "--out", str(tmp_path / "results")).returncode == 0
    (into / "kit" / "checkout" / "noise").write_text("not unpacked again")
    shutil.rmtree(into / "parts")
    done = call(bring(kit, tmp_path / "brought"), into, "--minutes", "3")
    assert done.returncode == 0, done.stderr
    assert (into / "kit" / "checkout" / "noise").read_text() == "not unpacked again"
    first, second = json.loads((into / "calls.json").read_text())
    assert first["argv"][-2:] == ["--out", str(tmp_path / "results")]
    assert "--out" not in second["argv"]


def test_a_damaged_part_is_named_and_not_kept(kit: Path, tmp_path: Path) -> None:
    beside = bring(kit, tmp_path / "brought", *parts_of(kit))
    damaged = beside / parts_of(kit)[1]
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    into = tmp_path / "into"
    done = call(beside, into)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {damaged} is damaged: its sha256 is ")
    assert done.stderr.count("\n") == 1
    assert not (into / "parts" / damaged.name).exists()
    assert not (into / "kit").exists()
    shutil.copy(kit / damaged.name, beside)  # brought again
    assert call(beside, into).returncode == 0


def test_a_part_that_changes_on_the_disk_is_found(kit: Path, tmp_path: Path) -> None:
    first, *rest = parts_of(kit)
    into = tmp_path / "into"
    call(bring(kit, tmp_path / "brought", first), into)
    (into / "parts" / first).write_bytes(b"short")
    done = call(bring(kit, tmp_path / "brought", *rest), into)
    assert done.returncode == 2
    assert f"{first} is damaged" in done.stderr


def test_an_unpack_that_was_cut_off_is_done_again(kit: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    (into / "kit.new" / "checkout").mkdir(parents=True)
    (into / "kit.new" / "checkout" / "old").touch()
    (into / "site.new").mkdir()
    assert call(kit, into).returncode == 0
    assert not (into / "kit" / "checkout" / "old").exists()
    assert sorted(path.name for path in into.iterdir() if path.name.endswith(".new")) == []


def test_parts_of_another_kit_are_refused(kit: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    (into / "digest").write_text("another")
    done = call(kit, into)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {into} holds parts of another kit: remove it, or name another with --into\n"
    )


def test_a_call_beside_another_is_refused(kit: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    with (into / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = call(kit, into)
    assert done.returncode == 2
    assert "another call is at work there" in done.stderr
    assert call(kit, into).returncode == 0


def test_wheels_for_another_python_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "a-1.0-cp27-cp27m-win32.whl").touch()
    with pytest.raises(
        unpack.KitError, match=r"pip cannot install .*not a supported wheel"
    ) as error:
        unpack.install(tmp_path / "wheels", tmp_path / "site")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "site").exists()


def test_the_source_of_the_script_runs_nothing(tmp_path: Path) -> None:
    argv = [sys.executable, str(Path(unpack.__file__)), "--into", str(tmp_path / "into")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "make gpu-kit writes build/gpu-kit/run" in done.stderr
    assert not (tmp_path / "into").exists()


def test_the_built_script_has_the_table_and_is_executable(kit: Path) -> None:
    text = (kit / "run").read_text()
    assert all(f'"{name}": "' in text for name in parts_of(kit))
    assert (kit / "run").stat().st_mode & 0o111
