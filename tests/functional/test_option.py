"""The option in a real tree: fields, flags, and what is told where megatron_r3 is not found."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from megatron_r3.seams import option
from proof.fidelity.rig.worker import TreeWorker
from proof.fidelity.tiny import FULL, config, model, start

# Of each field: its default, a flag of it, and the value that the flag gives.
OPTIONS: dict[str, tuple[Any, list[str], Any]] = {
    "moe_router_replay": (False, ["--moe-router-replay"], True),
    "moe_router_replay_aux_loss": ("replayed", ["--moe-router-replay-aux-loss", "live"], "live"),
    "moe_router_replay_expert_bias": (
        "replayed",
        ["--moe-router-replay-expert-bias", "live"],
        "live",
    ),
    "moe_router_replay_missing": ("live", ["--moe-router-replay-missing", "error"], "error"),
    "moe_router_replay_fused_gate": (None, ["--no-moe-router-replay-fused-gate"], False),
    "moe_router_replay_dispatch_plan": (True, ["--no-moe-router-replay-dispatch-plan"], False),
    "moe_router_replay_log_mismatch_interval": (
        None,
        ["--moe-router-replay-log-mismatch-interval", "0"],
        0,
    ),
    "moe_router_replay_verify_plan": (False, ["--moe-router-replay-verify-plan"], True),
    "moe_router_replay_verify_dispatch": (False, ["--moe-router-replay-verify-dispatch"], True),
    "moe_router_replay_guest_slots": (0, ["--moe-router-replay-guest-slots", "2"], 2),
    "moe_router_replay_guest_domain": (None, ["--moe-router-replay-guest-domain", "4"], 4),
    "moe_router_replay_guest_tokens": (1024, ["--moe-router-replay-guest-tokens", "7"], 7),
}


def from_the_command_line(rank: int, argv: list[str]) -> dict[str, Any]:
    """What argparse makes of `argv`, and what it says of each flag of the option."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    given = vars(parser.parse_args(argv))
    # Not format_help(): on 0.19 an option of upstream's has a bare % in its help, which raises.
    formatter = parser._get_formatter()
    return {
        "values": {name: value for name, value in given.items() if name in OPTIONS},
        "help": {
            flag: formatter._expand_help(action)
            for action in parser._actions
            for flag in action.option_strings
            if "moe-router-replay" in flag
        },
    }


def test_every_field_has_a_flag_whose_value_arrives(patched: TreeWorker) -> None:
    argv = [word for _, words, _ in OPTIONS.values() for word in words]
    (given,) = patched.run(from_the_command_line, 1, argv)
    assert given["values"] == {name: value for name, (_, _, value) in OPTIONS.items()}
    off = {"--disable-moe-router-replay-dispatch-plan", "--disable-moe-router-replay-fused-gate"}
    # those of a training on rollouts are no fields of the config
    of_rollouts = {f"--moe-router-replay-{name}" for name in ("source", "max-lag", "stale-source")}
    assert set(given["help"]) == {words[0] for _, words, _ in OPTIONS.values()} | off | of_rollouts
    assert all(len(text) > 20 for text in given["help"].values()), given["help"]
    (default,) = patched.run(from_the_command_line, 1, [])
    assert default["values"] == {name: value for name, (value, _, _) in OPTIONS.items()}


def fields_of_the_config(rank: int) -> dict[str, Any]:
    start()
    off, on = config(moe_router_replay=False), config()
    given = {name: value for name, (_, _, value) in OPTIONS.items()}
    guests = {name: value for name, value in given.items() if "guest" in name}
    by_hand = vars(config(**{name: given[name] for name in given.keys() - guests.keys()}))
    # guests need the plan, which the others turn off, and ranks to go to
    by_hand |= {name: getattr(with_guests(guests), name) for name in guests}
    return {
        "declared": [f.name for f in fields(off) if f.name.startswith("moe_router_replay")],
        "off": [getattr(off, name) for name in OPTIONS],
        "by hand": [by_hand[name] for name in OPTIONS],
        "added by the check": sorted(vars(on).keys() - vars(off).keys()),
    }


