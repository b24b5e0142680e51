"""The trainer of a run: the command that trains on the store and publishes policies."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

import megatron_r3
from megatron_r3.loop.config import Config, ConfigError
from megatron_r3.loop.processes import start, stop
from megatron_r3.loop.published import published

_TRACKER = "latest_checkpointed_iteration.txt"
# Options that a config must not have. `rl trainer` adds them; --finetune is Megatron's to set, when
# it loads --pretrained-checkpoint.
_OURS = (
    *("--rollouts", "--rollouts-follow", "--rollouts-publish", "--rollouts-publish-interval"),
    *("--rollouts-publish-like", "--rollouts-publish-keep", "--rollouts-log", "--train-iters"),
    *("--save", "--load", "--save-interval", "--finetune", "--pretrained-checkpoint"),
)


def trainer_command(config: Config) -> list[str]:
    """The command that begins or resumes the training of a run.

    Raises:
        ConfigError: the arguments have an option of `_OURS`, or numbers that do not fit.
    """
    trainer, directory = config.trainer, config.directory
    arguments = [word for text in trainer.arguments for word in shlex.split(text)]
    for word in arguments:
        if word.partition("=")[0] in _OURS:
            raise ConfigError(
                f"{config.file}: [trainer] arguments: the loop itself sets {word}: leave it out"
            )
    _check_sizes(config, arguments)
    steps = trainer.steps
    loop = ["--rollouts", str(directory.rollouts), "--rollouts-follow", f"{config.run.wait:g}"]
    loop += ["--rollouts-publish", str(directory.policies)]
    loop += ["--rollouts-publish-interval", str(steps)]
    loop += ["--rollouts-publish-like", str(config.path(config.policy.model))]
    if config.policy.keep:
        loop += ["--rollouts-publish-keep", str(config.policy.keep)]
    loop += ["--rollouts-log", str(directory.metrics)]
    loop += ["--train-iters", str(config.run.collections * steps)]
    loop += ["--save", str(directory.checkpoints)]
    loop += ["--save-interval", str(steps * trainer.checkpoint_every)]
    # Megatron loads --pretrained-checkpoint if --load has no checkpoint yet. So the command is the
    # same at the first start and at a resume.
    loop += ["--load", str(directory.checkpoints)]
    # If [run] collections was raised, the checkpoint has another learning rate schedule.
    if not any(word.startswith("--use-checkpoint-opt") for word in arguments):
        loop += ["--override-opt_param-scheduler"]
    loop += ["--pretrained-checkpoint", str(config.path(config.policy.checkpoint))]
    return [*_launch(config), *_script(config), *arguments, *loop]


def _sizes_in(arguments: list[str]) -> argparse.Namespace:
    """The options in a trainer's arguments that must fit the run; a missing batch size is 0."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--global-batch-size", type=int, default=0)
    parser.add_argument("--rollouts-mini-steps", type=int, default=1)
    parser.add_argument("--rollouts-epochs", type=int, default=1)
    parser.add_argument("--rollouts-advantages")
    parser.add_argument("--lr-warmup-iters", type=int, default=0)
    parser.add_argument("--lr-decay-iters", type=int)
    return parser.parse_known_args(arguments)[0]


def _check_sizes(config: Config, arguments: list[str]) -> None:
    """Refuse numbers that do not fit the run.

    Between two versions a trainer must use exactly one collection. And the warm-up of the learning
    rate must end before the last step: Megatron's own check is an assertion without an explanation.
    """
    given = _sizes_in(arguments)
    batch, mini_steps = given.global_batch_size, given.rollouts_mini_steps
    epochs = given.rollouts_epochs
    steps, used = mini_steps * epochs, batch * mini_steps
    rising, until = given.lr_warmup_iters, given.lr_decay_iters or config.run.collections * steps
    wrong = None
    if not batch:
        wrong = "[trainer] arguments: --global-batch-size is missing"
    elif config.trainer.steps != steps:
        wrong = (
            f"[trainer] steps {config.trainer.steps}: the arguments make {steps} optimizer steps "
            f"on a collection (--rollouts-mini-steps {mini_steps} times --rollouts-epochs "
            f"{epochs})"
        )
    elif used != config.rollouts_per_collection:
        wrong = (
            f"[trainer] arguments: --global-batch-size {batch} times --rollouts-mini-steps "
            f"{mini_steps} are {used} rollouts; a collection has {config.rollouts_per_collection} "
            "([prompts] per_collection times samples)"
        )
    elif config.prompts.samples == 1 and given.rollouts_advantages != "stored":
        wrong = (
            "[prompts] samples 1: a reward is compared with the rewards of the prompt's other "
            "samples, so every advantage would be 0: give 2 or more"
        )
    elif rising >= until:
        wrong = (
            f"[trainer] arguments: --lr-warmup-iters {rising} must be less than {until} steps "
            "(--lr-decay-iters, or [run] collections times [trainer] steps): give fewer, or "
            "--lr-warmup-fraction, which fits every number of steps"
        )
    if wrong is not None:
        raise ConfigError(f"{config.file}: {wrong}")


def printed_command(config: Config) -> str:
    """The command to start the trainer on several hosts, the same for each start of a run.

    If no step is left, the command is `true`, so that a job that is queued once more does nothing.

    Raises:
        ConfigError: as `trainer_command`; or `launch` is missing, and each host would run a
            training of its own.
    """
    if not config.trainer.launch:
        raise ConfigError(
            f"{config.file}: [trainer] launch is missing: --print needs the command that runs a "
            "script on every host, e.g. torchrun with --nnodes and --rdzv-endpoint"
        )
    if is_trained(config):
        return "true"
    pairs = [f"{name}={value}" for name, value in trainer_environment(config).items()]
    return shlex.join(["env", *pairs, *trainer_command(config)])


def _launch(config: Config) -> list[str]:
    if config.trainer.launch:
        return list(config.trainer.launch)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # not the host's own name, which DNS may not know
    return [*words, "--local-addr", "127.0.0.1", "--nproc-per-node", str(config.trainer.processes)]


def _script(config: Config) -> list[str]:
    megatron = config.path(config.trainer.megatron)
    if config.trainer.script:
        words = shlex.split(config.trainer.script)
        return [word.replace("{megatron}", str(megatron)) for word in words]
    return ["-m", "megatron_r3.train.pretrain_gpt"]


def trainer_environment(config: Config) -> dict[str, str]:
    """The trainer's environment variables; PYTHONPATH has its tree and this package."""
    package = Path(megatron_r3.__file__).parents[1]
    given = config.trainer.environment
    paths = [str(config.path(config.trainer.megatron)), str(package)]
    if before := given.get("PYTHONPATH", os.environ.get("PYTHONPATH")):
        paths.append(before)
    return {**given, "PYTHONPATH": os.pathsep.join(paths)}


def is_trained(config: Config) -> bool:
    """Whether no step is left: the last policy is published, and its checkpoint is saved.

    The last policy is published before the last checkpoint, and Megatron writes the tracker file
    when a checkpoint is complete.
    """
    last = config.run.collections
    if last not in published(config.directory.policies):
        return False
    tracker = config.directory.checkpoints / _TRACKER
    return tracker.is_file() and tracker.read_text().strip() == str(last * config.trainer.steps)


def run_trainer(config: Config) -> int:
    """Train; returns the command's exit status, or 0 if no step is left.

    Raises:
        ConfigError: as `trainer_command`.
        ValueError: this host does not have the command of [trainer] launch.
    """
    if is_trained(config):
        return 0
    process = start(trainer_command(config), trainer_environment(config))
    try:
        return process.wait()
    finally:
        stop(process)
