"""versions.toml and the patches themselves, read without a tree; and the real ones."""

import textwrap

import pytest
from patching_upstream import DISPATCHER, LINE, README, ROUTER, TAG, git, refused

from keepers.rules import num_changed
from megatron_r3.patching.apply import apply_series
from megatron_r3.patching.git import PatchingError, blob_id, names
from megatron_r3.patching.scratch import patched_contents
from megatron_r3.patching.series import read_patch, read_series
from megatron_r3.patching.tree import TreeState, identify
from megatron_r3.patching.versions import patches_folder, read_versions


def test_the_real_patches_and_versions():
    versions = read_versions(patches_folder())
    assert versions.default.pypi
    assert sorted(line.name for line in versions.lines) == sorted(
        folder.name for folder in patches_folder().iterdir() if folder.is_dir()
    )
    for line in versions.lines:
        assert line.trees
        series = read_series(line.folder)
        for patch in series.patches:
            number, _, rest = patch.file.name.partition("-")
            assert number.isdecimal()
            assert rest.startswith(patch.subject.split()[0].rstrip(":"))


def test_a_real_patch_is_whole_on_a_tree_or_left_out_of_it():
    """A package lacks some files. A patch of such a file and others could not be exported there."""
    for line in read_versions(patches_folder()).lines:
        patches = read_series(line.folder).patches
        for tree in line.trees:
            for patch in patches:
                assert len({change.path in tree.absent for change in patch.changes}) == 1, (
                    f"{patch.file.name} is half of {tree.name}"
                )


def test_the_real_entries_name_files_of_the_series(tmp_path):
    (tmp_path / "megatron/core").mkdir(parents=True)
    status = identify(tmp_path, read_versions(patches_folder()))
    assert status.state is TreeState.UNKNOWN
    assert status.num_recognised == 0


def test_a_series_is_read_whole(upstream):
    series = read_series(upstream.patches / LINE)
    assert [patch.subject for patch in series.patches] == [
        "Ask the hook",
        "Bind the hook to the microbatch",
        "Add replay, drop the old script",
        "Document the hook in the README",
    ]
    assert [c.path for c in series.patches[0].changes] == [DISPATCHER, ROUTER]
    assert len(series.blobs[ROUTER]) == 3
    assert series.blobs[ROUTER][0] == blob_id((upstream.checkout / ROUTER).read_bytes())
    assert b"".join(c.diff for c in series.patches[0].changes) in upstream.series[0].read_bytes()


def test_blob_ids_are_gits(upstream):
    assert blob_id((upstream.checkout / ROUTER).read_bytes()) == (
        git("hash-object", ROUTER, cwd=upstream.checkout).strip()
    )


def test_a_long_subject_and_a_message_that_quotes_a_diff(upstream):
    patch = upstream.series[0]
    text = patch.read_text()
    subject = "Ask the höok" + " and again" * 12
    head, _, rest = text.partition("Subject: [PATCH] Ask the hook\n")
    quoted = "\nIt replaces\n\n  diff --git a/x b/x\ndiff --git a/y b/y\n"
    folded = "\n ".join(textwrap.wrap(subject, 60))
    patch.write_text(f"{head}Subject: [PATCH] {folded}\n{quoted}{rest}")
    series = read_series(upstream.patches / LINE)
    assert series.patches[0].subject == subject
    assert len(series.patches[0].changes) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("index ", "similarity index ", "not supported"),
        ("100755\n", "120000\n", "not supported"),
        (f"a/{DISPATCHER}", "a/setup.py", "no rename"),
        (f"a/{DISPATCHER} b/{DISPATCHER}", "a/../x b/../x", "one plain path in the tree"),
        (f"a/{DISPATCHER} b/{DISPATCHER}", "a//etc/x b//etc/x", "one plain path in the tree"),
        (f"a/{DISPATCHER} b/{DISPATCHER}", "a/.git/config b/.git/config", "one plain path"),
        (f"a/{DISPATCHER} b/{DISPATCHER}", f"a/{ROUTER} b/{ROUTER}", "has a file twice"),
        ("Subject: [PATCH] Ask the hook", "Subject: [PATCH]", "git format-patch"),
        ("diff --git", "Diff", "git format-patch"),
    ],
)
def test_a_patch_that_is_not_supported(upstream, old, new, message):
    patch = upstream.series[0]
    assert old in patch.read_text()
    patch.write_text(patch.read_text().replace(old, new))
    with pytest.raises(PatchingError, match=message) as error:
        read_series(upstream.patches / LINE)
    assert patch.name in str(error.value)


