"""A tiny upstream with its patches, and what the tests of patching share.

Two trees of the release line core_r9.1.0: a git checkout of core_v9.1.0, and the source package
9.1.1, which is no checkout, lacks the README and has another base of schedule.py. The patches
change, add and delete files, some of them executable, and router.py twice.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_r3.patching.git import PatchingError, blob_id

REPO = Path(__file__).parents[2]
LINE, TAG, PACKAGE = "core_r9.1.0", "core_v9.1.0", "9.1.1"
ROUTER = "megatron/core/transformer/moe/router.py"
README = "megatron/core/transformer/moe/README.md"
DISPATCHER = "megatron/core/dispatcher.py"
SCHEDULE = "megatron/core/schedule.py"
OLD = "megatron/core/old.sh"
NEW = "megatron/core/replay/hook.sh"
OTHER = "megatron/core/other.py"
FILES = (ROUTER, README, DISPATCHER, SCHEDULE, OLD, NEW)

BODY = "Why.\n\nOff (the default): nothing changes.\n\nForwarded: no, made up"
_ROUTER = "".join(f"line {i}\n" for i in range(1, 41))
_BASE = {
    ROUTER: _ROUTER,
    README: "# MoE\n\nRouting.\n",
    DISPATCHER: "def preprocess():\n    return splits\n",
    SCHEDULE: "# schedule\n\n\n\n\ndef step():\n    return forward()\n",
    OLD: "#!/bin/sh\necho old\n",
    OTHER: "other = 1\n",
}
_SCHEDULE_911 = _BASE[SCHEDULE].replace("# schedule", "# the schedule of 9.1.1")
# subject, and what the patch makes of each file; trailing blanks: a git that "fixes" them is seen
_PATCHES = (
    (
        "Ask the hook",
        {
            ROUTER: lambda text: text.replace("line 10\n", "line 10\nhook = None   \n"),
            DISPATCHER: lambda text: text.replace("splits", "plan or splits"),
        },
    ),
    (
        "Bind the hook to the microbatch",
        {
            ROUTER: lambda text: text.replace("line 30\n", "line 30\nbind(hook)\n"),
            SCHEDULE: lambda text: text.replace("forward()", "bind(forward)()"),
        },
    ),
    ("Add replay, drop the old script", {NEW: lambda _: "#!/bin/sh\necho new\n", OLD: None}),
    ("Document the hook in the README", {README: lambda text: text + "\nReplay.\n"}),
)


# kills itself (-9) at the n-th rename or removal of a file of the tree
KILLED = """
import os, signal
left = {n}
def dying(real):
    def call(*args, **kwargs):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **kwargs)
    return call
