"""The kinds of rows of a family's table: each is one thing that config.json and Megatron both say.

A row serves every direction: from config.json to Megatron's arguments, from a Megatron model to
config.json, and the comparison of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_r3.replay.words import quoted
from megatron_r3.weights.family import ModelSettings

Fields = Mapping[str, Any]
Needed = list[tuple[bool, str]]  # whether something holds, and what it is


def nothing(config: Any, settings: ModelSettings, made: Fields) -> Fields:
    """What a row writes of which config.json has no field."""
    return {}


@dataclass(frozen=True)
class Row:
    """A row, as functions.

    Attributes:
        name: in config.json, and in messages.
        read: the value that a config.json has; two models are the same if all rows read the same.
            Its arguments are config.json, where the fields of rope_parameters stand beside the
            others, and what the rows above have read. It raises a ValueError that names a field
            which is missing, or whose value Megatron cannot do.
        write: fields of config.json for a Megatron model. Its arguments are TransformerConfig, the
            ModelSettings, and what the rows above have written.
        arguments: Megatron's arguments for what was read, and for what all rows have read.
        names: the fields of config.json that are read, if it is not `name` alone.
        attributes: fields of TransformerConfig or ModelSettings of which the row knows every value.
        needs: what a TransformerConfig of the family needs beside values that stand in the table.
    """

    name: str
    read: Callable[[Fields, Fields], Any]
    write: Callable[[Any, ModelSettings, Fields], Fields] = nothing
    arguments: Callable[[Any, Fields], list[str]] = lambda value, fields: []
    names: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    needs: Callable[[Any], Needed] = lambda config: []


def number(
    name: str,
    flag: str,
    attribute: str = "",
    default: float | Callable[[Fields], float] | None = None,
    also: tuple[str, ...] = (),
    may_be_null: bool = False,
) -> Row:
    """A number that both have.

    Args:
        flag: Megatron's argument, without its dashes.
        attribute: of TransformerConfig or ModelSettings; by default it is called as the argument.
        default: what transformers takes where config.json lacks the field, or makes of the fields
            above. None: it must be there.
        also: other names in config.json; releases of transformers differ.
        may_be_null: whether null is a value, for which there is no argument.
    """
    attribute, names = attribute or flag.replace("-", "_"), (name, *also)

    def read(theirs: Fields, done: Fields) -> Any:
        value = next((theirs[each] for each in names if theirs.get(each) is not None), None)
        if value is None:
            value = default(done) if callable(default) else default
        if value is None and not may_be_null:
            raise ValueError(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise ValueError(f"{name} is {quoted(value)}; expected a number")
        if flag == "rotary-base" and isinstance(value, float) and not value.is_integer():
            raise ValueError(f"{name} is {value}; --rotary-base takes whole numbers")
        return value

    return Row(
        name,
        read,
        lambda config, settings, made: {
            name: getattr(config if hasattr(config, attribute) else settings, attribute)
        },
        lambda value, fields: [] if value is None else [f"--{flag}", shown(value)],
        names,
        (attribute,),
    )


def switch(name: str, flag: str, default: bool, reverse: bool = False) -> Row:
    """A field that is true or false, and an argument of Megatron without a value.

    Args:
        flag, default: as of `number`.
        reverse: whether the argument says the opposite of the field.
    """
    attribute = flag.replace("-", "_")

    def read(theirs: Fields, done: Fields) -> bool:
        value = default if theirs.get(name) is None else theirs[name]
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {quoted(value)}; expected true or false")
        return value

    return Row(
        name,
        read,
        lambda config, settings, made: {name: bool(getattr(config, attribute)) != reverse},
        lambda value, fields: [f"--{flag}"] if value != reverse else [],
        attributes=(attribute,),
    )


def fixed(name: str, *values: Any, **more: Any) -> Row:
    """A field of which Megatron can do one value, e.g. `fixed("hidden_act", "silu")`.

    Args:
        values: those that mean the same. The first one is written, unless it is None, and is what
            transformers takes where the field is missing. A list is read as the set of its words.
        more: attributes of the Row.
    """

    def read(theirs: Fields, done: Fields) -> None:
        value = theirs.get(name, values[0])
        if isinstance(value, list):
            value = sorted({*map(str, value)})
        if value not in values:
            raise cannot(theirs, name, f"only {values[-1]!r}", values[0])

    written = {} if values[0] is None else {name: values[0]}
    return Row(name, read, lambda config, settings, made: written, **more)


def ignored(name: str, written: Any = None) -> Row:
    """A field that changes nothing of a model that is of the family.

    Args:
        written: what is written for it; None: nothing.
    """
    made = {} if written is None else {name: written}
    return Row(name, lambda theirs, done: None, lambda config, settings, above: made)


def derived(name: str, made_of: Callable[[Fields], Any], default: Any = None, **more: Any) -> Row:
    """A field of which Megatron can do what other fields make it, and nothing else.

    Args:
        made_of: the value, out of the fields above.
        default: what transformers takes where the field is missing. None: the same value, also for
            null.
        more: attributes of the Row.
    """

    def read(theirs: Fields, done: Fields) -> Any:
        want, value = made_of(done), theirs.get(name, default)
        if value != want and not (value is None and default is None):
            raise cannot(theirs, name, f"only {want}, by its other fields", default)
        return want

    given = {"write": lambda config, settings, made: {name: made_of(made)}, **more}
    return Row(name, read, **given)


def cannot(theirs: Fields, name: str, can: str, default: object = None) -> ValueError:
    """The error for a value of config.json that Megatron cannot do.

    Args:
        can: what it can do.
        default: the value of a missing field.
    """
    value, model_type = theirs.get(name, default), theirs["model_type"]
    return ValueError(f"{name} is {quoted(value)}; of a {model_type} model Megatron can do {can}")


def shown(value: Any) -> str:
    """A value as an argument: 10000.0 is 10000 there, because argparse may expect an int."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