def test_abbreviated_blob_ids(upstream):
    patch = upstream.series[0]
    lines = patch.read_text().splitlines(keepends=True)
    short = [x[:13] + ".." + x[48:55] + x[88:] if x.startswith("index ") else x for x in lines]
    patch.write_text("".join(short))
    with pytest.raises(PatchingError, match="full-index"):
        read_series(upstream.patches / LINE)


def test_a_line_may_lack_a_concern(upstream):
    """Its number stays free; what the others build on it shows in their blob ids."""
    upstream.series[2].unlink()
    series = read_series(upstream.patches / LINE)
    assert [patch.number for patch in series.patches] == [1, 2, 4]
    assert len(series.blobs[ROUTER]) == 3


def test_a_patch_that_others_need_is_missing(upstream):
    upstream.series[0].unlink()
    with refused(upstream.checkout, f"1 of the 5 files to patch differ:\n  {ROUTER}\n"):
        apply_series(upstream.checkout, upstream.patches)


@pytest.mark.parametrize("name", ["2-Bind.patch", "0000-Bind.patch", "Bind.patch"])
def test_a_patch_without_a_number(upstream, name):
    upstream.series[1].rename(upstream.patches / LINE / name)
    with pytest.raises(PatchingError, match="four digits first") as error:
        read_series(upstream.patches / LINE)
    assert name in str(error.value)


def test_two_patches_of_one_number(upstream):
    upstream.series[1].rename(upstream.patches / LINE / "0001-Bind.patch")
    with pytest.raises(PatchingError, match="two patches with the number 0001"):
        read_series(upstream.patches / LINE)


def test_changed_lines_are_counted_as_git_counts_them(upstream):
    for patch in read_series(upstream.patches / LINE).patches:
        stat = git("apply", "--numstat", str(patch.file), cwd=upstream.checkout)
        assert num_changed(patch) == sum(int(n) for x in stat.splitlines() for n in x.split()[:2])
    file = upstream.series[3]
    file.write_text(file.read_text() + "-- \n2.39.5\n\n")
    assert num_changed(read_patch(file)) == 2


def test_patches_in_another_order(upstream):
    first, second, *_ = upstream.series
    text = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(text)
    with pytest.raises(PatchingError, match="does not follow") as error:
        read_series(upstream.patches / LINE)
    assert second.name in str(error.value)


def test_no_patches(upstream):
    for patch in upstream.series:
        patch.unlink()
    with pytest.raises(PatchingError, match="no patches"):
        read_series(upstream.patches / LINE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("absent =", "absnet =", "unexpected keyword argument 'absnet'"),
        ("status =", "stat =", "unexpected keyword argument 'stat'"),
        ('status = "supported"\n', "", "missing .* 'status'"),
        (f'name = "{TAG}"\n', "", "missing .* 'name'"),
        ('default = "9.1.1"', f'default = "{TAG}"', "expected the name of one tree with pypi"),
        ('commit = "', 'comment = "', "unexpected keyword argument 'comment'"),
        ("default", "default =", "versions.toml"),
    ],
)
def test_versions_that_are_wrong(upstream, old, new, message):
    versions = upstream.patches / "versions.toml"
    assert old in versions.read_text()
    versions.write_text(versions.read_text().replace(old, new, 1))
    with pytest.raises(PatchingError, match=message) as error:
        read_versions(upstream.patches)
    assert "versions.toml" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f'["{README}"]', '["megatron/core/nothing.py"]', "no patch of .* changes .*nothing.py"),
        ("blobs = {", f'blobs = {{ "{ROUTER}" = ["{"1" * 40}"],', "one blob more than patches"),
    ],
)
def test_versions_that_do_not_fit_the_series(upstream, old, new, message):
    versions = upstream.patches / "versions.toml"
    versions.write_text(versions.read_text().replace(old, new, 1))
    with pytest.raises(PatchingError, match=message):
        identify(upstream.package, read_versions(upstream.patches))


def test_no_versions(tmp_path):
    with pytest.raises(PatchingError, match=r"versions\.toml: No such file"):
        read_versions(tmp_path)


def test_the_blobs_of_a_new_tree_are_computed(upstream):
    """What a maintainer enters into versions.toml for a tree with another base of a file."""
    versions = upstream.patches / "versions.toml"
    entry = next(line for line in versions.read_text().splitlines() if line.startswith("blobs"))
    versions.write_text(versions.read_text().replace(entry, ""))
    status = identify(upstream.package, read_versions(upstream.patches))
    (path,) = status.unknown
    ids = [status.files[path].blob, blob_id(patched_contents(status)[path])]
    assert f'blobs = {{ "{path}" = {ids} }}' == entry


def test_names_are_cut():
    assert names(["a", "b"]) == "a, b"
    assert names(list("abcdefg")) == "a, b, c, d, e and 2 more"
