"""A row of the table of options: a name, a type, a default, and the options it needs or excludes.

The table itself is in option_table.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Another option that an option needs, or does not go with, and why.

    Attributes:
        name: the other option, as an attribute of Megatron's arguments.
        values: the values that the other option must have (any of them), or must not have. Empty:
            the other option must be set, or must not be set.
        why: the reason, which ends the error message; it may say what to type.
    """

    name: str
    values: tuple[object, ...] = ()
    why: str = ""

    def said(self, now: object, needed: bool) -> str:
        """The other option as a person types it, and the reason, as the end of an error message.

        Args:
            now: the value of the other option.
            needed: whether the other option is needed; else it is not allowed.
        """
        if needed and self.values:
            values = [one for one in self.values if one is not None]
            now = values[0] if len(values) == 1 else " or ".join(str(one) for one in values)
        shown = typed(self.name, True if needed and not self.values else now)
        return f"{shown}: {self.why}" if self.why else shown


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: the attribute of Megatron's arguments.
        says: what the option does, as Markdown.
        default: the value if the option is not given.
        usual: the default as Markdown, where the default is not one plain value.
        metavar: stands for the value in help and docs; empty for a switch, or with choices.
        kind: makes the value from its text, as `type` in argparse.
        choices: the values that there are; empty for any.
        least: the smallest allowed number.
        of: what the number counts, as a word for the error message.
        nargs, const: as in argparse.
        needs, not_with: rules about other options, checked if the option is given.
        nothing: values that mean the same as no option, so that no rule is checked.
        field: whether the option is a field of TransformerConfig. A field of this
            tree has its default when it is not given; every other option is then None.
        group: the group of patches that brings a field.
    """

    name: str
    says: str
    default: Any = None
    usual: str = ""
    metavar: str = ""
    kind: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    least: float | None = None
    of: str = ""
    nargs: str | None = None
    const: Any = None
    needs: tuple[Rule, ...] = ()
    not_with: tuple[Rule, ...] = ()
    nothing: tuple[object, ...] = ()
    field: bool = False
    group: str = "r3"

    @property
    def is_of_store(self) -> bool:
        """Whether the option is about the rollouts of --rollouts, and does nothing without them."""
        return not self.field and self.name not in ("rollouts", "rl_write_rollouts")

    @property
    def shown_default(self) -> str:
        """The default as Markdown."""
        if self.usual or self.default is None:
            return self.usual or "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)

    @property
    def help(self) -> str:
        """What the option does, without the marks of Markdown: "[a](b), `c`" is "a, c"."""
        text = f"{self.says} (default: {self.shown_default})".replace("`", "").replace("%", "%%")
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)

    def refuse(self, args: Any, look: Callable[[Any, str], tuple[Any, bool]]) -> None:
        """Refuse a value that is impossible, or does not go with other options.

        Args:
            args: Megatron's arguments.
            look: gives the value of an option in them, and whether it is set.

        Raises:
            ValueError: the message names the option and its value, and the other option if there
                is one.
        """
        given = getattr(args, self.name, None)
        if given is None or given in self.nothing or (self.field and given == self.default):
            return
        shown = typed(self.name, given)
        if self.choices and given not in self.choices:
            raise ValueError(f"{shown}: it must be one of {', '.join(self.choices)}")
        if self.least is not None and not given >= self.least:  # NaN is refused too
            raise ValueError(f"{shown}: it must be {f'{self.least:g} or more {self.of}'.rstrip()}")
        for rules, needed in ((self.needs, True), (self.not_with, False)):
            for rule in rules:
                now, is_set = look(args, rule.name)
                if (now in rule.values if rule.values else is_set) != needed:
                    word = " needs" if needed else ": not together with"
                    raise ValueError(f"{shown}{word} {rule.said(now, needed)}")


def flag(name: str) -> str:
    """The option that sets an attribute of Megatron's arguments: `--global-batch-size`."""
    return f"--{name.replace('_', '-')}"


def typed(name: str, given: object) -> str:
    """An option with a value, as a person types it."""
    if isinstance(given, bool):
        return flag(name) if given else f"--no-{flag(name)[2:]}"
    words = given if isinstance(given, list | tuple) else [given]
    words = [f"{word:g}" if isinstance(word, float) else str(word) for word in words]
    return " ".join([flag(name), *words])
