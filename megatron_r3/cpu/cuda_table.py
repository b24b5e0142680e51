"""`torch.cuda` on the CPU: a table of the names that have a meaning without a GPU.

Any other function or class of torch.cuda that acts on a device raises NotEmulated when called.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.accelerator
import torch.cuda
import torch.cuda.memory
import torch.cuda.nvtx
import torch.cuda.random

from megatron_r3.cpu.errors import NotEmulated

_MEMORY = 8 << 30  # bytes that a device claims to have
# names that stay: is_initialized may go on returning False, and cudaStatus holds constants
_UNTOUCHED = {"is_initialized", "cudaStatus"}


class _Done:
    """Work on the CPU, which is done when the call returns: there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def wait(self, other: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether the work is done; it always is."""
        return True


class Event(_Done):
    """A moment in time."""

    def record(self, stream: Any = None) -> None:
        """Remember this moment."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        return 1e3 * (end._seconds - self._seconds)


class Stream(_Done):
    """The only stream: everything happens in program order, so all Stream objects are equal."""

    cuda_stream, device, device_index = 0, torch.device("cpu"), 0
    wait_stream = wait_event = _Done.wait

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new event if it is None; return the event."""
        event = event or Event()
        event.record(self)
        return event


class Device(contextlib.nullcontext):
    """`with torch.cuda.device(0)`: there is one device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()


class Properties:
    """The properties of a Hopper GPU, so that Megatron refuses no feature as too new."""

    name, major, minor, multi_processor_count, total_memory = "cpu", 9, 0, 1, _MEMORY


class Generators:
    """The generator of every device is the CPU's: there is one random stream."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return torch.cuda.device_count()


_STREAM = Stream()


def _is(value: Any) -> Callable[..., Any]:
    """A function that always returns `value`."""
    return lambda *args, **kwargs: value


def _each(value: Any, *names: str) -> dict[str, Any]:
    """A separate function for each name, because torch.compile looks functions up by identity."""
    return {name: _is(value) for name in names}


def _seed() -> Callable[[int], Any]:
    return lambda seed: torch.default_generator.manual_seed(int(seed))


_RANDOM: dict[str, Any] = {
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "manual_seed": _seed(),
    "manual_seed_all": _seed(),
    "initial_seed": lambda: torch.initial_seed(),
}
_MEMORY_STATE: dict[str, Any] = {
    **_each(0, "memory_allocated", "max_memory_allocated", "device_memory_used"),
    **_each(0, "memory_reserved", "max_memory_reserved"),
    **_each(None, "empty_cache", "reset_peak_memory_stats"),
    "memory_stats": lambda device=None: defaultdict(int),
    "mem_get_info": _is((_MEMORY, _MEMORY)),
}
_NVTX = _each(None, "range_push", "range_pop", "mark")

TABLE: dict[str, Any] = {
    **_RANDOM,
    **_MEMORY_STATE,
    "is_available": _is(True),
    "is_bf16_supported": _is(True),
    # Megatron wants a device for each rank of a machine
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "current_device": _is(0),
    "get_device_capability": _is((Properties.major, Properties.minor)),
    "get_device_properties": lambda device=None: Properties(),
    "get_device_name": _is(Properties.name),
    "is_current_stream_capturing": _is(False),
    **_each(None, "set_device", "synchronize", "set_stream"),
    **_each(_STREAM, "current_stream", "default_stream"),
    "stream": lambda stream: contextlib.nullcontext(),
    "device": Device,
    "Stream": Stream,
    "Event": Event,
    "default_generators": Generators(),
    # torch keeps these calls back until CUDA is initialised; here they can run at once
    "_lazy_call": lambda function, **kwargs: function(),
    "_lazy_init": _is(None),
    # torch.cuda.FloatTensor becomes torch.FloatTensor, and so on
    **{name: getattr(torch, name) for name in dir(torch.cuda) if name.endswith("Tensor")},
}
"""What `torch.cuda.NAME` is on the CPU."""


def install() -> None:
    """Put TABLE into `torch.cuda`; everything else that acts on a device then raises an error."""
    for name in dir(torch.cuda):
        value = getattr(torch.cuda, name)
        if name not in TABLE and _does_something(name, value):
            setattr(torch.cuda, name, _refusal(name, value))
    # torch.cuda takes some of its functions from these modules, and so may other callers
    for module, names in (
        (torch.cuda, TABLE),
        (torch.cuda.random, _RANDOM),
        (torch.cuda.memory, _MEMORY_STATE),
        (torch.cuda.nvtx, _NVTX),
    ):
        for name, value in names.items():
            setattr(module, name, value)
    # A CUDA build of torch asks the driver for an accelerator; a CPU build answers None, as here.
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _does_something(name: str, value: Any) -> bool:
    """Whether a public name of torch.cuda is torch's own and acts on a device when it is called."""
    own = (getattr(value, "__module__", None) or "").startswith("torch.cuda")
    if name.startswith("_") or name in _UNTOUCHED or not own or not callable(value):
        return False
    passive = isinstance(value, type) and issubclass(value, Exception)
    return not passive and not name.endswith("Storage")  # unpickling looks these classes up


def _refusal(name: str, value: Any) -> Any:
    """A function that raises NotEmulated; for a class, a class that does so when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotEmulated(f"torch.cuda.{name} is not emulated on the CPU")

    return type(name, (), {"__new__": refuse}) if isinstance(value, type) else refuse
