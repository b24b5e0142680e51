"""Fetching a known tree: the real pip, offline, on a source package made here."""

import hashlib
import io
import os
import subprocess
import tarfile

import pytest
from patching_upstream import LINE, TAG, git, make_upstream, run_cli

from megatron_r3.patching.apply import apply_series, revert_series
from megatron_r3.patching.fetch import _unpack, fetch_tree
from megatron_r3.patching.git import PatchingError
from megatron_r3.patching.versions import read_versions

# pip asks a source package for its metadata; this answers without needing anything else
_BACKEND = """
import pathlib
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    name = "megatron_core-9.1.1.dist-info"
    info = pathlib.Path(folder, name)
    info.mkdir()
    text = "Metadata-Version: 2.1\\nName: megatron-core\\nVersion: 9.1.1\\n"
    (info / "METADATA").write_text(text)
    return name
def build_wheel(*args, **kwargs):
    raise NotImplementedError
"""
_PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """An upstream whose 9.1.1 is a source package that pip finds, and nothing else."""
    upstream = make_upstream(tmp_path)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    sdist = wheels / "megatron_core-9.1.1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(upstream.package, "megatron_core-9.1.1")
        for name, text in {
            "backend.py": _BACKEND,
            "pyproject.toml": _PYPROJECT,
            "PKG-INFO": "Metadata-Version: 2.1\nName: megatron-core\nVersion: 9.1.1\n"
            "Requires-Python: >=99\n",
        }.items():
            member = tarfile.TarInfo(f"megatron_core-9.1.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    versions = upstream.patches / "versions.toml"
    versions.write_text(versions.read_text().replace("0" * 64, digest))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return upstream


def no_pip(*args, **kwargs):
    raise AssertionError("this asks pip")


def test_fetch_gives_a_checkout_that_the_patches_fit(upstream, tmp_path, monkeypatch):
    out = tmp_path / "out of the way"
    done = run_cli("megatron", "--out", out, "--patches", upstream.patches)
    tree = out / "megatron-core-9.1.1"
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tree} is megatron-core==9.1.1, unpatched\n"
    assert list(out.iterdir()) == [tree]
    assert git("status", "--porcelain", cwd=tree) == ""
    assert git("log", "--format=%an %s", cwd=tree) == "megatron-r3 megatron-core==9.1.1\n"
    apply_series(tree, upstream.patches)
    revert_series(tree, upstream.patches)

    second = fetch_tree(read_versions(upstream.patches).default, tmp_path / "second")
    assert git("rev-parse", "HEAD", cwd=second) == git("rev-parse", "HEAD", cwd=tree)

    monkeypatch.setattr(subprocess, "run", no_pip)
    assert fetch_tree(read_versions(upstream.patches).default, out) == tree
    monkeypatch.undo()
    again = run_cli("megatron", "--out", out, "--patches", upstream.patches)
    assert again.returncode == 0
    assert again.stdout == f"{tree} is already there\n"


def test_another_file_is_refused(upstream, tmp_path):
    versions = upstream.patches / "versions.toml"
    tree = read_versions(upstream.patches).default
    versions.write_text(versions.read_text().replace(tree.sdist_sha256, "1" * 64))
    with pytest.raises(PatchingError, match="megatron") as error:
        fetch_tree(read_versions(upstream.patches).default, tmp_path / "out")
    assert "1" * 64 in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_not_there(upstream, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PatchingError, match="pip cannot download the sdist of megatron-core==9"):
        fetch_tree(read_versions(upstream.patches).default, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "link", "message"),
    [
        ("../escaped", "", "cannot unpack"),
        ("tree/link", "/etc/passwd", "cannot unpack"),
        ("tree/setup.py", "", "no Megatron-LM source package"),
    ],
)
def test_archives_that_are_refused(tmp_path, name, link, message):
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo(name)
        if link:
            member.type, member.linkname = tarfile.SYMTYPE, link
        archive.addfile(member, io.BytesIO())
    with pytest.raises(PatchingError, match=message):
        _unpack(tmp_path / "evil.tar.gz", tmp_path / "unpacked")
    assert not (tmp_path / "escaped").exists()


def test_a_commit_is_fetched_alone(upstream, tmp_path):
    git("config", "uploadpack.allowAnySHA1InWant", "true", cwd=upstream.checkout)
    out, url = tmp_path / "trees", f"file://{upstream.checkout}"
    command = ["megatron", "--source", "git", "--repo", url, "--patches", upstream.patches]
    done = run_cli(*command, "--version", LINE, "--out", out)
    assert done.returncode == 0, done.stderr
    (tree,) = out.iterdir()
    assert done.stdout.startswith(f"{tree} is {TAG} (")
    wanted = read_versions(upstream.patches).find(TAG, "git")[1].commit
    assert git("rev-parse", "HEAD", cwd=tree).strip() == wanted
    assert git("rev-list", "--count", "HEAD", cwd=tree).strip() == "1"
    apply_series(tree, upstream.patches)
    again = run_cli(*command, "--out", out)
    assert again.returncode == 1
    assert f"{tree}: is there already" in again.stderr


def test_a_tree_that_is_not_known_or_not_there(upstream, tmp_path):
    out = tmp_path / "trees"
    command = ["megatron", "--patches", upstream.patches, "--out", out]
    for more in (
        ["--version", "9.9"],
        ["--version", TAG],
        ["--source", "git", "--version", "9.1.1"],
    ):
        refused = run_cli(*command, *more)
        assert refused.returncode == 1
        assert "is no tree that versions.toml knows from" in refused.stderr
    nowhere = ["--source", "git", "--repo", f"file://{tmp_path}/nowhere"]
    assert run_cli(*command, *nowhere).returncode == 1
    assert not out.exists() or not [*out.iterdir()]
