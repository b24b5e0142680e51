"""CUDA devices on CPU tensors: a torch call that names a CUDA device runs on the CPU.

A torch function mode rewrites `device="cuda:0"`, `device=0`, `.to(0)`, `.cuda()`, `.is_cuda` and
`.type()`: torch.empty(2, device="cuda") makes a CPU tensor with an `is_cuda` that is True. A mode
covers one thread, and torch.autograd leaves the mode, so the mode is entered again in new threads
and around autograd's engine. The functions of `torch.cuda` are in `cuda_table`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd
from torch.overrides import TorchFunctionMode

from megatron_r3.cpu import cuda_table
from megatron_r3.cpu.errors import InstallError, NotEmulated

CPU = torch.device("cpu")
# Python makes a new wrapper at each access to `__get__`, so compare it with == and not with `is`
_IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__
_state = {"installed": False}


def _is_cuda_device(device: object) -> bool:
    """Whether `device` names a CUDA device: "cuda", "cuda:1", torch.device("cuda") or an index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.split(":")[0] == "cuda"
    return type(device) is int  # torch reads an index as a CUDA device; True is no index


class CudaToCpu(TorchFunctionMode):
    """The function mode: a torch call that names a CUDA device runs on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The call `func(*args, **kwargs)`, with the CPU for every CUDA device."""
        # Megatron asserts `tensor.is_cuda` and then calls CUDA: here every tensor is a CUDA tensor
        if func == _IS_CUDA:
            return True
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.cpu or func is torch.Tensor.pin_memory:
            # on a GPU both calls copy: a later write to one tensor must not show in the other
            return args[0].clone()
        if func is torch.Tensor.type:
            return _tensor_type(func, *args, **(kwargs or {}))
        if func is torch.device and args and type(args[0]) is int:
            return torch.device("cuda", *args)  # torch.device(0) fails without an accelerator
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda_device(args[1]):
            args = (args[0], CPU, *args[2:])
        if not kwargs:  # a short cut for most calls: a tiny training step makes 60,000 calls
            return func(*args)
        kwargs = dict(kwargs)
        if _is_cuda_device(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _tensor_type(
    func: Any, tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Tensor.type() with CUDA's names of types, such as torch.cuda.FloatTensor."""
    if dtype is None:
        name = func(tensor)
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return func(tensor, dtype, *args, **kwargs)


def installed() -> bool:
    """Whether this process runs CUDA calls on the CPU."""
    return _state["installed"]


def install() -> None:
    """Run CUDA calls on the CPU from here on, in this process and its threads.

    A second call does nothing.

    Raises:
        InstallError: torch has a GPU here, or does not show `is_cuda` to the mode.
    """
    if installed():
        return
    if torch.cuda.is_available():
        raise InstallError(
            "torch has a GPU here (torch.cuda.is_available()): run the script without "
            "megatron_r3.cpu, or hide the GPU with CUDA_VISIBLE_DEVICES="
        )
    cuda_table.install()
    # torch's own method refuses a Stream of cuda_table while it parses arguments, before any mode
    # sees the call
    torch.Tensor.record_stream = _record_stream  # type: ignore[assignment]
    _refuse_cuda_autocast()
    _cover_autograd()
    _cover_threads()
    CudaToCpu().__enter__()
    if not torch.empty(1).is_cuda:
        raise InstallError(
            f"torch {torch.__version__} does not show is_cuda to a function mode: install another "
            "version of torch"
        )
    _state["installed"] = True


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Do nothing: CPU tensors need no stream bookkeeping."""


def _refuse_cuda_autocast() -> None:
    """Refuse autocast("cuda"), which on CPU tensors would silently cast nothing."""
    enter = torch.autocast.__enter__

    @functools.wraps(enter)
    def checked(self: torch.autocast) -> Any:
        if self.device == "cuda" and self._enabled:
            raise NotEmulated('torch.autocast("cuda") is not emulated on the CPU')
        return enter(self)

    torch.autocast.__enter__ = checked  # type: ignore[method-assign]


def _cover_autograd() -> None:
    """Enter the mode around autograd's engine: autograd.backward and autograd.grad leave it."""
    torch.autograd._engine_run_backward = _in_mode(torch.autograd._engine_run_backward)


def _cover_threads() -> None:
    """Make each thread that starts from here on enter a mode: a mode covers one thread only."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_in_mode(self: threading.Thread) -> None:
        self.run = _in_mode(self.run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = start_in_mode  # type: ignore[method-assign]


def _in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `function` inside of the mode."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with CudaToCpu():
            return function(*args, **kwargs)

    return run