def with_guests(options: dict[str, Any]) -> Any:
    return config(expert_model_parallel_size=2, **options)


def test_every_field_is_declared_and_the_check_adds_none(patched: TreeWorker) -> None:
    (got,) = patched.run(fields_of_the_config, 1)
    assert got["declared"] == list(OPTIONS)
    assert got["off"] == [default for default, _, _ in OPTIONS.values()]
    assert got["by hand"] == [value for _, _, value in OPTIONS.values()]
    assert not got["added by the check"]


def fusion_beside_an_engine(rank: int, records: bool) -> tuple[bool, bool | None]:
    """What is fused where Transformer Engine has a fused router, and perhaps an engine records."""
    start()
    option._upstream_fuses = lambda: True
    made = config(moe_router_fusion=True, moe_enable_routing_replay=records)
    return made.moe_router_fusion, made.moe_router_replay_fused_gate


def test_an_engine_that_records_has_no_fused_router(patched: TreeWorker) -> None:
    assert patched.run(fusion_beside_an_engine, 1, True) == [(False, True)]
    # the control: without the engine's option it stays fused
    assert patched.run(fusion_beside_an_engine, 1, False) == [(True, True)]


WITHOUT = "graphs_without_router"
ROUTER = ["moe_router", "moe_preprocess"]
CAPTURED = ["attn", *ROUTER]


def graphs(rank: int, asked: Any, impl: str, modules: Any, options: dict[str, Any]) -> Any:
    """The CUDA graphs of a config that is made, and what is logged; or the error's text."""
    start()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(option.__name__).addHandler(handler)
    name = option.field_of_modules(config())
    late = options.pop("late", False)
    given = {"cuda_graph_impl": impl, name: modules, **options}
    try:
        made = config(moe_router_replay=False if late else asked, **given)
        if late:
            made.moe_router_replay = asked
            model(made)
        # Megatron checks each field again, the graphs of inference too
        assert replace(made) == made
    except ValueError as error:
        return str(error)
    return (
        made.moe_router_replay,
        made.cuda_graph_impl,
        [m.name for m in getattr(made, name)],
        lines,
    )


@pytest.mark.parametrize(
    ("impl", "modules", "options"),
    [
        ("transformer_engine", CAPTURED, {}),
        ("local", CAPTURED, {}),
        ("local", [], {}),  # whole layers
        ("local", "full_iteration", {}),
        ("none", [], {"enable_cuda_graph": True}),
        ("transformer_engine", ["attn", "mlp", *ROUTER], {"moe_layer_freq": [0, 1, 1, 1]}),
    ],
)
def test_the_router_is_taken_out_of_cuda_graphs(
    patched: TreeWorker, impl: str, modules: Any, options: dict[str, Any]
) -> None:
    (got,) = patched.run(graphs, 1, WITHOUT, impl, modules, options)
    kept = ["attn", "mlp"] if "mlp" in modules else ["attn"]
    assert got[:3] == (True, "transformer_engine", kept)
    (line,) = got[3]
    assert line.startswith(f"moe_router_replay='{WITHOUT}': cuda_graph_"), line
    if isinstance(modules, list):
        assert f"={'+'.join(modules) or 'whole layers'} became" in line
    assert line.count(f" became {'+'.join(kept)}") == 1, line
    # control: without the word the same config is refused, and the error tells the word
    (refused,) = patched.run(graphs, 1, True, impl, modules, options)
    assert f'in code set moe_router_replay="{WITHOUT}", or give --cuda-graph-impl' in refused


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
def test_graphs_of_nothing_but_a_router_are_turned_off(patched: TreeWorker, impl: str) -> None:
    (got,) = patched.run(graphs, 1, WITHOUT, impl, ROUTER, {})
    assert got[:3] == (True, "none", [])
    (line,) = got[3]
    assert f"cuda_graph_impl={impl} became none" in line
    # the control, and what to give on the command line
    (refused,) = patched.run(graphs, 1, True, impl, ROUTER, {})
    assert refused.endswith("or give --cuda-graph-impl none")
    assert patched.run(graphs, 1, True, "none", ROUTER, {}) == [(True, "none", ROUTER, [])]


