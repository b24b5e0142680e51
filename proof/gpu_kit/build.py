"""`make gpu-kit`: builds the kit for a GPU machine without a network, here, where no GPU is needed.

    python -m proof.gpu_kit.build --out build/gpu-kit
    python -m proof.gpu_kit.build --out build/gpu-kit --repo CLONE   # with a tag's pretrain_gpt.py
    python -m proof.gpu_kit.build --out build/gpu-kit-rehearsal --rehearse

The kit has this checkout, a patched tree of Megatron-LM, the demo's rollouts and checkpoint, and
the packages of packages.toml. They make one archive, which is cut into parts of at most 56 MiB. The
file `run` has the checksums of the parts, and puts them together (proof/gpu_kit/unpack.py).

A rehearsal is built without the packages, with small parts, and also of changes that are not
committed yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.process import Failed
from demo.stages import Stages
from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.fetch import clone_tree
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.versions import patches_folder, read_versions
from proof.fidelity.trees import patched_copy, unpatched_copy
from proof.gpu_kit import unpack
from proof.gpu_kit.packages import download

ROOT = Path(__file__).parents[2]
PART_BYTES = 56 << 20
# of a rehearsal: small, so that its kit has several parts as well
REHEARSAL_PART_BYTES = 8 << 20
# of a tag's tree, what no training needs
LEFT_OUT = ("tests", "docs", "examples", "images", ".github", ".gitlab", "docker")
TABLE = "KIT: dict[str, Any] = {}\n"


class BuildError(Exception):
    """What the user can mend; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    """Build the kit, and print what it has."""
    args = _arguments(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-kit-") as temp:
            facts = collect(Path(temp), args)
            table = write_kit(Path(temp), args.out, args.rehearse)
    except (BuildError, PatchingError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts, indent=1))
    for name in table["parts"]:
        print(f"{(args.out / name).stat().st_size / 2**20:8.1f} MiB  {args.out / name}")
    print(f"bring these and {args.out / 'run'} to the machine, then: python3 run")
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="build", description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of run and the parts")
    parser.add_argument(
        "--repo",
        type=Path,
        help="a clone of Megatron-LM: the kit then has the line's tag with its own pretrain_gpt.py "
        "(default: the sources on PyPI, which have no such script; ours runs in its place)",
    )
    parser.add_argument(
        "--demo",
        type=Path,
        default=ROOT / "build" / "demo",
        help="what make demo made; what is missing there is made (default: %(default)s)",
    )
    parser.add_argument("--rehearse", action="store_true", help="without packages, in small parts")
    return parser.parse_args(argv)


