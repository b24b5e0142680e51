"""The config of a run: what is refused before anything is started, and the trainer's command."""

import subprocess
import sys

import pytest
from published import save_model, write_run

from megatron_r3.cli import main
from megatron_r3.data.json_lines import append_line, whole_lines
from megatron_r3.loop import supervisor
from megatron_r3.loop.config import ConfigError, read_config
from megatron_r3.loop.trainer import (
    printed_command,
    run_trainer,
    trainer_command,
    trainer_environment,
)


@pytest.fixture
def file(tmp_path):
    save_model(tmp_path / "run" / "policies" / "v000000")
    return write_run(tmp_path, 30000)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seed = 5", "sede = 5", r"\[run\] sede: no such name; there are directory"),
        ("seed = 5", 'seed = "5"', "seed is '5': .* valid integer"),
        ("seed = 5", "seed = 5\nlag = -1", "lag is -1: .* greater than or equal to 0"),
        ("wait = 20", "wait = -1", "wait is -1: .* greater than 0"),
        ("collections = 3", "", r"\[run\] collections is missing"),
        ("port = 30000", "port = 70000", "port is 70000: .* less than or equal to 65535"),
        ("port = 30000", "timeout = inf", "timeout is inf: .* finite"),
        ("port = 30000", 'command = "x"', "command is 'x': .* valid list"),
        ("port = 30000", 'engine = "mine"', "should be 'embedded', 'sglang' or 'vllm'"),
        ("port = 30000", "shard_size = 8", "stores a collection as one shard"),
        ("port = 30000", 'engine = "sglang"\nshard_size = 2', "the 3 samples of a prompt"),
        ("port = 30000", 'push = ["x"]', "push hands weights to a running sglang or vllm"),
        (
            "port = 30000",
            'engine = "vllm"\nin_place = false\ncommand = ["{version}"]\npush = ["x"]',
            "push hands weights to a running",
        ),
        ("port = 30000", 'engine = "vllm"\ncommand = ["{version}"]', "must not name {version}"),
        (
            "port = 30000",
            'engine = "vllm"\nin_place = false\ncommand = ["x"]',
            "must name {version}",
        ),
        ('"checkpoint"', '"${NO_SUCH}/p"', "variable NO_SUCH is not set"),
        ("port = 30000", "in_place = false", "in_place false needs a command"),
        ("port = 30000", 'command = ["x"]', "the embedded sampler needs none"),
        ("port = 30000", "temperature = 0", "temperature is 0: "),
        ('megatron = "megatron"', 'megatron = "~/nowhere"', r"nowhere has no megatron/core"),
        ('checkpoint = "checkpoint"', 'checkpoint = "gone"', "there is no .*gone"),
        ("port = 30000", 'engine = "sglang"\ndegrade = "a:b"', "degrade works with engine"),
        ("[prompts]", "[extra]\n[prompts]", r"\[extra\]: no such name; there are run"),
        ("[prompts]", "[file]\n[prompts]", r"\[file\]: no such table"),
        ("[run]", "[run", "not TOML"),
        ("[policy]", "[policy]\nkeep = 1", "keep 1: with lag 0 and .* every 1 .* give 2 or more"),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_by_field(file, old, new, words):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=words):
        read_config(file)


def test_without_pydantic_a_run_says_what_to_install(file):
    code = "import sys; sys.modules['pydantic'] = None; from megatron_r3.cli import main; "
    code += f"sys.exit(main(['rl', 'trainer', {str(file)!r}, '--print']))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 1
    assert told.stderr == "error: a run's config needs pydantic: pip install 'megatron-r3[loop]'\n"


def test_policies_are_kept_for_a_trainer_that_goes_on_from_its_checkpoint(file):
    text = file.read_text().replace("seed = 5", "seed = 5\nlag = 4")
    text = text.replace("[trainer]", "[trainer]\ncheckpoint_every = 20")
    file.write_text(text.replace("[policy]", "[policy]\nkeep = 24"))
    with pytest.raises(ConfigError, match=r"keep 24: with lag 4 .* every 20 .* give 25 or more"):
        read_config(file)
    file.write_text(text.replace("[policy]", "[policy]\nkeep = 25"))
    assert read_config(file).policy.keep == 25


