"""Build the image and try it: `make image`, `make image-test`, `make image-matrix`.

    python -m docker.image build|test|matrix [options]

The Dockerfile can be built by hand too; this finds the base image and the commit of a release in
patches/versions.toml, writes the labels, and hands the machine's own pip settings to the build.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import megatron_r3
from docker.pip_settings import build_secrets
from megatron_r3.patching.versions import KnownTree, Line, patches_folder, read_versions

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "image"  # the tag that was built last
# as a careful cluster would run it; the tests write below /tmp, processes share memory
CAREFUL = ["--network", "none", "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--shm-size", "2g"]


def main(argv: list[str] | None = None) -> int:
    """Build or test one image, or all; the exit status of what failed."""
    parser = argparse.ArgumentParser(prog="image", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("build", "test", "matrix"))
    parser.add_argument("--version", default="", help="a release line or a tree of versions.toml")
    parser.add_argument("--source", choices=("git", "pypi"), default="git")
    parser.add_argument("--repo", default="", help="where the commit is fetched from")
    parser.add_argument("--base", default="", help="base image (default: upstream's of the line)")
    parser.add_argument("--tag", default="", help="default: megatron-r3:VERSION")
    parser.add_argument("--megatron", type=Path, help="a tree of one's own (buildx)")
    parser.add_argument("--docker", default="docker", help="the client")
    parser.add_argument("--network", default="host", help="of the build")
    parser.add_argument("--pip-conf", type=Path, help="default: the settings of this machine's pip")
    parser.add_argument(
        "--target", default="", help="image, or vllm-cpu: the sampler without a GPU"
    )
    parser.add_argument("--tests", default="", help="for the container's test command")
    args = parser.parse_args(argv)
    try:
        return _run_action(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run_action(args: argparse.Namespace) -> int:
    versions = read_versions(patches_folder())
    if args.action == "test":
        return test(args, args.tag or _built_last())
    default = versions.default.name if args.source == "pypi" else versions.default_line.name
    lines = [line.name for line in versions.lines if line.status == "supported"]
    for name in lines if args.action == "matrix" else [args.version or default]:
        line, tree = versions.find(name, args.source)
        tag = args.tag or args.target or f"megatron-r3:{tree.name.replace(' ', '-')}"
        status = build(args, line, tree, tag)
        if not status and args.action == "matrix":
            status = test(args, tag)
        if status:
            return status
    return 0


def build(args: argparse.Namespace, line: Line, tree: KnownTree, tag: str) -> int:
    """Build one image; say how long it took and how large it is."""
    command = [args.docker, "build", "--network", args.network, "--file", "docker/Dockerfile"]
    arguments = {
        "BASE_IMAGE": args.base or line.image,
        "MEGATRON_VERSION": tree.name,
        "MEGATRON_SOURCE": args.source,
        "MEGATRON_COMMIT": tree.commit or f"{tree.pypi} sha256:{tree.sdist_sha256}",
        "SERIES_TREE": _series_tree(line),
        "R3_VERSION": megatron_r3.__version__,
    }
    if args.repo:
        arguments["MEGATRON_REPO"] = args.repo
    if args.megatron:
        command += ["--build-context", f"megatron={args.megatron}"]
        arguments["MEGATRON_COMMIT"] = f"a local tree, {tree.name}"
    command += ["--target", args.target] if args.target else []
    command += [word for k, v in arguments.items() for word in ("--build-arg", f"{k}={v}")]
    started = time.monotonic()
    with ExitStack() as stack:
        for name, file in build_secrets(stack, args.pip_conf).items():
            command += ["--secret", f"id={name},src={file}"]
        status = _run([*command, "--tag", tag, "."])
    if not status:
        inspect = [args.docker, "image", "inspect", "--format", "{{.Size}}", tag]
        size = int(subprocess.run(inspect, capture_output=True, check=True, text=True).stdout)
        base = [*inspect[:-1], arguments["BASE_IMAGE"]]
        done = subprocess.run(base, capture_output=True, check=False, text=True)
        of_base = f", {int(done.stdout) / 1e6:.0f} MB of it the base's" if done.stdout else ""
        if not args.target:
            BUILT.parent.mkdir(exist_ok=True)
            BUILT.write_text(f"{tag}\n")
        seconds = time.monotonic() - started
        print(f"{tag}: {size / 1e6:.0f} MB{of_base}, built in {seconds:.0f} s")
    return status


def test(args: argparse.Namespace, tag: str) -> int:
    """Run the image's tests: no network, a root that cannot be written, not as root."""
    run = [args.docker, "run", "--rm", *CAREFUL]
    who = [*run, tag, "id", "--user"]
    if subprocess.run(who, capture_output=True, text=True).stdout.strip() in ("", "0"):
        print(f"error: {tag} does not run, or runs as root", file=sys.stderr)
        return 1
    started = time.monotonic()
    status = _run([*run, tag, "test", *shlex.split(args.tests)])
    print(f"{tag}: tested in {time.monotonic() - started:.0f} s, status {status}")
    return status


def _built_last() -> str:
    try:
        return BUILT.read_text().strip()
    except OSError:
        raise ValueError("no image was built here: make image first, or say TAG=") from None


def _series_tree(line: Line) -> str:
    """Git's id of the folder of patches, as committed; the patches may come without git."""
    command = ["git", "-C", str(ROOT), "rev-parse", f"HEAD:patches/{line.name}"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    return done.stdout.strip() or "unknown"


def _run(command: list[str]) -> int:
    print(shlex.join(command), flush=True)
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