import megatron_r3.patching.tree_files as write
write._put = dying(write._put)
"""


@dataclass
class Upstream:
    """Copies that a test may break."""

    checkout: Path
    package: Path
    patches: Path

    @property
    def series(self):
        return sorted((self.patches / LINE).glob("*.patch"))


def git(*args, cwd, **kwargs):
    """Git, as a person with a name would run it; its output."""
    env = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    config = ("user.name=A Person", "user.email=person@example.com", "core.fsync=none")
    command = ["git", *(word for setting in config for word in ("-c", setting)), *args]
    return subprocess.run(
        command, cwd=cwd, env=env, check=True, text=True, capture_output=True, **kwargs
    ).stdout


def clone(checkout, folder, kind=""):
    """A second repository: a "worktree" of the first, or what git clone gives with this flag."""
    # From an address with a scheme git copies as over a network, so that --depth works; from a path
    # it takes all objects, those too that no commit has.
    source = str(checkout) if kind in ("--shared", "--local") else f"file://{checkout}"
    if kind == "worktree":
        git("worktree", "add", "--quiet", "--detach", str(folder), cwd=checkout)
    else:
        git("clone", "--quiet", *([kind] if kind else []), source, str(folder), cwd="/")
    return folder


def commit(tree, subject):
    git("add", "--all", cwd=tree)
    git("commit", "--quiet", "-m", subject, cwd=tree)
    return git("rev-parse", "HEAD", cwd=tree).strip()


def write(tree, path, text, executable=False):
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)
    (tree / path).chmod(0o755 if executable else 0o644)


@functools.cache
def _built() -> Upstream:
    folder = Path(tempfile.mkdtemp(prefix="upstream-"))
    atexit.register(shutil.rmtree, folder)
    built = Upstream(folder / "checkout", folder / "package", folder / "patches")
    _write_package(built.package)
    tree = built.checkout
    for path, text in _BASE.items():
        write(tree, path, text, path in (DISPATCHER, OLD))
    git("init", "--quiet", cwd=tree)
    base = commit(tree, "Release")
    git("tag", TAG, cwd=tree)
    for subject, changes in _PATCHES:
        for path, change in changes.items():
            if change is None:
                (tree / path).unlink()
            else:
                before = (tree / path).read_text() if (tree / path).exists() else ""
                write(tree, path, change(before), path in (DISPATCHER, NEW))
        commit(tree, f"{subject}\n\n{BODY}")
    flags = ["--zero-commit", "--no-signature", "--no-numbered", "--full-index", "--no-renames"]
    git("format-patch", *flags, "-o", str(built.patches / LINE), base, cwd=tree)
    git("reset", "--quiet", "--hard", base, cwd=tree)
    (built.patches / "versions.toml").write_text(_versions(base))
    return built


def _write_package(tree):
    for path, text in _BASE.items():
        if path != README:
            text = _SCHEDULE_911 if path == SCHEDULE else text
            write(tree, path, text, path in (DISPATCHER, OLD))


def _versions(base):
    patched = _PATCHES[1][1][SCHEDULE](_SCHEDULE_911)
    blobs = [blob_id(text.encode()) for text in (_SCHEDULE_911, patched)]
    return f"""\
default = "{PACKAGE}"

[lines."{LINE}"]
python = ">=3.10"
image = "some/image:1"
status = "supported"

[[lines."{LINE}".trees]]
name = "{TAG}"
commit = "{base}"

[[lines."{LINE}".trees]]
name = "{PACKAGE}"
pypi = "megatron-core=={PACKAGE}"
sdist_sha256 = "{"0" * 64}"
absent = ["{README}"]
blobs = {{ "{SCHEDULE}" = {blobs} }}
"""


def make_upstream(folder) -> Upstream:
    built = _built()
    copy = Upstream(folder / "checkout", folder / "package", folder / "patches")
    for source, target in zip(vars(built).values(), vars(copy).values(), strict=True):
        shutil.copytree(source, target)
    return copy


def add_line(upstream, line, commit_id, left_out=()):
    """A second line with the patches of the first, but for those whose numbers are `left_out`."""
    shutil.copytree(upstream.patches / LINE, upstream.patches / line)
    for patch in (upstream.patches / line).iterdir():
        if int(patch.name[:4]) in left_out:
            patch.unlink()
    with open(upstream.patches / "versions.toml", "a") as versions:
        versions.write(
            f'\n[lines."{line}"]\npython = ">=3.10"\nimage = "i"\nstatus = "new"\n\n'
            f'[[lines."{line}".trees]]\nname = "{line}-tree"\ncommit = "{commit_id}"\n'
        )


def snapshot(tree, mtimes=False):
    """Every file and folder outside .git: its mode and bytes, and when it was written."""
    found = {}
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree)
        if ".git" not in name.parts:
            info = path.lstat()
            data = path.read_bytes() if path.is_file() else None
            found[str(name)] = (info.st_mode, data, info.st_mtime_ns if mtimes and data else None)
    return found


@contextmanager
def refused(tree, *words):
    """The body raises a PatchingError that says all of `words`, and the tree is as before."""
    before = snapshot(tree, mtimes=True)
    with pytest.raises(PatchingError) as error:
        yield
    assert snapshot(tree, mtimes=True) == before
    for word in words:
        assert word in str(error.value)


def run_cli(*args, prelude="", env=None, **kwargs):
    """Run the command line in a process of its own, `prelude` first."""
    keepers = args[0] in ("verify", "export", "bump")
    module = "keepers.patches" if keepers else "megatron_r3.cli"
    code = f"import sys\n{prelude}\nfrom {module} import main\nsys.exit(main(sys.argv[1:]))"
    env = {**os.environ, **(env or {}), "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, text=True, capture_output=True, **kwargs)