def test_paths_are_relative_to_the_file_and_variables_are_filled_in(file, monkeypatch):
    monkeypatch.setenv("HOME", str(file.parent))
    file.write_text(file.read_text().replace('"megatron"', '"~/megatron"'))
    monkeypatch.setenv("SHARED", str(file.parent))
    text = file.read_text()
    assert '"checkpoint"' in text
    file.write_text(
        text.replace('"checkpoint"', '"${SHARED}/checkpoint"').replace("run/pol", "$SHARED/run/pol")
    )
    config = read_config(file)
    assert config.path(config.trainer.megatron) == file.parent / "megatron"
    assert config.path(config.policy.checkpoint) == file.parent / "checkpoint"
    assert config.path(config.policy.model) == file.parent / "run" / "policies" / "v000000"
    assert config.directory.rollouts == file.parent / "run" / "rollouts"
    assert [config.version_of(c) for c in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("new", "words"),
    [
        ("--bf16", "--global-batch-size is missing"),
        ("--global-batch-size 6", "are 6 rollouts; a collection has 12"),
        ("--global-batch-size 6 --rollouts-mini-steps 2", "make 2 optimizer steps on a collection"),
        ("--global-batch-size 12 --save x", "the loop itself sets --save: leave it out"),
        ("--global-batch-size 12 --rollouts=x", "the loop itself sets --rollouts=x: leave"),
        (
            "--global-batch-size 12 --lr-warmup-iters 3",
            "--lr-warmup-iters 3 must be less than 3 steps",
        ),
        (
            "--global-batch-size 12 --lr-warmup-iters 3 --lr-decay-iters 2",
            "--lr-warmup-iters 3 must be less than 2 steps",
        ),
    ],
)
def test_a_trainer_that_does_not_fit_the_collections_is_refused(file, new, words):
    trainer_command(read_config(file))  # the control
    file.write_text(file.read_text().replace("--bf16 --global-batch-size 12", new))
    with pytest.raises(ConfigError, match=words):
        trainer_command(read_config(file))


def test_one_sample_of_a_prompt_has_nothing_to_be_compared_with(file):
    trainer_command(read_config(file))  # 3 samples of each prompt
    text = file.read_text().replace("samples = 3", "samples = 1")
    file.write_text(text.replace("--global-batch-size 12", "--global-batch-size 4"))
    with pytest.raises(ConfigError, match=r"\[prompts\] samples 1: .*every advantage would be 0"):
        trainer_command(read_config(file))
    more = "--global-batch-size 4 --rollouts-advantages stored"
    file.write_text(file.read_text().replace("--global-batch-size 4", more))
    trainer_command(read_config(file))


@pytest.mark.parametrize("given", ["iters 2", "iters 3 --lr-decay-iters 4", "fraction 0.9"])
def test_a_learning_rate_that_rises_before_the_end_is_taken(file, given):
    words = f"--lr-warmup-{given}".split()
    file.write_text(file.read_text().replace("--bf16", " ".join(words)))
    assert set(words) <= {*trainer_command(read_config(file))}


def test_the_command_is_the_same_at_every_start(file):
    text = file.read_text().replace("arguments =", "steps = 2\narguments =")
    more = "--global-batch-size 6 --rollouts-mini-steps 2"
    file.write_text(text.replace("--bf16 --global-batch-size 12", more))
    config = read_config(file)
    command = trainer_command(config)
    assert command[command.index("--train-iters") + 1] == "6"
    assert command[command.index("--save-interval") + 1] == "2"
    assert command[command.index("--load") + 1] == str(config.directory.checkpoints)
    assert command[command.index("--pretrained-checkpoint") + 1] == str(file.parent / "checkpoint")
    (config.directory.checkpoints).mkdir(parents=True)
    (config.directory.checkpoints / "latest_checkpointed_iteration.txt").write_text("2")
    assert trainer_command(config) == command
    assert str(file.parent / "megatron") in trainer_environment(config)["PYTHONPATH"]
    file.write_text(file.read_text().replace("steps = 2", "steps = 2\ncheckpoint_every = 3"))
    command = trainer_command(read_config(file))
    assert command[command.index("--save-interval") + 1] == "6"
    with pytest.raises(ConfigError, match="launch is missing"):
        printed_command(config)
    file.write_text(file.read_text().replace("[trainer]", '[trainer]\nlaunch = ["torchrun"]'))
    config = read_config(file)
    assert " torchrun " in printed_command(config)
    (config.directory.policies / "v000002").mkdir()
    assert " torchrun " in printed_command(config)
    (config.directory.policies / "v000003").mkdir()  # after the last of 3 collections
    assert " torchrun " in printed_command(config)  # its checkpoint is not whole yet
    (config.directory.checkpoints / "latest_checkpointed_iteration.txt").write_text("6")
    assert printed_command(config) == "true"
    assert run_trainer(config) == 0