def collect(work: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fill `work` with what the archive has; return kit.json, which says what that is."""
    commit, changed = _checkout(work / "checkout.tar.gz", args.rehearse)
    with tempfile.TemporaryDirectory(prefix="gpu-kit-tree-") as temp:
        tree, name = _tree(Path(temp), args.repo)
        script = "tree/pretrain_gpt.py"
        if not (tree / "pretrain_gpt.py").exists():
            script = "checkout/megatron_r3/train/pretrain_gpt.py"
        _demo(args.demo, tree)
        _pack(tree, work / "tree.tar.gz")
    _pack(args.demo, work / "demo.tar.gz", only=("checkpoint", "hf", "rollouts", "prompts.jsonl"))
    names = [] if args.rehearse else download(work / "packages")
    facts = {
        "commit": commit,
        "uncommitted_changes": changed,
        "megatron": name,
        "script": script,
        "rehearsal": args.rehearse,
        "packages": names or "left out: the kit was built for a rehearsal",
    }
    (work / "kit.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def _checkout(archive: Path, rehearse: bool) -> tuple[str, bool]:
    """Archive the tracked files; return the commit, and whether uncommitted changes are in it.

    Raises:
        BuildError: files are changed, and this is no rehearsal; or this is no git checkout.
    """
    head = _git("rev-parse", "HEAD")
    changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
    untracked = _git("ls-files", "--others", "--exclude-standard")
    if (changed or untracked) and not rehearse:
        names = " ".join((_git("diff", "HEAD", "--name-only") + "\n" + untracked).split()[:5])
        raise BuildError(f"commit first, since the results name a commit; not committed: {names}")
    if untracked:
        print(f"not in the kit, since git does not know them: {' '.join(untracked.split())}")
    # a commit of the changed files, which git keeps nowhere else; empty without changes
    made = _git("stash", "create") if changed else ""
    _git("archive", "--format=tar.gz", f"--output={archive}", made or head)
    return head, changed


def _git(*args: str) -> str:
    git = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
    if git.returncode:
        raise BuildError(
            f"the kit is built from a git checkout; git {args[0]}: {git.stderr.strip()}"
        )
    return git.stdout.strip()


def _tree(temp: Path, repo: Path | None) -> tuple[Path, str]:
    """A patched tree of the default line: the one on PyPI, or the tag of a clone."""
    versions = read_versions(patches_folder())
    if repo is None:
        unpatched, name = unpatched_copy(None, temp / "unpatched")
        return patched_copy(unpatched, temp / "patched"), name
    if not repo.is_dir():
        raise BuildError(f"{repo}: --repo must be a clone of Megatron-LM")
    tag = next(tree for tree in versions.default_line.trees if tree.commit)
    clone_tree(tag, str(repo.resolve()), temp / "patched")
    apply_series(temp / "patched", patches_folder())
    for folder in LEFT_OUT:
        shutil.rmtree(temp / "patched" / folder, ignore_errors=True)
    return temp / "patched", tag.name


def _demo(out: Path, tree: Path) -> None:
    """Make what the demo would make before it trains on rollouts, if it is not there."""
    done = [out / f"{stage}.done" for stage in ("pretrain", "export", "sample")]
    if all(file.exists() for file in done):
        print(f"demo: {out} is there")
        return
    stages = Stages(out.resolve(), tree, "transformers")
    for stage in (stages.pretrain, stages.export, stages.sample):
        stage()


def _pack(folder: Path, archive: Path, only: tuple[str, ...] = ()) -> None:
    """The contents of a folder, or `only` some of them, as .tar.gz; without .git."""
    with tarfile.open(archive, "w:gz", compresslevel=6) as opened:
        for path in sorted(folder.iterdir()):
            if path.name != ".git" and (not only or path.name in only):
                opened.add(path, path.name)


def write_kit(work: Path, out: Path, rehearse: bool) -> dict[str, Any]:
    """Archive `work`, cut it into parts in `out`, and write `run`; return the table of the parts.

    What `out` had before is removed.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    whole = out / "kit.tar"
    with tarfile.open(whole, "w") as opened:
        for path in sorted(work.iterdir()):
            opened.add(path, path.name)
    parts = cut(whole, REHEARSAL_PART_BYTES if rehearse else PART_BYTES)
    whole.unlink()
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    table = {"parts": parts, "digest": digest}
    write_script(out / "run", table)
    return table


def cut(whole: Path, most: int) -> dict[str, str]:
    """Cut a file into parts of at most `most` bytes, beside it; return the sha256 by name."""
    count = max(1, -(-whole.stat().st_size // most))
    parts = {}
    with whole.open("rb") as stream:
        for number in range(1, count + 1):
            data = stream.read(most)
            name = f"part-{number}of{count}"
            whole.with_name(name).write_bytes(data)
            parts[name] = hashlib.sha256(data).hexdigest()
    return parts


def write_script(path: Path, table: Mapping[str, Any]) -> None:
    """Write proof/gpu_kit/unpack.py with the table in it, executable."""
    source = Path(unpack.__file__).read_text()
    assert source.count(TABLE) == 1
    filled = TABLE.replace("{}", json.dumps(table, indent=4))
    path.write_text(source.replace(TABLE, filled))
    os.chmod(path, 0o755)


if __name__ == "__main__":
    sys.exit(main())
