"""Counts the Megatron-Bridge recipes that replay takes, and says why it refuses the others.

    python -m keepers.bridge_recipes CLONE/src        # of a clone of NVIDIA-NeMo/Megatron-Bridge

A recipe is a function that fills in a config. Each recipe runs with stand-ins in place of Megatron
and of the other packages that it imports, so no GPU, no download and no Transformer Engine is
needed. What a model's own config or a mixed-precision recipe would add is not seen.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from megatron_r3.replay.replayable import refusals

RECIPES = "megatron.bridge.recipes"
# the packages that recipes import, which `StandIns` replaces
_ABSENT = {*"megatron transformer_engine omegaconf nemo_run transformers datasets modelopt".split()}
# Prefixes of the fields about routing. Such a field is missing in a `_Config` until a recipe sets
# it; any other field that is not set has a stand-in as its value.
_OF_ROUTING = ("moe_", "num_moe", "cuda_graph", "flextron", "transformer_impl")


class _Anything(int):
    """Stands for a value or a function: it is 0 in arithmetic, and a call returns a config."""

    def __call__(self, *_: Any, **fields: Any) -> _Config:
        return _Config(**fields)

    def __getattr__(self, name: str) -> Any:
        return _unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Forget what is set on a stand-in."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


class _OfClass(type):
    def __getattr__(cls, name: str) -> Any:
        return _unknown(name)


class _Config(metaclass=_OfClass):
    """Stands for a config, and keeps the fields that are set."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_OF_ROUTING):
            raise AttributeError(name)
        return _unknown(name)


def _unknown(name: str) -> _Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()


class _AutoBridge:
    """Stands for Megatron-Bridge's class that makes a config from a model's name on a hub."""

    @staticmethod
    def from_hf_pretrained(*_: Any, **__: Any) -> _Config:
        return _Config(to_megatron_provider=_Config)

    from_hf_config = from_hf_pretrained


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "AutoBridge":
            return _AutoBridge
        # recipes give PEFT and names such as ConfigContainer to isinstance(), which needs a class
        is_class = name[:1].isupper() and (name == "PEFT" or not name.isupper())
        return _OfClass(name, (_Config,), {}) if is_class else _unknown(name)


class StandIns(MetaPathFinder, Loader):
    """Makes stand-ins for modules, except for the recipes, which lie in `source`."""

    def __init__(self, source: str) -> None:
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a stand-in; None for a recipe, or a module of a package not in `_ABSENT`."""
        if name.split(".")[0] not in _ABSENT or name.startswith(RECIPES):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that has every name. `__path__` is the real folder: recipes are found below."""
        module = _Module(spec.name)
        module.__path__ = [f"{self.source}/{spec.name.replace('.', '/')}"]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: a stand-in has no source."""


def moe_recipes() -> Iterator[tuple[str, Any]]:
    """The name of each recipe that sets an option of MoE, and the model's config that it fills in.

    A recipe that raises TypeError or NotImplementedError is left out and named on stderr.
    """
    package = importlib.import_module(RECIPES)
    for info in pkgutil.walk_packages(package.__path__, f"{RECIPES}."):
        module = importlib.import_module(info.name)
        for name, recipe in vars(module).items():
            own = isinstance(recipe, FunctionType) and recipe.__module__ == info.name
            if not own or not name.endswith("_config") or name.startswith(("_", "default_")):
                continue
            try:
                model = getattr(recipe(), "model", None)
            except (TypeError, NotImplementedError) as error:
                print(f"not run: {name}: {error}", file=sys.stderr)
                continue
            if not isinstance(model, _Config):
                continue
            given = {field: value for field, value in vars(model).items() if value is not None}
            experts = given.get("expert_model_parallel_size", 1) > 1 or "moe_" in " ".join(given)
            # recipes of dense models set the dispatcher to None
            if experts and vars(model).get("moe_token_dispatcher_type", "") is not None:
                vars(model)["num_moe_experts"] = 8
                yield name, model


def main(argv: Sequence[str] | None = None) -> None:
    """Print why recipes are refused, and how many are taken."""
    (source,) = sys.argv[1:] if argv is None else argv
    sys.meta_path.insert(0, StandIns(source))
    found = {name: refusals(model) for name, model in moe_recipes()}
    for name, reasons in found.items():
        for reason in reasons:
            print(f"{name}: {reason}")
    taken = sum(not reasons for reasons in found.values())
    print(f"replay takes {taken} of {len(found)} recipes as they are")


if __name__ == "__main__":
    main()