@pytest.mark.parametrize(("impl", "kept"), [("none", CAPTURED), ("transformer_engine", ["attn"])])
def test_graphs_without_a_router_stay_as_they_are(
    patched: TreeWorker, impl: str, kept: list[str]
) -> None:
    assert patched.run(graphs, 1, WITHOUT, impl, kept, {}) == [(True, impl, kept, [])]


@pytest.mark.parametrize(
    ("asked", "modules", "options", "why"),
    [
        ("yes", CAPTURED, {}, f'give True, or "{WITHOUT}"'),
        (
            WITHOUT,
            CAPTURED,
            {"late": True, "cuda_graph_impl": "none"},
            "came after the config was made",
        ),
        (WITHOUT, "full_iteration", FULL, "Megatron refuses graphs of transformer_engine"),
        (WITHOUT, CAPTURED, {"moe_router_force_load_balancing": True}, "replaces the logits"),
    ],
)
def test_what_the_router_cannot_be_taken_out_of(
    patched: TreeWorker, asked: str, modules: Any, options: dict[str, Any], why: str
) -> None:
    (text,) = patched.run(graphs, 1, asked, "local", modules, options)
    assert text.startswith("moe_router_replay"), text
    assert why in text


class Unfindable:
    """An importer before all others, for which some modules are not there, or are broken."""

    def __init__(self, missing: str, error: ImportError | None = None) -> None:
        self.missing, self.error = missing, error

    def find_spec(self, name: str, *_: Any) -> None:
        """Asked for each module that is not in `sys.modules`."""
        if name == self.missing:
            raise self.error or ModuleNotFoundError(f"No module named {name!r}", name=name)


def told(rank: int, missing: str, error: ImportError | None, argv: list[str] | None) -> str:
    """What a config with the option tells, or with `argv` the check of the arguments."""
    start()
    for name in [n for n in sys.modules if n == missing or n.startswith("megatron_r3")]:
        del sys.modules[name]
    sys.meta_path.insert(0, Unfindable(missing, error))  # type: ignore[arg-type]
    try:
        if argv is None:
            config()
        else:
            from megatron.training.arguments import parse_args, validate_args

            sys.argv = ["pretrain_gpt.py", *argv]
            validate_args(parse_args())
    except (Exception, SystemExit) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "nothing"


ARGV = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --num-experts 4 "
ARGV += "--max-position-embeddings 8 --micro-batch-size 1 --moe-router-replay "
ARGV += "--tokenizer-type NullTokenizer --vocab-size 16"


@pytest.mark.parametrize("argv", [None, ARGV.split()])
@pytest.mark.parametrize(
    "missing", ["megatron_r3", "megatron_r3.seams", "megatron_r3.replay.replayable"]
)
def test_a_missing_package_is_named(
    patched: TreeWorker, missing: str, argv: list[str] | None
) -> None:
    (text,) = patched.run(told, 1, missing, None, argv)
    if argv is None:
        assert text == (
            f"ValueError: moe_router_replay needs the megatron_r3 package: No module named "
            f"{missing!r}."
        )
    elif missing == "megatron_r3.replay.replayable":  # a part of it: shown as it is
        assert text == f"ModuleNotFoundError: No module named {missing!r}"
    else:  # the model's config refuses it, see above, and nobody knows the other options
        assert text == "nothing"
        (text,) = patched.run(told, 1, missing, None, [*argv, "--rollouts", "x"])
        assert text == "SystemExit: 2"


def test_a_broken_package_shows_its_own_error(patched: TreeWorker) -> None:
    error = ImportError("cannot import name 'gone'")
    for argv in (None, ARGV.split()):
        (text,) = patched.run(told, 1, "megatron_r3.replay.replayable", error, argv)
        assert text == f"ImportError: {error}"
