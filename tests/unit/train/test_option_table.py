"""The table of options: each row parses, is refused as it says, and stands in the docs."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest
from training_arguments import ARGUMENTS

from megatron_r3.seams.arguments import check_args
from megatron_r3.train import option_table
from megatron_r3.train.option_kind import Option, Rule, flag, typed
from megatron_r3.train.option_table import OPTIONS, look, refuse_without_rollouts, value

OURS = [option for option in OPTIONS if not option.field]
A_VALUE = {int: "3", float: "0.5", str: "x"}


FIELDS = {option.name for option in OPTIONS if option.field}


def parsed(*words: str, fields: set[str] = FIELDS) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    option_table.add_to(parser, fields)
    return parser.parse_args(words)


@pytest.mark.parametrize("option", OURS, ids=lambda option: option.name)
def test_an_option_is_parsed_and_none_where_it_is_not_given(option: Option) -> None:
    assert getattr(parsed(), option.name) is None
    if option.default is False:
        assert getattr(parsed(flag(option.name)), option.name) is True
        return
    word = option.choices[-1] if option.choices else A_VALUE[option.kind]  # type: ignore[index]
    given = getattr(parsed(flag(option.name), word), option.name)
    assert given == ([option.kind(word)] if option.nargs == "+" else option.kind(word))
    if option.nargs == "?":
        assert getattr(parsed(flag(option.name)), option.name) == option.const
    if option.choices:
        with pytest.raises(SystemExit):
            parsed(flag(option.name), "made-up")


@pytest.mark.parametrize("option", OURS, ids=lambda option: option.name)
def test_an_option_of_a_store_alone_is_refused(option: Option) -> None:
    nothing = {one.name: one.default if one.field else None for one in OPTIONS}
    refuse_without_rollouts(SimpleNamespace(**nothing))
    given = SimpleNamespace(**nothing | {option.name: option.choices[0] if option.choices else 1})
    if not option.is_of_store:
        refuse_without_rollouts(given)
        return
    with pytest.raises(ValueError, match=f"^{flag(option.name)} does nothing without --rollouts"):
        refuse_without_rollouts(given)


RULES = [(option, rule) for option in OPTIONS for rule in (*option.needs, *option.not_with)]


@pytest.mark.parametrize(("option", "rule"), RULES, ids=lambda one: one.name)
def test_a_rule_refuses_with_both_names(option: Option, rule: Rule) -> None:
    """The value that breaks the rule is refused by name; the one that keeps it is not."""
    given = {int: 3, float: 0.5, str: "x"}[option.kind]  # type: ignore[index]
    if option.choices:
        given = next(one for one in option.choices if one not in (option.default, *option.nothing))
    if isinstance(option.default, bool) or option.name.endswith("fused_gate"):
        given = not option.default
    args = dict(ARGUMENTS) | {option.name: [given] if option.nargs == "+" else given}
    for other in option.needs:  # all that it needs, so that one rule alone is broken
        args[other.name] = other.values[0] if other.values else 1
    for other in option.not_with:
        args[other.name] = None
    option.refuse(SimpleNamespace(**args), look)
    needed = rule in option.needs
    args[rule.name] = (None if needed else 1) if not rule.values else rule.values[0]
    if needed:
        default = value(SimpleNamespace(**args | {rule.name: None}), rule.name)
        args[rule.name] = "another" if rule.values and default in rule.values else None
    said = f"{flag(option.name)[2:]}.*{' needs ' if needed else ': not together with '}"
    with pytest.raises(ValueError, match=said + flag(rule.name)):
        option.refuse(SimpleNamespace(**args), look)


def test_a_number_below_the_least_is_refused() -> None:
    lows = [option for option in OPTIONS if option.least is not None]
    assert len(lows) >= 8
    for option in lows:
        given = option.kind(option.least) - 1  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"{flag(option.name)} {given:g}: it must be "):
            option.refuse(SimpleNamespace(**{**ARGUMENTS, option.name: given}), look)


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.choices], ids=lambda o: o.name)
def test_a_value_that_is_no_choice_is_refused(option: Option) -> None:
    given = SimpleNamespace(**{**ARGUMENTS, option.name: "made-up"})
    with pytest.raises(ValueError, match=f"{flag(option.name)} made-up: it must be one of "):
        option.refuse(given, look)


def test_a_made_up_row_is_an_option_and_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Option("rollouts_made_up", "do [it](a.md)", metavar="N", kind=int, least=1)
    monkeypatch.setattr(option_table, "OPTIONS", (*OPTIONS, row))
    monkeypatch.setitem(option_table.BY_NAME, row.name, row)
    assert parsed("--rollouts-made-up", "3").rollouts_made_up == 3
    with pytest.raises(ValueError, match="--rollouts-made-up 0: it must be 1 or more"):
        option_table.refuse_options(SimpleNamespace(**ARGUMENTS, rollouts_made_up=0))


def test_a_field_that_the_tree_lacks_is_an_error_that_names_the_group(capsys):
    with pytest.raises(SystemExit):  # the control: with the field, its flag is Megatron's to make
        parsed("--moe-router-replay-guest-slots", "2")
    assert "unrecognized arguments" in capsys.readouterr().err
    without = {name for name in FIELDS if "guest" not in name}
    assert parsed(fields=without).moe_router_replay_guest_slots is None
    for words in (["2"], []):
        with pytest.raises(SystemExit):
            parsed("--moe-router-replay-guest-slots", *words, fields=without)
        assert "no patches of the group guests" in capsys.readouterr().err


def line_of(option: Option) -> str:
    """The option's line in the tables of docs/train.md."""
    what = option.metavar or "|".join(option.choices)
    # for a field whose default is True or None, Megatron makes only the flag --no-...
    switches_off = option.field and not what and option.default is not False
    name = typed(option.name, not switches_off)
    what = {"+": f"{what} ...", "?": f"[{what}]"}.get(option.nargs or "", what)
    cells = (f"`{f'{name} {what}'.strip()}`", option.shown_default, option.says)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def test_the_docs_have_the_tables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "train.md").read_text()
    for fields in (False, True):
        lines = [line_of(option) for option in OPTIONS if option.field == fields]
        assert "|---|---|---|\n" + "\n".join(lines) + "\n\n" in page, "\n".join(lines)


def test_nothing_is_looked_at_where_nothing_is_asked() -> None:
    check_args(SimpleNamespace(moe_router_replay=False, **vars(parsed())))
    with pytest.raises(AttributeError):  # the control: it goes on to read Megatron's arguments
        check_args(SimpleNamespace(moe_router_replay=False, **vars(parsed("--rollouts", "a"))))


def test_latent_attention_gets_the_numbers_of_yarn() -> None:
    given = {"moe_router_replay": False, **vars(parsed()), "yarn_beta_fast": 1.0}
    for latent in (True, False):
        args = SimpleNamespace(**given, multi_latent_attention=latent, yarn_beta_slow=None)
        check_args(args)
        assert getattr(args, "beta_fast", None) == (1.0 if latent else None)
        assert getattr(args, "beta_slow", None) == (1 if latent else None)
