"""The command line: what it prints and returns."""

import pytest
from patching_upstream import LINE, PACKAGE, README, ROUTER, TAG, run_cli

from megatron_r3.cli import main
from megatron_r3.patching import patches_cli as commands


@pytest.fixture
def cli(upstream, capsys):
    def run(command, tree, *args):
        status = main([command, str(tree), "--patches", str(upstream.patches), *args])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_a_whole_round(upstream, cli):
    tree = upstream.checkout
    where = f"{tree} ({LINE}, {TAG}); files changed: 6\n"
    about = f"release: {LINE}, {TAG}, 4 patches of 6 files\ngroups: r3\n"
    todo = f"not patched: make apply MEGATRON={tree}\n"
    assert cli("status", tree) == (0, f"pristine: {tree}\n{about}{todo}", "")
    assert cli("apply", tree) == (0, f"applied 4 patches of 6 files to {where}", "")
    again = f"{tree} is already applied: {LINE}, {TAG}, nothing to do\n"
    assert cli("apply", tree, "--line", LINE) == (0, again, "")
    assert cli("status", tree) == (0, f"applied: {tree}\n{about}", "")
    assert cli("revert", tree) == (0, f"reverted 4 patches of 6 files in {where}", "")
    again = f"{tree} is already pristine: {LINE}, {TAG}, nothing to do\n"
    assert cli("revert", tree) == (0, again, "")


def test_a_skipped_file_is_named(upstream, cli):
    for command in ("status", "apply", "status", "revert"):
        status, out, _ = cli(command, upstream.package)
        assert status == 0
        assert "4 patches of 5 files" in out
        assert f"not in {PACKAGE}, so left out: {README}" in out


def test_an_unknown_tree(upstream, cli):
    (upstream.package / ROUTER).write_text("mine\n")
    status, out, err = cli("status", upstream.package)
    assert status == 1
    assert out.startswith(f"unknown: {upstream.package}\n")
    assert out.endswith(f"\n  {ROUTER}: neither the base nor the patched file\n")
    assert err == ""
    status, out, err = cli("apply", upstream.package)
    assert (status, out) == (1, "")
    assert err.startswith("error: patch 1 of 4 does not apply")


def test_no_traceback_and_no_torch(tmp_path):
    done = run_cli("apply", tmp_path)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: {tmp_path} is no Megatron-LM tree: there is no megatron/core in it\n"
    )
    light = (
        "import atexit; atexit.register(lambda: print({'torch', 'megatron'} & sys.modules.keys()))"
    )
    done = run_cli("status", tmp_path, prelude=light)
    assert done.stdout == "set()\n"


def test_git_is_needed(upstream, monkeypatch, cli):
    monkeypatch.setenv("PATH", "")
    status, _, err = cli("apply", upstream.package)
    assert (status, err) == (1, "error: git is not installed, or not on PATH\n")


def test_an_interrupt_is_told_in_one_line(upstream, monkeypatch, cli):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "identify", interrupted)
    told = "error: interrupted; run the same command again to continue\n"
    assert cli("status", upstream.checkout) == (1, "", told)


@pytest.mark.parametrize("arguments", [["--help"], ["apply"], ["nothing"]])
def test_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == (0 if "--help" in arguments else 2)
    printed = capsys.readouterr()
    assert "usage: megatron-r3" in printed.out + printed.err
    commands_are_listed = "collect rollouts from an engine" in printed.out + printed.err
    assert commands_are_listed == ("--help" in arguments)


@pytest.mark.parametrize(
    ("group", "command"),
    [
        ([], "rollouts collect rollouts from an engine"),
        (["rollouts"], "verify check every byte"),
        (["rollouts", "convert"], "responses make a store"),
        (["rl"], "check check the config"),
    ],
)
def test_a_group_alone_lists_its_commands(group, command, capsys):
    assert main(group) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert command in " ".join(err.split())
