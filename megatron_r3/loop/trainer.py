"""The trainer of a run: the command that trains on the store, and publishes policies."""

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

PART = "trainer"
_TRACKER = "latest_checkpointed_iteration.txt"
# what `rl trainer` gives by itself
_OURS = (
    *("--rollouts", "--rollouts-follow", "--rollouts-publish", "--rollouts-publish-interval"),
    *("--rollouts-publish-like", "--rollouts-publish-keep", "--rollouts-log", "--train-iters"),
    *("--save", "--load", "--save-interval", "--finetune", "--pretrained-checkpoint"),
)


def trainer_command(config: Config) -> list[str]:
    """The command that begins the training of a run, or goes on with it.

    Raises:
        ConfigError: the arguments name what the loop decides.
    """
    trainer, directory = config.trainer, config.directory
    arguments = [word for text in trainer.arguments for word in shlex.split(text)]
    for word in arguments:
        if word.partition("=")[0] in _OURS:
            raise ConfigError(
                f"{config.file}: [trainer] arguments: {word} is given by the loop: leave it out"
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
    # Megatron begins with the second where the first has no checkpoint yet. So the command is the
    # same at every start, and whoever starts jobs need not know what was there before.
    loop += ["--load", str(directory.checkpoints)]
    # A run that is made longer has another schedule of the learning rate than its checkpoint.
    if not any(word.startswith("--use-checkpoint-opt") for word in arguments):
        loop += ["--override-opt_param-scheduler"]
    loop += ["--pretrained-checkpoint", str(config.path(config.policy.checkpoint))]
    return [*_launch(config), *_script(config), *arguments, *loop]


def _sizes_in(arguments: list[str]) -> argparse.Namespace:
    """The numbers in a trainer's arguments that must fit; a batch of 0 was not given."""
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

    A trainer must use a collection, no more and no less, before it publishes; and the learning rate
    must have risen before the last step, of which Megatron says no more than an assertion.

    Raises:
        ConfigError: naming the numbers.
    """
    given = _sizes_in(arguments)
    batch, mini_steps = given.global_batch_size, given.rollouts_mini_steps
    epochs = given.rollouts_epochs
    steps, used = mini_steps * epochs, batch * mini_steps
    rising, until = given.lr_warmup_iters, given.lr_decay_iters or config.run.collections * steps
    alone = config.prompts.samples == 1 and given.rollouts_advantages != "stored"
    refused = [
        (not batch, "[trainer] arguments: --global-batch-size is missing"),
        (
            config.trainer.steps != steps,
            f"[trainer] steps {config.trainer.steps}: the arguments make {steps} optimizer steps "
            f"on a collection (--rollouts-mini-steps {mini_steps} times --rollouts-epochs "
            f"{epochs})",
        ),
        (
            used != config.rollouts_per_collection,
            f"[trainer] arguments: --global-batch-size {batch} times --rollouts-mini-steps "
            f"{mini_steps} are {used} rollouts; a collection has {config.rollouts_per_collection} "
            "([prompts] per_collection times samples)",
        ),
        (
            alone,
            "[prompts] samples 1: a reward is compared with those of the other samples of its "
            "prompt, so every advantage would be 0: give 2 or more",
        ),
        (
            rising >= until,
            f"[trainer] arguments: --lr-warmup-iters {rising} must be less than {until} steps "
            "(--lr-decay-iters, or [run] collections times [trainer] steps): give fewer, or "
            "--lr-warmup-fraction, which fits every number of steps",
        ),
    ]
    for wrong, words in refused:
        if wrong:
            raise ConfigError(f"{config.file}: {words}")


def printed_command(config: Config) -> str:
    """The command for whoever starts the trainer on several hosts, the same for every start.

    It is `true` where no step is left: a job that is queued again after its end has nothing to do.

    Raises:
        ConfigError: without `launch` it would be a training of its own on each host.
    """
    if not config.trainer.launch:
        raise ConfigError(
            f"{config.file}: [trainer] launch is missing: the command that runs a script on every "
            "host of yours, e.g. torchrun with --nnodes and --rdzv-endpoint"
        )
    if is_trained(config):
        return "true"
    pairs = [f"{name}={value}" for name, value in trainer_environment(config).items()]
    return shlex.join(["env", *pairs, *trainer_command(config)])


def _launch(config: Config) -> list[str]:
    if config.trainer.launch:
        return list(config.trainer.launch)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # the host's own name may resolve to nothing
    return [*words, "--local-addr", "127.0.0.1", "--nproc-per-node", str(config.trainer.processes)]


def _script(config: Config) -> list[str]:
    megatron = config.path(config.trainer.megatron)
    if config.trainer.script:
        words = shlex.split(config.trainer.script)
        return [word.replace("{megatron}", str(megatron)) for word in words]
    return ["-m", "megatron_r3.train.pretrain_gpt"]


def trainer_environment(config: Config) -> dict[str, str]:
    """The variables of the trainer: its tree and this package can be imported."""
    package = Path(megatron_r3.__file__).parents[1]
    given = config.trainer.environment
    paths = [str(config.path(config.trainer.megatron)), str(package)]
    if before := given.get("PYTHONPATH", os.environ.get("PYTHONPATH")):
        paths.append(before)
    return {**given, "PYTHONPATH": os.pathsep.join(paths)}


def is_trained(config: Config) -> bool:
    """Whether no step is left: the last policy is published, and its checkpoint is saved.

    Megatron writes the tracker when a checkpoint is whole. The policy comes before it.
    """
    last = config.run.collections
    if last not in published(config.directory.policies):
        return False
    tracker = config.directory.checkpoints / _TRACKER
    return tracker.is_file() and tracker.read_text().strip() == str(last * config.trainer.steps)


def run_trainer(config: Config) -> int:
    """Train; the exit status of the command, and 0 where no step is left."""
    if is_trained(config):
        return 0
    config.directory.path.mkdir(parents=True, exist_ok=True)
    process = start(trainer_command(config), trainer_environment(config))
    try:
        return process.wait()
    finally:
        stop(process)
