"""Chooses what converts a model's weights: a family of this project, Megatron-Bridge, or mbridge.

`auto`, the default choice, takes this project's family if there is one, for two reasons. A bridge
cannot move every model of a family (gpt-oss, a Qwen3-MoE with a dense layer). And files must not
depend on which packages are installed: a resumed training compares its policies with those that it
wrote earlier. Where both can move a model, tests found the same bytes. For a model without a
family `auto` takes Megatron-Bridge or, if that does not know the model, mbridge; but a model of
REFUSED is refused.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_r3.replay.layers import unwrapped
from megatron_r3.replay.words import one_line, quoted
from megatron_r3.weights.all_ranks import everyones, my_rank, together
from megatron_r3.weights.bridge_family import BridgeFamily, Translator, shapes_of
from megatron_r3.weights.bridge_mbridge import Mbridge
from megatron_r3.weights.bridge_megatron_bridge import MegatronBridge
from megatron_r3.weights.directory import CONFIG, read_config
from megatron_r3.weights.families import FAMILIES, REFUSED, family_named
from megatron_r3.weights.family import Family, check_described, settings_of
from megatron_r3.weights.gather import plan_of
from megatron_r3.weights.known import rope_of
from megatron_r3.weights.pieces import Place, pieces_of

OPTION, VARIABLE = "--hf-bridge", "MEGATRON_R3_HF_BRIDGE"


# by the name on PyPI, in the order in which `auto` tries them
BRIDGES: dict[str, type[Translator]] = {"megatron-bridge": MegatronBridge, "mbridge": Mbridge}
CHOICES = ("auto", *BRIDGES, "own")


def choice_of_environment() -> str:
    """The value of MEGATRON_R3_HF_BRIDGE; `auto` if the variable is not set or empty.

    Raises:
        ValueError: the variable is set to something that is not in CHOICES.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ValueError(f"{VARIABLE} is {quoted(choice)}; expected one of {', '.join(CHOICES)}")
    return choice


def choose(choice: str, config: Mapping[str, Any], where: object, option: str = OPTION) -> str:
    """Choose what converts the weights of a model, by the packages installed on this rank.

    Args:
        choice: one of CHOICES.
        config: config.json, which `where` names in messages.
        option: the option or variable that the user has set; messages name it.

    Returns:
        "own", or a key of BRIDGES.

    Raises:
        ValueError: the chosen library is not installed or does not know the model; with `own`, this
            project has no family for the model; with `auto`, neither this project nor an installed
            library knows the model, or the model is in REFUSED.
    """
    model_type = config.get("model_type")
    if choice in BRIDGES:
        if reason := _why_not(choice, config):
            raise ValueError(f"{where}: {option} {choice}: {reason}")
        return choice
    is_ours = isinstance(model_type, str) and (model_type in FAMILIES or model_type in REFUSED)
    if choice == "own" or is_ours:
        family_named(model_type, where)
        return "own"
    reasons = []
    for name in BRIDGES:
        reason = _why_not(name, config)
        if reason is None:
            return name
        reasons.append(reason)
    raise ValueError(
        f"{where}: model_type is {quoted(model_type)}, which is not among this project's types "
        f"({', '.join(sorted(FAMILIES))}); {'; '.join(reasons)}"
    )


def _why_not(name: str, config: Mapping[str, Any]) -> str | None:
    """Why a bridge cannot be chosen for a model; None if it can."""
    bridge = BRIDGES[name]
    try:
        found = importlib.util.find_spec(bridge.module)
    except ModuleNotFoundError:  # not even the parent package `megatron` is there
        found = None
    if found is None:
        return f"{name} is not installed (pip install {name})"
    try:
        known = bridge.known_models()
    except Exception as error:  # the import of a foreign package can raise anything
        return f"{_title(name)} cannot be imported: {_reason(error)}"
    theirs = config.get(bridge.field)
    if not known & {str(each) for each in (theirs if isinstance(theirs, list) else [theirs])}:
        return f"{_title(name)} does not know the {bridge.field} {quoted(theirs)}"
    return None


def _title(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:  # e.g. a clone that is on the path
        return name


def chosen_family(
    choice: str, directory: Path, models: Sequence[torch.nn.Module], option: str = OPTION
) -> Family:
    """The family that converts weights between a model and a directory.

    All ranks must call this function.

    Args:
        choice: one of CHOICES.
        directory: a transformers directory of the model; weights need not be in it.
        models: this rank's model chunks, in Megatron's wrappers or without.
        option: as in `choose`.

    Raises:
        ValueError: see `choose`; or the ranks have different packages installed; or the bridge
            cannot move this model. All ranks raise the same.
    """
    where = directory / CONFIG
    config = together(lambda: read_config(directory))
    name = together(lambda: choose(choice, config, where, option))
    titles = everyones("own" if name == "own" else _title(name))
    if len({*titles}) > 1:
        raise ValueError(
            f"{where}: different ranks would convert the weights with "
            f"{', '.join(sorted({*titles}))}: install the same packages on all ranks"
        )
    if name == "own":
        return family_named(config.get("model_type"), where)
    if my_rank() == 0:
        print(f"{where}: {titles[0]} converts the weights", file=sys.stderr, flush=True)
    places = list(plan_of(together(lambda: pieces_of(models))))
    return together(lambda: _bridged(name, titles[0], directory, config, models, places))


def _bridged(
    name: str,
    title: str,
    directory: Path,
    config: Mapping[str, Any],
    models: Sequence[torch.nn.Module],
    places: Sequence[Place],
) -> BridgeFamily:
    """The family of a bridge; a model that the bridge cannot move is refused here."""
    chunk: Any = unwrapped(models[0])
    theirs, where = _hf_config(directory), directory / CONFIG
    try:
        translator = BRIDGES[name](title, theirs, chunk.config)
    except Exception as error:  # a foreign package can raise anything
        raise ValueError(f"{where}: {title} refuses this config: {_reason(error)}") from error
    family = BridgeFamily(translator, theirs, places, shapes_of(directory))
    settings = settings_of(chunk, None)
    family.check(chunk.config, settings)
    check_described(family, config, chunk.config, settings, where)
    family.tensors(chunk.config)
    return family


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error))}"


def _hf_config(directory: Path) -> Any:
    """transformers' config of a directory, without running Python code that may lie there."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # what a wrong field raises depends on the model's class
        where = directory / CONFIG
        raise ValueError(f"{where}: transformers refuses this config: {_reason(error)}") from error
    # transformers 5 keeps rope_theta in rope_parameters, but bridges read it from the config itself
    if not hasattr(config, "rope_theta") and "rope_theta" in (rope := rope_of(vars(config))):
        config.rope_theta = rope["rope_theta"]
    return config
