"""Build the image and try it: `make image`, `make image-test`, `make image-matrix`.

    PYTHONPATH=. python docker/image.py build|test|matrix [options]

The Dockerfile can be built by hand too. This script finds the base image and the commit of a
release in patches/versions.toml, writes the labels, and gives the build the pip settings of this
machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

# Python puts the folder of a script on sys.path, so this module needs no package. A package called
# docker would hide the Docker SDK.
from pip_settings import build_secrets

import megatron_r3
from megatron_r3.patching.versions import KnownTree, Line, patches_folder, read_versions

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "build" / "image"  # holds the tag of the last image that was built
# Runs the image as a careful cluster would. The tests write below /tmp; processes share memory.
CAREFUL = ["--network", "none", "--read-only", "--tmpfs", "/tmp:exec,mode=1777", "--shm-size", "2g"]
IN_IMAGE = "/opt/megatron-r3"
# Prints those of the names argv[2:] that `import` finds in the folder argv[1].
IMPORTABLE = """
import sys
from importlib.util import find_spec
specs = {name: find_spec(name) for name in sys.argv[2:]}
places = {name: [spec.origin or "", *(spec.submodule_search_locations or [])]
          for name, spec in specs.items() if spec}
print(*(name for name in places if any(p.startswith(sys.argv[1] + "/") for p in places[name])))
"""
_ENVIRONMENT = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
UNWANTED = ("demo", "docker", "keepers", "proof", "tests")


def main(argv: list[str] | None = None) -> int:
    """Build or test one image, or all; return 0, or the exit status of the first that failed."""
    parser = argparse.ArgumentParser(prog="image", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("build", "test", "matrix"))
    parser.add_argument("--version", default="", help="a release line or a tree of versions.toml")
    parser.add_argument("--source", choices=("git", "pypi"), default="git")
    parser.add_argument("--repo", default="", help="git repository to fetch the commit from")
    parser.add_argument("--base", default="", help="base image (default: that of the release line)")
    tag_help = "default: megatron-r3:VERSION, or megatron-r3-TARGET"
    parser.add_argument("--tag", default="", help=tag_help)
    parser.add_argument("--megatron", type=Path, help="a Megatron-LM tree of your own (buildx)")
    parser.add_argument("--docker", default="docker", help="the Docker client")
    parser.add_argument("--network", default="host", help="network of the build (default: host)")
    parser.add_argument("--pip-conf", type=Path, help="default: the settings of this machine's pip")
    parser.add_argument(
        "--target",
        default="",
        help="stage to build: sampler (--base: an engine's image), or vllm-cpu (without a GPU)",
    )
    parser.add_argument("--tests", default="", help="arguments of the container's test command")
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
    if args.target == "sampler" and not args.base:
        raise ValueError(
            "no base image: name the engine's, for example make image-sampler "
            "BASE_IMAGE=vllm/vllm-openai:v0.30.0"
        )
    lines = [line.name for line in versions.lines if line.status == "supported"]
    for name in lines if args.action == "matrix" else [args.version or default]:
        line, tree = versions.find(name, args.source)
        tag = args.tag or (f"megatron-r3-{args.target}" if args.target else _named(tree))
        status = build(args, line, tree, tag)
        if not status and args.action == "matrix":
            status = test(args, tag)
        if status:
            return status
    return 0


def build(args: argparse.Namespace, line: Line, tree: KnownTree, tag: str) -> int:
    """Build one image; print how long it took and how large the image is."""
    _refuse_without(args.docker)
    if "--secret" not in _printed([args.docker, "build", "--help"]):
        raise ValueError(
            f"{args.docker}: it cannot build with BuildKit, which the Dockerfile needs: install "
            "Docker's plugin buildx (Debian: apt-get install docker-buildx)"
        )
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
        if not args.target:
            BUILT.parent.mkdir(exist_ok=True)
            BUILT.write_text(f"{tag}\n")
        size, of_base = _size(args.docker, tag), _size(args.docker, arguments["BASE_IMAGE"])
        shared = f", {of_base} MB of it the base's" if of_base else ""
        print(f"{tag}: {size} MB{shared}, built in {time.monotonic() - started:.0f} s")
    return status


def _named(tree: KnownTree) -> str:
    """The default tag of an image with this tree."""
    return f"megatron-r3:{tree.name.replace(' ', '-')}"


def _size(docker: str, tag: str) -> int:
    """The size of an image in MB; 0 if Docker does not have the image."""
    inspect = [docker, "image", "inspect", "--format", "{{.Size}}", tag]
    printed = subprocess.run(inspect, capture_output=True, check=False, text=True).stdout
    return round(int(printed or 0) / 1e6)


def test(args: argparse.Namespace, tag: str) -> int:
    """Run the image's tests without a network, on a read-only file system, and not as root."""
    _refuse_without(args.docker)
    run = [args.docker, "run", "--rm", *CAREFUL, tag]
    if _printed([*run, "id", "--user"]) in ("", "0"):
        print(
            f"error: {tag} does not run, or runs as root: build it anew by make image",
            file=sys.stderr,
        )
        return 1
    if unwanted := _printed([*run, "python3", "-c", IMPORTABLE, IN_IMAGE, *UNWANTED]):
        print(
            f"error: {tag}: these can be imported from anywhere: {unwanted}; expected none",
            file=sys.stderr,
        )
        return 1
    started = time.monotonic()
    status = _run([*run, "test", *shlex.split(args.tests)])
    print(f"{tag}: tested in {time.monotonic() - started:.0f} s, status {status}")
    return status


def _refuse_without(docker: str) -> None:
    if shutil.which(docker) is None:
        raise ValueError(
            f"{docker}: no such program here: install Docker, or name its client by DOCKER="
        )


def _built_last() -> str:
    try:
        return BUILT.read_text().strip()
    except OSError:
        raise ValueError(
            "no image was built here: run make image first, or name one by TAG="
        ) from None


def _series_tree(line: Line) -> str:
    """Git's tree id of the committed folder of patches; "unknown" where there is no git."""
    command = ["git", "-C", str(ROOT), "rev-parse", f"HEAD:patches/{line.name}"]
    return _printed(command) or "unknown"


def _printed(command: list[str]) -> str:
    """What a command prints to stdout."""
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=_ENVIRONMENT)
    return done.stdout.strip()


def _run(command: list[str]) -> int:
    print(shlex.join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=_ENVIRONMENT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