def test_check_reads_what_the_parts_read_and_starts_nothing(
    file, capsys, monkeypatch, tmp_path_factory
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "rewards", raising=False)  # another test's
    # the reward lies beside the config, as all that the config names, wherever the command runs
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "rewards.py").write_text("raise ValueError('another reward')\n")
    monkeypatch.chdir(elsewhere)
    sys.path.insert(0, str(elsewhere))  # as `python -m` does
    assert main(["rl", "check", str(file)]) == 0
    said = capsys.readouterr().out
    assert "3 collections of 12 rollouts, 6 prompts" in said
    assert "training live (no --moe-router-replay among [trainer] arguments)" in said
    assert sys.modules["rewards"].__file__ == str(file.parent / "rewards.py")
    file.write_text(file.read_text().replace("--bf16", "--bf16 --moe-router-replay"))
    assert main(["rl", "check", str(file)]) == 0
    assert "replaying the sampler's experts" in capsys.readouterr().out
    assert not (file.parent / "run" / "config.toml").exists()
    file.write_text(file.read_text().replace("--global-batch-size 12", "--global-batch-size 6"))
    assert main(["rl", "check", str(file)]) == 1
    assert "are 6 rollouts; a collection has 12" in capsys.readouterr().err


def test_a_host_of_the_command_line_is_in_the_place_of_the_files(file):
    assert read_config(file, "0.0.0.0").sampler.url == "http://0.0.0.0:30000"
    assert read_config(file).sampler.url == "http://127.0.0.1:30000"


def test_a_directory_has_one_config_and_one_process_of_a_part(file, capsys):
    directory = read_config(file).directory
    directory.keep_config(file)
    directory.keep_config(file)
    with (
        directory.only("collector"),
        pytest.raises(ValueError, match="a collector of this run is running"),
        directory.only("collector"),
    ):
        pass
    longer = file.read_text().replace("collections = 3", "collections = 5")
    for wrong in (
        longer.replace("seed = 5", "seed = 6"),
        file.read_text().replace("collections = 3", "collections = 2"),
    ):
        file.write_text(wrong)
        assert main(["rl", "collector", str(file)]) == 1
        assert "has a run of another config" in capsys.readouterr().err
    file.write_text(longer)
    directory.keep_config(file)
    assert directory.config.read_text() == longer


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_unpatched_tree_is_named_at_once(file, capsys, command):
    read_config(file)  # the control: the tree is patched
    tree = file.parent / "megatron"
    (tree / "megatron" / "training" / "training.py").write_text("def pretrain(): ...\n")
    assert main(["rl", command, str(file)]) == 1
    assert capsys.readouterr().err == (
        f"error: {file}: [trainer] megatron: the Megatron-LM in {tree} is not patched; run "
        f"`megatron-r3 apply {tree}`\n"
    )


def test_a_run_that_is_over_starts_nothing(file, capsys, monkeypatch):
    """Its page says how long it took, from its events: another start would make that longer."""
    config = read_config(file)
    (config.directory.policies / "v000003").mkdir()
    config.directory.checkpoints.mkdir(parents=True)
    tracker = config.directory.checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text("3")
    assert main(["rl", "run", str(file)]) == 0
    assert "3 collections are sampled and trained" in capsys.readouterr().out
    assert not config.directory.events("supervisor").exists()
    tracker.write_text("2")  # the control: a step is left

    def start(config, part):
        raise ValueError(f"{part} is started")

    monkeypatch.setattr(supervisor, "_start", start)
    assert main(["rl", "run", str(file)]) == 1
    assert capsys.readouterr().err == "error: sampler is started\n"


def test_a_line_that_a_kill_cut_off_is_left_alone(tmp_path):
    file = tmp_path / "events" / "collector.jsonl"
    append_line(file, {"a": 1})
    with file.open("a") as opened:
        opened.write('{"a":')
    append_line(file, {"a": 2})
    assert file.read_text().splitlines() == ['{"a": 1}', '{"a":', '{"a": 2}']
    assert [*whole_lines(file)] == [{"a": 1}, {"a": 2}]
    assert [*whole_lines(tmp_path / "nothing")] == []
