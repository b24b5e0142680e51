"""Lets SGLang 0.5.23 start without a GPU. Python runs this file in each process of the server.

SGLang imports two packages that are not installed here: sgl_kernel, which has no build for the CPU,
and torchvision. It also pins memory that CUDA would read. SGLang's torch-native code, which runs
here, needs neither the packages nor pinned memory. So stand-ins take the place of the packages:
they can be imported, and raise an error if anything in them is called. Memory is not pinned.

Python imports a module `sitecustomize` by itself when it starts. demo/sglang_server.py puts this
file's folder on the server's PYTHONPATH, which the processes that the server spawns inherit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

ABSENT = ("sgl_kernel", "torchvision")
PINNING_MODULE = "sglang.srt.mem_cache.pool_host.common"
PINNING = "_cuda_host_register"


class StandIn(type):
    """A class that stands for anything in an absent package, such as `torchvision.io.decode_jpeg`.

    Because it is a class, modules can use a stand-in in annotations and as a base class.
    """

    def __getattr__(cls, name: str) -> StandIn:
        if name.startswith("__"):  # Python itself looks for such names, and does not need them
            raise AttributeError(name)
        return StandIn(f"{cls.__name__}.{name}", (), {})

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Refuse every call: a stand-in has no value to return, and SGLang would use a wrong one.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{cls.__name__} was called, a stand-in: its package is not installed")


class AbsentModule(ModuleType):
    """A module of an absent package, in which every name is a stand-in."""

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        found = StandIn(f"{self.__name__}.{name}", (), {})
        setattr(self, name, found)  # the next access gives the same class
        return found


class Absent(MetaPathFinder, Loader):
    """Finds the modules of the absent packages, and makes them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of an absent package; None for any other module."""
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module that has every name."""
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module version 0: transformers fails at a module without a version."""
        module.__dict__["__version__"] = "0"


def leave_unpinned(buffer: Any, granularity: int | None = None) -> None:
    """Do nothing, instead of pinning `buffer` for CUDA's copies: no GPU reads it here."""


class WithoutPinning(SourceFileLoader):
    """Loads SGLang's module that pins memory, and replaces the function that pins."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then replace the function that pins.

        Raises:
            ImportError: the function that pins has another name in this version of SGLang.
        """
        super().exec_module(module)
        if not hasattr(module, PINNING):
            raise ImportError(f"{module.__name__} has no {PINNING}; is this SGLang 0.5.23?")
        setattr(module, PINNING, leave_unpinned)


class PinningFinder(MetaPathFinder):
    """Has SGLang's module that pins memory loaded by `WithoutPinning`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the module that pins memory; None for any other module."""
        spec = PathFinder.find_spec(fullname, path) if fullname == PINNING_MODULE else None
        if spec is not None and spec.origin is not None:
            spec.loader = WithoutPinning(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, PinningFinder())
sys.meta_path.append(Absent())  # last: an installed package comes before its stand-in
