"""The model families whose weights can be moved, by transformers' model type."""

from __future__ import annotations

from typing import Any

from megatron_r3.replay.words import quoted
from megatron_r3.weights.families import table
from megatron_r3.weights.families.table import REFUSED
from megatron_r3.weights.families.table_family import OtherFamilyError, TableFamily
from megatron_r3.weights.family import ModelSettings

FAMILIES: dict[str, TableFamily] = {family.model_type: family for family in table.FAMILIES}


def family_named(model_type: object, where: object) -> TableFamily:
    """The family of a config.json's `model_type`.

    Args:
        model_type: the field's value in the file; it may be no string.
        where: the file; messages name it.

    Raises:
        ValueError: this project has no such family; for a type of REFUSED the message says why.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = REFUSED.get(str(model_type))
    raise ValueError(
        f"{where}: model_type is {quoted(model_type)}: "
        + (f"{reason}; " if reason else "")
        + f"this project itself moves only models of these types: {', '.join(sorted(FAMILIES))}"
    )


def family_of(config: Any, settings: ModelSettings) -> TableFamily:
    """The family of a Megatron model.

    Args:
        config: Megatron's TransformerConfig.

    Raises:
        ValueError: the model is of several families or of none. If it is of none, the message says
            what the nearest family needs.
    """
    found, reasons = [], []
    for family in FAMILIES.values():
        try:
            family.check(config, settings)
            if not family.by_name:
                found.append(family)
        except OtherFamilyError as error:
            reasons.append(error)
    if not found:
        nearest = min(reasons, key=lambda error: len(error.lacks))
        raise ValueError(
            f"this model cannot be moved to transformers: {nearest}; none of the families "
            f"({', '.join(sorted(FAMILIES))}) is nearer"
        )
    if len(found) > 1:
        names = ", ".join(family.model_type for family in found)
        raise ValueError(
            f"this model could be any of {names}: name a transformers directory of the model"
        )
    return found[0]
