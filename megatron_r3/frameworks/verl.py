"""verl on megatron_r3: verl's routers replay by our code, and verl's files stay unchanged.

    VERL_USE_EXTERNAL_MODULES=megatron_r3.frameworks.verl

With this setting `import verl` imports this module, in the driver too, where there may be no
Megatron. So this module's import only arranges that verl's function `apply_router_replay_patch` is
replaced as soon as verl's module router_replay_patch is imported. verl's Megatron engine calls the
function when the engine is made with `router_replay.mode` R2 or R3. If our replay cannot be used,
that call raises an error; verl's own replay is never used instead.

verl's function would replace `TopKRouter.routing` and `TopKRouter.__init__`, and count dispatched
tokens with a wait for the device in each layer. Here Megatron's own functions run, and
`megatron_r3.frameworks.router_replay` replays.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from megatron_r3.replay.microbatch import ReplayError

MISMATCH = "router_replay/mismatch"  # the metric; MEGATRON_R3_MISMATCH=0 leaves it out

_PATCH = "verl.utils.megatron.router_replay_patch"
_UTILS = "verl.utils.megatron.router_replay_utils"
_ENGINE = "verl.workers.engine.megatron.transformer_impl"

# For each version of verl the parameters of the three functions that `check_version` looks at.
_SET = "layers_topk_idx attention_mask tf_config vp_rank"
_MERGE = "attention_mask input_ids mini_layer_topk_idx_list tf_config vp_rank"
_KNOWN = {
    "0.8.0": (_SET, _MERGE, "self topk_indices"),
    "0.9.0": (
        f"{_SET} replay_mask local_cp_size model",
        f"{_MERGE} local_cp_size",
        "self topk_indices replay_mask",
    ),
    "0.9.1": (
        f"{_SET} replay_mask local_cp_size model",
        f"{_MERGE} local_cp_size model",
        "self topk_indices replay_mask",
    ),
}
# verl's `apply_router_replay_patch` leaves a class of Megatron alone if the class has such a mark.
_MARKS = ("_router_replay_patched", "_preprocess_patched")
_TURN_OFF = "to train with verl's own replay, unset VERL_USE_EXTERNAL_MODULES"


def check_version(version: str, patch: Any, utils: Any) -> None:
    """Refuse a verl that is not a known release, or has other functions than the release.

    Args:
        version: `verl.__version__`.
        patch: verl's module router_replay_patch.
        utils: verl's module router_replay_utils.

    Raises:
        ReplayError: naming the version that is not known, or the function that differs.
    """
    if version not in _KNOWN:
        raise ReplayError(
            f"megatron_r3.frameworks.verl knows verl {', '.join(_KNOWN)}, not {version}: install "
            f"one of these, or, {_TURN_OFF}"
        )
    functions = (
        utils.set_router_replay_data,
        utils.merge_router_topk_indices,
        patch.RouterReplay.set_target_indices,
    )
    for function, parameters in zip(functions, _KNOWN[version], strict=True):
        found = " ".join(inspect.signature(function).parameters)
        if found != parameters:
            raise ReplayError(
                f"verl {version}: {function.__qualname__} takes ({found}), and in the release it "
                f"takes ({parameters}): this verl was changed. Install the release, or, {_TURN_OFF}"
            )
    words = inspect.unwrap(patch.apply_router_replay_patch).__code__.co_consts
    missing = [mark for mark in _MARKS if mark not in words]
    if missing:
        raise ReplayError(
            f"verl {version}: apply_router_replay_patch does not look at {', '.join(missing)}: "
            f"this verl was changed. Install the release, or, {_TURN_OFF}"
        )


class LivingRouters(list[Any]):
    """verl's list of routers, from which `clear` removes only routers of models that were freed.

    verl clears the list when it makes an engine, and sets actions on the routers in the list. With
    an ordinary list, making a second engine would make the routers of the first engine live.
    """

    def clear(self) -> None:
        """Remove the routers of models that were freed."""
        gc.collect()  # frees models out of use; their modules refer to each other
        self[:] = [hook for hook in self if hook.router is not None]


def _replace(patch: Any) -> None:
    """Replace `apply_router_replay_patch` in verl's module router_replay_patch."""
    theirs = patch.apply_router_replay_patch

    @functools.wraps(theirs)
    def apply_router_replay_patch() -> None:
        utils = importlib.import_module(_UTILS)
        version = sys.modules["verl"].__version__
        check_version(version, patch, utils)
        drop_in: Any = importlib.import_module("megatron_r3.frameworks.router_replay")
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        TopKRouter._router_replay_patched = True
        MoEAlltoAllTokenDispatcher._preprocess_patched = True
        instances = patch.RouterReplay.router_instances
        if not isinstance(instances, LivingRouters):
            instances = patch.RouterReplay.router_instances = LivingRouters(instances)
            drop_in.join_list(instances)
            _look_up_by_engine(patch.RouterReplay, utils.RouterReplayHelper)
            if os.environ.get("MEGATRON_R3_MISMATCH", "1") != "0":
                _report_mismatch(importlib.import_module(_ENGINE), drop_in)
            if os.environ.get("RANK", "0") == "0":
                print(f"router replay by megatron-r3, not by verl {version} itself", flush=True)
        theirs()  # with the marks set it only clears the list, and has TransformerConfig accept
        # `enable_routing_replay`

    patch.apply_router_replay_patch = apply_router_replay_patch


