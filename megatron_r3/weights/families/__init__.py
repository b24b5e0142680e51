"""The model families whose weights can be moved, by transformers' model type."""

from __future__ import annotations

from typing import Any

from megatron_r3.replay.words import quoted
from megatron_r3.weights.families.deepseek_v3 import DeepseekV3
from megatron_r3.weights.families.glm4_moe import Glm4Moe
from megatron_r3.weights.families.gpt_oss import GptOss
from megatron_r3.weights.families.mixtral import Mixtral
from megatron_r3.weights.families.qwen2_moe import Qwen2Moe
from megatron_r3.weights.families.qwen3_moe import Qwen3Moe
from megatron_r3.weights.family import Family, ModelSettings, OtherFamilyError

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (Qwen3Moe(), Qwen2Moe(), Mixtral(), DeepseekV3(), Glm4Moe(), GptOss())
}
# types that a reader could expect here, and why they are not
REFUSED = {
    "olmoe": (
        "its norms of queries and keys are over all heads together, Megatron's (SelfAttention in "
        "megatron/core/transformer/attention.py) over each head"
    ),
}


def family_named(model_type: object, where: object) -> Family:
    """The family of a config.json's `model_type`.

    Args:
        model_type: as it was read; it need not be a string.
        where: what a message names, e.g. the file.

    Raises:
        ValueError: there is no such family.
    """
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = REFUSED.get(str(model_type))
    raise ValueError(
        f"{where}: model_type is {quoted(model_type)}: "
        + (f"{reason}; " if reason else "")
        + f"only models of these types can be moved: {', '.join(sorted(FAMILIES))}"
    )


def family_of(config: Any, settings: ModelSettings) -> Family:
    """The family of a Megatron model.

    Args:
        config: Megatron's TransformerConfig.

    Raises:
        ValueError: the model is of no family, with what the nearest one needs; or of several.
    """
    found, reasons = [], []
    for family in FAMILIES.values():
        try:
            family.check(config, settings)
            found.append(family)
        except OtherFamilyError as error:
            reasons.append(error)
    if not found:
        nearest = min(reasons, key=lambda error: len(error.lacks))
        raise ValueError(
            f"this model cannot be moved to transformers: {nearest}; each of the other families "
            f"({', '.join(sorted(FAMILIES))}) needs as much or more"
        )
    if len(found) > 1:
        names = ", ".join(family.model_type for family in found)
        raise ValueError(f"this model could be any of {names}: say which")
    return found[0]
