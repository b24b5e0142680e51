"""A process that has imported one Megatron tree, and forks the ranks of each case from it.

One process cannot import two trees, so a test session has a worker for each tree.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

import megatron_r3
from megatron_r3.cpu import InstallError, install
from proof.fidelity.rig import deep_ep
from proof.fidelity.rig.forkserver import run_ranks
from proof.fidelity.rig.rank_process import RankError, die_with_parent, to_bytes

IMPORT_S = 600.0  # how long importing a tree may take, on a busy machine
REPLY_S = 30.0  # how long a reply may take beyond the time of the case
END_S = 10.0  # how long ending may take before the worker is killed
# Modules that a training imports while it runs, if they are installed. That takes more than a
# second in each rank of each case. So the worker imports them once, before it forks the ranks.
COMMON = (
    "torch._dynamo",  # each optimizer imports it
    "transformers.models.auto.tokenization_auto",
    "torch.utils.tensorboard",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.tokenizers",
    "megatron_r3.seams.pretrain",
    "megatron_r3.weights.hf",
)


class WorkerError(RuntimeError):
    """The worker of a tree ended, or gave no answer in time. The message has the log's end."""


class TreeWorker:
    """A process that imports the Megatron of `tree` once, and runs functions on forked ranks.

    Use it as a context manager: `with TreeWorker(tree) as worker: worker.run(case, 2)`.

    Args:
        tree: a Megatron-LM checkout or the unpacked sources of megatron-core.
        preload: more modules to import before the first case.
        env: more environment variables, for the worker and its ranks.

    Raises:
        InstallError: the tree has no megatron.core, or it cannot run on the CPU.
        WorkerError: the process ended, or did not import the tree in time.
    """

    def __init__(
        self, tree: Path, preload: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.tree = tree.resolve()
        self._folder = tempfile.TemporaryDirectory(prefix="worker-")
        self._log = Path(self._folder.name) / "worker.log"
        self._pipe, its_end = Pipe()
        with its_end, self._log.open("w") as log:
            self._process = subprocess.Popen(
                # With -m, each process that a rank spawns (every checkpoint spawns one, for its
                # queue) would import the main module again, and torch with it. With -c there is no
                # main module to import.
                [
                    *(sys.executable, "-c", f"import {__name__} as worker; worker.main()"),
                    *(str(its_end.fileno()), str(os.getpid())),
                ],
                pass_fds=[its_end.fileno()],
                start_new_session=True,  # Ctrl-C then reaches the parent alone
                cwd=self._folder.name,  # a folder without modules: none is imported by accident
                env=_environment(self.tree, {**os.environ, **(env or {})}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._ask((str(self.tree), tuple(preload)), IMPORT_S)
        except InstallError:
            self.close()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(rank, *args, **kwargs)` on every rank; return their results in rank order.

        Args:
            fn: a function at the top of a module, which the ranks import by its name. If the caller
                imports that module too, it must import Megatron inside of the function only.
            world_size: how many ranks.
            args: more arguments; they must pickle, and so must the result.
            timeout_s: seconds after which the ranks are killed.
            env: more environment variables for the ranks.
            log_dir: the folder for the output of the ranks. None: the output is thrown away.
            kwargs: more arguments, by name; they must pickle too.

        Raises:
            RankError: a rank failed, or did not end in time (RankTimeout). The worker can be used
                again.
            WorkerError: the worker itself has ended.
        """
        call = pickle.dumps((fn, args, kwargs))
        settings = {"timeout_s": timeout_s, "env": env, "log_dir": log_dir}
        request = (call, _import_folder(fn), world_size, settings)
        results = self._ask(request, timeout_s + REPLY_S)
        # a rank whose script ended itself, by sys.exit(0), has no result
        return [None if result is None else pickle.loads(result) for result in results]

    def close(self) -> None:
        """End the process and the ranks that it runs."""
        self._pipe.close()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> TreeWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, request: Any, timeout_s: float) -> Any:
        """The answer to one request. If no answer comes in time, the worker is ended."""
        try:
            self._pipe.send(request)
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"no answer in {timeout_s} s")
            answer = self._pipe.recv()
        except BaseException as error:
            log = self._log.read_text(errors="replace")[-4000:]
            self.close()
            if isinstance(error, (OSError, EOFError)):
                raise WorkerError(
                    f"the worker of {self.tree} ended or gave no answer ({error!r}):\n{log}"
                ) from error
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer


def _environment(tree: Path, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: no other Megatron on PYTHONPATH, and one OpenMP thread.

    With more threads a forked rank would wait for threads that a fork does not copy.
    """
    repository = Path(megatron_r3.__file__).parents[1]
    entries = [Path(entry) for entry in given.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry.resolve() for entry in entries if not (entry / "megatron" / "core").is_dir()]
    path = os.pathsep.join(str(entry) for entry in (tree, repository, *others))
    return {**given, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _import_folder(fn: Callable[..., Any]) -> str:
    """The folder that must be on sys.path so that the module of `fn` can be imported by its name.

    Example: /repo for `tests.unit.case` in /repo/tests/unit/case.py, and also for `tests.unit` in
    /repo/tests/unit/__init__.py.
    """
    if fn.__module__ == "__main__":
        raise ValueError(f"the ranks cannot import {fn.__name__}: put it into a module")
    file = Path(inspect.getfile(fn)).resolve()
    inside_package = fn.__module__.count(".") + (file.name == "__init__.py")
    return str(file.parents[inside_package])


def _call(rank: int, call: bytes, folder: str) -> bytes:
    """In a rank: import the function, call it, and pickle its result for the caller of `run`."""
    if folder not in sys.path:
        sys.path.append(folder)
    fn, args, kwargs = pickle.loads(call)
    return to_bytes(fn(rank, *args, **kwargs))


def _import_tree(tree: str, preload: Sequence[str]) -> None:
    """Import the modules to preload; check that megatron.core comes from this tree."""
    deep_ep.provide()  # before Megatron is imported
    install()
    for name in preload:
        importlib.import_module(name)
    if "megatron.training" in preload:
        for name in COMMON:
            with suppress(ImportError):
                importlib.import_module(name)
        _read_docstrings_once()
    core = Path(str(importlib.import_module("megatron.core").__file__))
    if Path(tree) not in core.resolve().parents:
        raise InstallError(f"{tree} has no megatron.core: it was imported from {core.parent}")


def _read_docstrings_once() -> None:
    """Read the help texts of Megatron's options once, before the ranks are forked.

    For these texts Megatron parses the sources of its dataclasses, twice in each training. By
    cProfile that is a fifth of the time of a training of one step.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def docstrings(self: Any, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(self, config)
        return dict(known[config])

    ArgumentGroupFactory._get_field_docstrings = docstrings
    add_megatron_arguments(ArgumentParser())


def _answer(request: Any) -> Any:
    """The results of one case, or the error that `TreeWorker.run` raises in the caller."""
    call, folder, world_size, settings = request
    try:
        return run_ranks(lambda rank: _call(rank, call, folder), world_size, **settings)
    except (RankError, OSError) as error:
        return error


def serve(pipe: Connection) -> None:
    """Import the tree that the first request names; then run one case for each request."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # on SystemExit run_ranks ends the ranks
    with suppress(EOFError):
        try:
            _import_tree(*pipe.recv())
        except InstallError as error:
            pipe.send(error)
            return
        # Without freeze, a full garbage collection in a rank would scan all imported objects, for a
        # tenth of a second each time, and copy the memory pages that it shares with this process.
        gc.freeze()
        pipe.send(None)
        while True:
            pipe.send(_answer(pipe.recv()))


def main() -> None:
    """Be a worker: the arguments are the number of its pipe, and the process id of its parent."""
    die_with_parent(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