def _look_up_by_engine(replay: Any, helper: Any) -> None:
    """Have verl find the routers of the engine that asks, also if another engine was made first.

    verl's `get_micro_batch_router_list` takes a slice of the list of all routers, counted from its
    beginning, where the routers of the first engine are. verl 0.8 finds routers only in that way;
    verl 0.9 finds them in the model in most functions.
    """
    theirs = helper.get_micro_batch_router_list

    @functools.wraps(theirs)
    def get_micro_batch_router_list(tf_config: Any, vp_rank: int | None = None) -> Any:
        everything = replay.router_instances
        own = [
            hook
            for hook in everything
            if hook.router is not None and hook.router.config is tf_config
        ]
        replay.router_instances = own or everything
        try:
            return theirs(tf_config, vp_rank)
        finally:
            replay.router_instances = everything

    helper.get_micro_batch_router_list = staticmethod(get_micro_batch_router_list)


def _report_mismatch(engine: Any, drop_in: Any) -> None:
    """Have verl's metrics of an update include `MISMATCH`, by wrapping `forward_backward_batch`."""
    theirs = engine.MegatronEngine.forward_backward_batch

    @functools.wraps(theirs)
    def forward_backward_batch(
        self: Any, data: Any, loss_function: Callable[..., Any], forward_only: bool = False
    ) -> Any:
        replays = engine.tu.get_non_tensor_data(data, key="enable_routing_replay", default=False)
        if forward_only or not replays:
            return theirs(self, data, loss_function, forward_only)
        drop_in.count_mismatch()
        try:
            output = theirs(self, data, loss_function, forward_only)
        finally:
            counts = drop_in.take_mismatch()
            drop_in.count_mismatch(False)
        fraction = _over_all_ranks(counts)
        if output:  # only ranks of the last pipeline stage have metrics
            output["metrics"][MISMATCH] = fraction
        return output

    engine.MegatronEngine.forward_backward_batch = forward_backward_batch


def _over_all_ranks(counts: dict[int, tuple[int, int]]) -> float:
    """The share of (token, layer) pairs that differ, over all layers and all ranks of the engine.

    Without sequence parallelism each rank of a tensor-parallel group counts the same tokens. Both
    sums are then multiplied by the group's size, and the share stays right.

    Args:
        counts: this rank's, as `take_mismatch` returns them.
    """
    import torch
    from megatron.core import mpu

    differing, compared = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    sums = torch.tensor([differing, compared], dtype=torch.int64, device="cuda")
    torch.distributed.all_reduce(sums, group=mpu.get_model_parallel_group())
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(sums, group=group)
    differing, compared = sums.tolist()
    return differing / max(compared, 1)


class _AfterImport(MetaPathFinder):
    """Calls `_replace` at the end of the import of verl's module router_replay_patch.

    verl's engine runs `from ... import apply_router_replay_patch`, and the function must be
    replaced before that import.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """For router_replay_patch its own spec, with a loader that calls `_replace` at the end."""
        if fullname != _PATCH:
            return None
        sys.meta_path.remove(self)  # find_spec below must not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _replace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Replace verl's replay from now on; importing this module calls it.

    Raises:
        ReplayError: verl's Megatron engine was imported before this module.
    """
    patch = sys.modules.get(_PATCH)
    if patch is None:
        if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport())
    elif not hasattr(patch.apply_router_replay_patch, "__wrapped__"):
        if _ENGINE in sys.modules:
            raise ReplayError(
                "verl's Megatron engine was imported before megatron_r3.frameworks.verl: set "
                "VERL_USE_EXTERNAL_MODULES=megatron_r3.frameworks.verl, and do not import "
                "megatron_r3.frameworks.verl yourself"
            )
        _replace(patch)


install()
