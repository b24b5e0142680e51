"""The kinds of rows in a family's table. A row says what fields of config.json mean for Megatron.

A row serves three purposes: to translate config.json into Megatron's arguments, to write the
config.json of a Megatron model, and to compare a config.json with a Megatron model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_r3.replay.words import quoted
from megatron_r3.weights.family import ModelSettings

Fields = Mapping[str, Any]
Needed = list[tuple[bool, str]]  # for each condition: whether it holds, and its text for messages


def nothing(config: Any, settings: ModelSettings, made: Fields) -> Fields:
    """The `write` of a row that writes no field of config.json."""
    return {}


@dataclass(frozen=True)
class Row:
    """The functions of one row.

    Attributes:
        name: the field's name in config.json, and in messages.
        read: returns the value in a config.json. The function takes config.json, with the fields of
            rope_parameters put beside the others, and what earlier rows have read. It raises a
            ValueError that names the field if the field is missing, or if Megatron does not support
            the value.
        write: returns fields of config.json for a Megatron model. The function takes the
            TransformerConfig, the ModelSettings, and what earlier rows have written.
        arguments: returns Megatron's arguments. The function takes what this row has read, and what
            all rows have read.
        names: the fields that a config.json may have because of this row; empty for `name` alone.
        attributes: fields of TransformerConfig or ModelSettings that `write` or `needs` reads. The
            family accepts each of their values that `needs` accepts.
        needs: returns further conditions that a TransformerConfig of the family must meet.
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
    """The row of a number that config.json and Megatron both have.

    Args:
        flag: Megatron's argument, without the dashes in front.
        attribute: the field of TransformerConfig or ModelSettings; by default named like `flag`.
        default: transformers' value if the field is missing, or a function that computes that value
            from what earlier rows have read. None: the field must be there, unless `may_be_null`.
        also: other names of the field in config.json; releases of transformers differ.
        may_be_null: whether the field may be null or missing; Megatron then gets no argument.
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
    """The row of a field that is true or false, and of a Megatron argument without a value.

    Args:
        flag: as in `number`.
        default: transformers' value if the field is missing.
        reverse: whether Megatron's argument means that the field is false.
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
    """The row of a field with one value that Megatron supports: `fixed("hidden_act", "silu")`.

    Args:
        values: all ways to write the supported value. The first of them stands for a missing field,
            and is the one to write; a first value of None is not written. A list in config.json is
            compared as the sorted list of its different words.
        more: further attributes of the Row.
    """

    def read(theirs: Fields, done: Fields) -> None:
        value = theirs.get(name, values[0])
        if isinstance(value, list):
            value = sorted({*map(str, value)})
        if value not in values:
            one = next((each for each in reversed(values) if each is not None), None)
            raise cannot(theirs, name, f"only {one!r}", values[0])

    written = {} if values[0] is None else {name: values[0]}
    return Row(name, read, lambda config, settings, made: written, **more)


def ignored(name: str, written: Any = None) -> Row:
    """The row of a field that changes nothing in a model of the family.

    Args:
        written: the value to write; None leaves the field out.
    """
    made = {} if written is None else {name: written}
    return Row(name, lambda theirs, done: None, lambda config, settings, above: made)


def derived(name: str, made_of: Callable[[Fields], Any], default: Any = None, **more: Any) -> Row:
    """The row of a field for which Megatron supports one value, which follows from other fields.

    Args:
        made_of: computes the supported value from what earlier rows have read or written.
        default: transformers' value if the field is missing. None: a field that is missing or null
            means the value of `made_of`.
        more: further attributes of the Row.
    """

    def read(theirs: Fields, done: Fields) -> Any:
        want, value = made_of(done), theirs.get(name, default)
        if value != want and not (value is None and default is None):
            raise cannot(theirs, name, f"only {want}, which follows from other fields", default)
        return want

    given = {"write": lambda config, settings, made: {name: made_of(made)}, **more}
    return Row(name, read, **given)


def cannot(theirs: Fields, name: str, can: str, default: object = None) -> ValueError:
    """The error for a value of config.json that Megatron does not support.

    Args:
        can: the values that Megatron supports.
        default: transformers' value if the field is missing.
    """
    value, model_type = theirs.get(name, default), theirs["model_type"]
    return ValueError(f"{name} is {quoted(value)}; in a {model_type} model Megatron supports {can}")


def shown(value: Any) -> str:
    """A value as an argument: 10000.0 becomes 10000, because argparse may expect an int."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
