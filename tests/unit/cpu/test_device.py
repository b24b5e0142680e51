"""CUDA calls on the CPU: what is rewritten, what is refused, and where the mode reaches.

Each case runs in a forked process: the layer is for a whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from megatron_r3.cpu import InstallError, NotEmulated, cuda_table, device
from proof.fidelity.rig.forkserver import run_ranks


def in_layer(case: Callable[[], Any]) -> Any:
    def run(rank: int) -> Any:
        device.install()
        return case()

    return run_ranks(run, 1, timeout_s=60)[0]


def test_everything_in_torch_cuda_has_a_meaning_or_refuses_by_name() -> None:
    originals = [
        name
        for name in dir(torch.cuda)
        if name not in cuda_table.TABLE
        and cuda_table._does_something(name, getattr(torch.cuda, name))
    ]
    assert {"CUDAGraph", "graph", "utilization", "memory_snapshot", "ipc_collect"} <= {*originals}

    def refused() -> list[str]:
        names = []
        for name in originals:
            try:
                getattr(torch.cuda, name)()
            except NotEmulated as error:
                if f"torch.cuda.{name} " in str(error):
                    names.append(name)
        return names

    assert in_layer(refused) == originals


def test_a_refused_class_is_still_a_class() -> None:
    assert in_layer(lambda: isinstance(torch.ones(1), torch.cuda.CUDAGraph)) is False


@pytest.mark.parametrize("name", ["cuda", "cuda:1", torch.device("cuda", 1), 0])
def test_a_cuda_device_means_the_cpu(name: Any) -> None:
    def case() -> list[str]:
        made = [
            torch.empty(2, device=name),
            torch.tensor([1.0], device=name),
            torch.ones(2).to(name),
            torch.ones(2).to(name, torch.float16),
            torch.ones(2).to(device=name),
            torch.ones(2).new_zeros(3, device=name),
            torch.ones(2).cuda(),
            torch.nn.Linear(2, 2, device=name).weight,
            torch.nn.Linear(2, 2).to("cuda").weight,
            torch.nn.Linear(2, 2).cuda().weight,
            torch.empty(2, pin_memory=True),
        ]
        return [f"{tensor.device} {tensor.is_cuda}" for tensor in made]

    assert set(in_layer(case)) == {"cpu True"}


def test_a_device_given_by_its_index_alone() -> None:
    def case() -> list[str]:
        with torch.device(0):  # as Megatron's YarnRotaryEmbedding makes its tensors
            return [torch.arange(2).device.type, torch.device(0).type]

    assert in_layer(case) == ["cpu", "cuda"]


def test_other_devices_and_dtypes_are_left_alone() -> None:
    def case() -> list[str]:
        meta = torch.empty(2, device="meta").to(torch.bfloat16)
        return [str(meta.device), str(meta.dtype), str(torch.ones(1).to(torch.int8).dtype)]

    assert in_layer(case) == ["meta", "torch.bfloat16", "torch.int8"]


def test_what_leaves_the_device_is_a_copy() -> None:
    def case() -> list[float]:
        weight = torch.ones(1)
        host, pinned = weight.cpu(), weight.pin_memory()
        weight.fill_(5)
        return [host.item(), pinned.item(), weight.cuda().item()]

    assert in_layer(case) == [1.0, 1.0, 5.0]


def test_tensor_types_have_cuda_names() -> None:
    def case() -> list[Any]:
        device.install()
        with device.CudaToCpu():  # two modes, as in a backward that runs inside of one
            nested = torch.ones(1).type()
        ones = torch.ones(1)
        half, made = ones.type("torch.cuda.HalfTensor"), torch.cuda.FloatTensor([2])
        return [nested, ones.type(), half.dtype == torch.float16, made.item()]

    name = "torch.cuda.FloatTensor"
    assert in_layer(case) == [name, name, True, 2.0]


class SeesCuda(torch.autograd.Function):
    seen: list[bool] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        SeesCuda.seen.append(grad.is_cuda and torch.empty(1, device="cuda").is_cuda)
        return grad


def test_autograd_runs_in_the_mode() -> None:
    def case() -> list[bool]:
        for run in (
            lambda x: SeesCuda.apply(x).sum().backward(),
            lambda x: torch.autograd.backward(SeesCuda.apply(x).sum()),
            lambda x: torch.autograd.grad(SeesCuda.apply(x).sum(), x),
        ):
            run(torch.ones(1, requires_grad=True))
        return [*SeesCuda.seen, torch.ones(1).is_cuda]

    assert in_layer(case) == [True] * 4


def test_new_threads_run_in_the_mode() -> None:
    def case() -> list[bool]:
        seen: list[bool] = []

        class Subclass(threading.Thread):
            def run(self) -> None:
                seen.append(torch.ones(1).is_cuda)

        for thread in (threading.Thread(target=Subclass.run, args=(None,)), Subclass()):
            thread.start()
            thread.join()
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(lambda: torch.ones(1).is_cuda).result())
        return seen

    assert in_layer(case) == [True] * 3


def test_streams_and_events_keep_program_order() -> None:
    def case() -> list[Any]:
        stream, begin, end = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
        begin.record()
        with torch.cuda.stream(stream), torch.cuda.device(0), torch.cuda.nvtx.range("x"):
            tensor = torch.ones(1)
            tensor.record_stream(stream)
        stream.record_event(end)
        torch.cuda.current_stream().wait_stream(stream)
        return [stream == torch.cuda.current_stream(), begin.elapsed_time(end) > 0, end.query()]

    assert in_layer(case) == [True, True, True]


def test_there_is_one_random_stream() -> None:
    def case() -> bool:
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(4, device="cuda")
        torch.cuda.random.set_rng_state(state, device="cuda")
        again = torch.rand(4)
        torch.manual_seed(3)
        return torch.equal(drawn, again) and torch.equal(drawn, torch.rand(4))

    assert in_layer(case)


def test_torch_accelerator_asks_no_driver() -> None:
    """With a CUDA build of torch it would; a DataLoader that pins memory does ask."""

    def case() -> list[Any]:
        loader = torch.utils.data.DataLoader(torch.arange(4), 2, pin_memory=True, num_workers=1)
        batches = [batch.tolist() for batch in loader]
        return [torch.accelerator.current_accelerator(), torch.accelerator.is_available(), batches]

    assert in_layer(case) == [None, False, [[0, 1], [2, 3]]]


def test_cuda_autocast_is_refused_and_a_disabled_one_is_not() -> None:
    def case() -> str:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
            pass
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return "entered"
        except NotEmulated as error:
            return str(error)

    assert "autocast" in in_layer(case)


def test_a_gpu_is_refused() -> None:
    def case(rank: int) -> str:
        torch.cuda.is_available = lambda: True
        try:
            device.install()
        except InstallError as error:
            return str(error)
        return "installed"

    (message,) = run_ranks(case, 1, timeout_s=60)
    assert "without megatron_r3.cpu" in message


def test_this_process_is_left_alone() -> None:
    assert not device.installed()
    assert not torch.empty(1).is_cuda
