"""Killed, out of disk, not allowed to write: all files are patched, none is, or status says so."""

import ctypes
import errno
import os
import resource
import signal
from pathlib import Path

import pytest
from patching_upstream import FILES, KILLED, ROUTER, refused, run_cli, snapshot

from megatron_r3.patching import apply, tree_files
from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.record import record_path
from megatron_r3.patching.tree import TreeState
from tests.unit.patching.test_apply import state

# The tree is a release, one between releases, or a release that takes some groups alone. The last
# two have a record, which is written before the other files and removed after them.
KINDS = {"release": {}, "unreleased": {"unreleased": True}, "groups": {"groups": ["r3", "guests"]}}


def make_kind(upstream, kind):
    if kind == "unreleased":
        text = (upstream.checkout / ROUTER).read_text()
        (upstream.checkout / ROUTER).write_text(text.replace("line 20\n", "line twenty\n"))
    if kind == "groups":
        for file, number in zip(upstream.series, ("0001", "0101", "0102", "0401"), strict=True):
            file.rename(file.with_name(f"{number}{file.name[4:]}"))


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("killed", ["apply", "revert"])
@pytest.mark.parametrize("then", [apply_series, revert_series])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_between_two_files(upstream, n, killed, then, kind):
    tree, patches = upstream.checkout, upstream.patches
    make_kind(upstream, kind)
    pristine = snapshot(tree)
    apply_series(tree, patches, **KINDS[kind])
    applied = snapshot(tree)
    words = ()
    if killed == "apply":
        revert_series(tree, patches)
        words = {"unreleased": ("--unreleased",), "groups": ("--groups", "r3", "guests")}
        words = words.get(kind, ())
    done = run_cli(killed, tree, "--patches", patches, *words, prelude=KILLED.format(n=n))
    assert done.returncode == -signal.SIGKILL, done.stderr
    recorded = record_path(tree).exists()
    num_files = n - (killed == "apply")  # the record is the first, written or removed
    assert recorded == (kind != "release" and num_files >= 0)
    untouched = TreeState.APPLIED if killed == "revert" else TreeState.PRISTINE
    if num_files < 0 and kind == "unreleased":
        untouched = TreeState.UNKNOWN
    assert state(upstream.checkout, upstream) is (
        TreeState.HALF_APPLIED if num_files > 0 else untouched
    )
    # The word was said already, unless the record was not written yet. A release of which nothing
    # is patched is a release, whatever was about to be applied to it.
    again = num_files < 0 or (num_files == 0 and kind == "groups" and killed == "apply")
    more = KINDS[kind] if then is apply_series and again else {}
    if then is revert_series and num_files < 0:
        assert snapshot_without_leftovers(tree) == pristine
    else:
        then(tree, patches, **more)
        assert snapshot(tree) == (applied if then is apply_series else pristine)
        assert record_path(tree).exists() == (then is apply_series and kind != "release")


def snapshot_without_leftovers(tree):
    return {name: it for name, it in snapshot(tree).items() if not name.endswith("-new")}


def test_a_killed_apply_is_told_by_status(upstream):
    arguments = (upstream.checkout, "--patches", upstream.patches)
    run_cli("apply", *arguments, prelude=KILLED.format(n=2))
    told = run_cli("status", *arguments)
    assert told.returncode == 1
    assert "apply puts in all patches, revert removes all" in told.stdout


