"""The commands `megatron-r3 rl ...`. Building the parser imports no torch, numpy or plotly."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_r3.loop.config import Config

_HOSTS = {
    "sampler": "address to listen on, instead of [sampler] host; 0.0.0.0 lets other hosts in",
    "collector": "address of the sampler, instead of [sampler] host",
}
Commands = argparse._SubParsersAction  # the type of what `add_subparsers` returns


def add_rl(subparsers: Commands[argparse.ArgumentParser]) -> None:
    """Register `rl` and its commands; each sets `run`, which takes the parsed arguments."""
    summary = "reinforcement learning without a framework: sample, train, push weights, again"
    parser = subparsers.add_parser("rl", help=summary, description=summary)
    parser.set_defaults(group=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, summary, run in (
        ("run", "start and supervise sampler, collector and trainer on this host", _run),
        ("sampler", "the sampler alone", _sampler),
        ("collector", "the collector alone: push and verify each policy, then sample", _collector),
        ("trainer", "the trainer alone, on this host", _trainer),
        ("check", "check the config and the files that it names; start nothing", _check),
    ):
        more = "" if name == "check" else " The same command goes on where a killed one stopped."
        command = commands.add_parser(name, help=summary, description=f"{summary}.{more}")
        command.add_argument("config", type=Path, metavar="CONFIG.toml", help="the run's config")
        if name == "trainer":
            text = "print the command to start on each host, and train nothing"
            command.add_argument("--print", action="store_true", help=text)
        if host_text := _HOSTS.get(name):
            command.add_argument("--host", metavar="HOST", help=host_text)
        command.set_defaults(run=run)
    _add_report(commands)


def _add_report(commands: Commands[argparse.ArgumentParser]) -> None:
    summary = "write one HTML page with the curves, versions and pushes of runs"
    parser = commands.add_parser(
        "report",
        help=summary,
        description=f"{summary}. Several runs are shown side by side; runs with names that differ "
        "only in the number at the end (live-0, live-1) are seeds, and have one colour. "
        "The page needs no network. A run that is still going on can be reported too.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="DIR", help="run directories, as rl run makes them")
    add(
        "--out", type=Path, metavar="FILE",
        help="the page (default: report.html in the directory of the run; with several runs this "
        "option is needed). An existing file is replaced",
    )  # fmt: skip
    parser.set_defaults(run=_report)


def _begin(args: argparse.Namespace) -> Config:
    """Read the config of a part that starts, and keep a copy in the run's directory."""
    from megatron_r3.loop.config import read_config

    config = read_config(args.config, getattr(args, "host", None))
    config.directory.keep_config(config.file)
    return config


def _interruptible(part: Callable[[argparse.Namespace], int]) -> Callable[..., int]:
    """Make a command end with status 130 if a signal stops it, as after ctrl-C in a shell."""

    def run(args: argparse.Namespace) -> int:
        from megatron_r3.loop.processes import signals_raise

        try:
            with signals_raise():
                return part(args)
        except KeyboardInterrupt:
            print("stopped; the same command continues", file=sys.stderr)
            return 130

    return run


@_interruptible
def _run(args: argparse.Namespace) -> int:
    from megatron_r3.loop.supervisor import run

    config = _begin(args)
    path, collections = config.directory.path, config.run.collections
    with config.directory.only("supervisor"):
        print(
            f"{path}: {collections} collections, {_routing(config)}; logs: {path}/logs; a report, "
            f"at any time: megatron-r3 rl report {path}",
            flush=True,
        )
        run(config)
    print(f"{path}: {collections} collections are sampled and trained")
    return 0


@_interruptible
def _sampler(args: argparse.Namespace) -> int:
    from megatron_r3.loop.sampler import run_sampler

    config = _begin(args)
    with config.directory.only("sampler"):
        return run_sampler(config)


@_interruptible
def _collector(args: argparse.Namespace) -> int:
    from megatron_r3.loop.collector import Collector

    config = _begin(args)
    with config.directory.only("collector"):
        Collector(config).run()
    print(f"{config.directory.rollouts} has all {config.run.collections} collections")
    return 0


@_interruptible
def _trainer(args: argparse.Namespace) -> int:
    from megatron_r3.loop.trainer import printed_command, run_trainer

    config = _begin(args)
    if args.print:
        print(printed_command(config))
        return 0
    with config.directory.only("trainer"):
        return run_trainer(config)


def _check(args: argparse.Namespace) -> int:
    """Check the config as the parts do when they start, and start nothing."""
    from megatron_r3.loop.collector import Collector
    from megatron_r3.loop.config import read_config
    from megatron_r3.loop.trainer import printed_command

    config = read_config(args.config)
    collector, routing = Collector(config), _routing(config)
    if config.trainer.launch:
        printed_command(config)
    run = config.run
    print(
        f"{config.file}: {run.collections} collections of {config.rollouts_per_collection} "
        f"rollouts, {len(collector.prompts)} prompts, {config.trainer.steps} optimizer steps on a "
        f"collection, {routing}; sampler: {config.sampler.engine} at {config.sampler.url}"
    )
    return 0


def _routing(config: Config) -> str:
    """Which experts the trainer uses, in words."""
    from megatron_r3.loop.trainer import trainer_command

    if "--moe-router-replay" in trainer_command(config):
        return "replaying the sampler's experts"
    return "training live (no --moe-router-replay among [trainer] arguments)"


def _report(args: argparse.Namespace) -> int:
    """Write the page, and print where it is."""
    from megatron_r3.data.whole_file import write_whole
    from megatron_r3.loop.report import read_runs
    from megatron_r3.loop.report_page import page
    from megatron_r3.replay.words import one_line

    if args.out is None and len(args.runs) > 1:
        raise ValueError(
            f"{len(args.runs)} runs share no directory for the page: name a file with --out FILE"
        )
    runs = read_runs(args.runs)
    out = args.out if args.out is not None else args.runs[0] / "report.html"
    write_whole(out, page(runs))
    steps = ", ".join(f"{one_line(run.name, 100)}: {run.steps} steps" for run in runs)
    print(f"{out} shows {len(runs)} {'run' if len(runs) == 1 else 'runs'} ({steps})")
    return 0