def failing(real, after, error, times=10**6):
    """`real`, but its calls after the first `after` fail, `times` times."""
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if after < calls <= after + times:
            raise error
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("move", [apply_series, revert_series])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rename_that_fails_brings_all_back(upstream, monkeypatch, move, after, kind):
    tree, patches = upstream.checkout, upstream.patches
    make_kind(upstream, kind)
    if move is revert_series:
        apply_series(tree, patches, **KINDS[kind])
    before, recorded = snapshot(tree), record_path(tree).exists()
    options = KINDS[kind] if move is apply_series else {}
    error = OSError(errno.EACCES, "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace, after, error, times=1))
        with pytest.raises(PatchingError) as told:
            move(tree, patches, **options)
    assert (snapshot(tree), record_path(tree).exists()) == (before, recorded)
    files = (*(tree / path for path in FILES), record_path(tree))
    assert any(f"cannot write {file}: Perm" in str(told.value) for file in files)
    move(tree, patches, **options)


@pytest.mark.parametrize("most_bytes", [0, 100])
def test_a_full_disk_is_found_before_anything_changes(upstream, monkeypatch, most_bytes):
    def replace_files_on_a_full_disk(*args):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
        try:
            tree_files.replace_files(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with monkeypatch.context() as patch, refused(upstream.checkout, "too large", "megatron/core"):
        patch.setattr(apply, "replace_files", replace_files_on_a_full_disk)
        apply_series(upstream.checkout, upstream.patches)
    apply_series(upstream.checkout, upstream.patches)


def test_ctrl_c_brings_all_back(upstream, monkeypatch):
    before = snapshot(upstream.checkout)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace, 2, KeyboardInterrupt(), times=1))
        with pytest.raises(KeyboardInterrupt):
            apply_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.checkout) == before


def test_what_cannot_be_brought_back_is_named(upstream, monkeypatch):
    pristine = snapshot(upstream.checkout)
    error = OSError(errno.EROFS, "Read-only file system")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing(os.replace, 1, error))
        with pytest.raises(PatchingError) as told:
            apply_series(upstream.checkout, upstream.patches)
    assert "is half applied" in str(told.value)
    assert any(path in str(told.value) for path in FILES)
    assert state(upstream.checkout, upstream) is TreeState.HALF_APPLIED
    revert_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.checkout) == pristine


def bound_by_permissions():
    """In the child: root passes over permission bits, so it gives that up for good."""
    if os.geteuid() == 0:
        drop, dac_override, dac_read_search = 24, 1, 2
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (dac_override, dac_read_search):
            if libc.prctl(drop, capability, 0, 0, 0):
                raise OSError(ctypes.get_errno(), "cannot give up a capability")


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_read_only_tree(upstream, command):
    tree = upstream.checkout
    if command == "revert":
        apply_series(tree, upstream.patches)
    before = snapshot(tree, mtimes=True)
    folder = (tree / ROUTER).parent
    folder.chmod(0o555)
    done = run_cli(command, tree, "--patches", upstream.patches, preexec_fn=bound_by_permissions)
    folder.chmod(0o755)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot write {folder}")
    assert "Permission denied; nothing was changed" in done.stderr
    assert snapshot(tree, mtimes=True) == before


def test_an_unreadable_file(upstream):
    (upstream.checkout / ROUTER).chmod(0)
    done = run_cli(
        *("status", upstream.checkout, "--patches", upstream.patches),
        preexec_fn=bound_by_permissions,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {upstream.checkout / ROUTER}: Permission denied\n"


def test_a_read_only_file_in_a_folder_that_can_be_written(upstream):
    (upstream.checkout / ROUTER).chmod(0o444)
    before = snapshot(upstream.checkout)
    apply_series(upstream.checkout, upstream.patches)
    assert (upstream.checkout / ROUTER).stat().st_mode & 0o777 == 0o444
    revert_series(upstream.checkout, upstream.patches)
    assert snapshot(upstream.checkout) == before


def test_what_a_killed_process_left_is_removed(upstream):
    pristine = snapshot(upstream.checkout)
    arguments = ("apply", upstream.checkout, "--patches", upstream.patches)
    run_cli(*arguments, prelude=KILLED.format(n=1))
    assert len(list(Path(upstream.checkout).rglob("*.megatron-r3-new"))) > 1
    assert revert_series(upstream.checkout, upstream.patches).files == ()
    assert snapshot(upstream.checkout) == pristine
