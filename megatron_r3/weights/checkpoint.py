"""Load or save a Megatron checkpoint, whole or not at all.

Megatron's `load_checkpoint` goes on in four cases in which this file raises an error: without a
checkpoint the weights stay random; a tensor that the checkpoint lacks stays random; a tensor that
the model lacks is dropped; missing rows of the vocabulary become zeros. If Megatron gives up, it
may exit with status 0; this file then raises an error too.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron_r3.replay.layers import unwrapped
from megatron_r3.replay.words import one_line
from megatron_r3.train.launch import built_from
from megatron_r3.train.publish_options import refuse_folder
from megatron_r3.weights.all_ranks import everyones, my_rank, together
from megatron_r3.weights.family import VOCABULARY
from megatron_r3.weights.known import differing
from megatron_r3.weights.pieces import sharded_tensors

Shapes = Mapping[str, tuple[int, ...]]

# CheckpointException derives from BaseException, so `except Exception` alone would let it pass.
_FAILURES = (Exception, CheckpointException)
# the first parts of the keys of weights; e.g. `optimizer` and `rng_state` are not weights
_WEIGHTS = ("embedding", "encoder", "decoder", "mtp", "output_layer")
_VOCABULARY = {place.key for place in VOCABULARY}


def check_load(args: Any) -> None:
    """Refuse arguments that name no checkpoint.

    Raises:
        ValueError: --load is missing; or its folder has no tracker file, and there is no
            --ckpt-step.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    if args.load is None:
        raise ValueError("--load is missing: name the folder of the checkpoint")
    tracker = Path(get_checkpoint_tracker_filename(args.load))
    if not tracker.is_file() and not getattr(args, "ckpt_step", None):
        raise ValueError(f"--load {args.load}: there is no checkpoint (no {tracker.name})")


def load_whole(models: Sequence[torch.nn.Module], args: Any, option: str = "--load") -> None:
    """Load the whole checkpoint `args.load` into a model. All ranks must call this function.

    Args:
        models: this rank's model chunks.
        args: Megatron's parsed arguments.
        option: the option that names the checkpoint, for errors.

    Raises:
        ValueError: the checkpoint cannot be read, or has other tensors, shapes or settings than
            the model; the model's weights are then useless. With several processes, also if the
            checkpoint is not in Megatron's distributed format and so fits one layout only.
    """
    from megatron.training.checkpointing import load_checkpoint

    models = [unwrapped(model) for model in models]  # `load_checkpoint` unwraps models too
    args.finetune = False  # else Megatron does not compare its arguments with the checkpoint's
    args.no_load_optim = args.no_load_rng = True
    # a value that is still NaN afterwards was not loaded
    for model in models:
        for tensor in _floats(model.state_dict()).values():
            tensor.detach().fill_(float("nan"))
    where = f"{option} {args.load}"
    try:
        with _comparing(models, args) as is_compared:
            load_checkpoint(list(models), None, None)
    except SystemExit:  # Megatron's way to give up, maybe with status 0
        raise ValueError(f"{where}: Megatron cannot load it; the lines above say why") from None
    except _FAILURES as error:  # a damaged file can make a loader raise anything
        raise ValueError(f"{where}: cannot be loaded into this model: {_reason(error)}") from error
    if not is_compared and my_rank() == 0:
        print(
            f"warning: {where}: the checkpoint holds no arguments, so yours could not be compared "
            "with them",
            file=sys.stderr,
        )
    together(lambda: _refuse_nan(models, where))


def _refuse_nan(models: Sequence[torch.nn.Module], where: str) -> None:
    for model in models:
        for name, tensor in _floats(model.state_dict()).items():
            if count := int(tensor.isnan().sum()):
                raise ValueError(
                    f"{where}: {count} of the {tensor.numel()} values of {name} were not loaded, "
                    "or are NaN in the checkpoint"
                )


def _reason(error: BaseException) -> str:
    """Why a checkpoint was not read or written, in one line."""
    text = str(error).strip()
    if isinstance(error, CheckpointException):  # its text is tracebacks; the last line says why
        text = text.splitlines()[-1]
    return one_line(text, 1000) or type(error).__name__


def _floats(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a state dict, without Transformer Engine's `_extra_state`."""
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and not name.endswith("_extra_state")
    }


@contextmanager
def _comparing(models: Sequence[Any], args: Any) -> Iterator[list[bool]]:
    """Inside the block, a checkpoint is compared with the model before Megatron loads it.

    Megatron has no hook for that. So three functions are replaced that Megatron's `load_checkpoint`
    (megatron/training/checkpointing.py) calls: the loader of distributed checkpoints, the
    comparison of arguments, and the models' own `load_state_dict` for checkpoints in one file.
    Arguments are compared because no shape shows, for example, how many experts a token takes, or
    the base of RoPE.

    Yields:
        An empty list, which gets an entry once the checkpoint's arguments have been compared.
    """
    from megatron.training import checkpointing

    dist = checkpointing.dist_checkpointing
    dist_load, check_args = dist.load, checkpointing.check_checkpoint_args
    is_distributed = False
    is_compared: list[bool] = []

    def compared_dist_load(state: Any, directory: Any, *rest: Any, **more: Any) -> Any:
        nonlocal is_distributed
        is_distributed = True
        saved = dist.load_tensors_metadata(str(directory))
        theirs = {k: tuple(t.global_shape) for k, t in saved.items() if _is_weight(k)}
        # one chunk is `model`, several are `model0`, `model1`, ...
        chunks = [value for key, value in state.items() if key.startswith("model")]
        mine = {t.key: tuple(t.global_shape) for t in sharded_tensors(chunks) if _is_weight(t.key)}
        ours = {key: shape for of_rank in everyones(mine) for key, shape in of_rank.items()}
        _compare(ours, theirs, args.vocab_size)
        return dist_load(state, directory, *rest, **more)

    def compared_args(saved: Any, **more: Any) -> None:
        check_args(saved, **more)
        others = differing(saved, args, built_from(args))
        if said := [f"{name} {then}, the arguments say {now}" for name, then, now in others]:
            raise ValueError(f"it has {'; '.join(said)}: give the checkpoint's values")
        is_compared.append(True)

    def compared_into(model: Any) -> Any:
        into_model = model.load_state_dict

        def compared_load_state_dict(state: Mapping[str, Any], strict: bool = True) -> Any:
            if args.world_size > 1 and not is_distributed:
                raise ValueError("its format is not torch_dist, so one process must load it")
            theirs = {name: tuple(tensor.shape) for name, tensor in _floats(state).items()}
            ours = {n: tuple(tensor.shape) for n, tensor in _floats(model.state_dict()).items()}
            _compare(ours, theirs)
            # Model and checkpoint have the same weights, so only extra states may differ. If a
            # strict load fails, Megatron itself tries again with strict=False.
            return into_model(state, strict=False)

        return compared_load_state_dict

    dist.load, checkpointing.check_checkpoint_args = compared_dist_load, compared_args
    for model in models:
        model.load_state_dict = compared_into(model)
    try:
        yield is_compared
    finally:
        dist.load, checkpointing.check_checkpoint_args = dist_load, check_args
        for model in models:
            del model.load_state_dict  # the method of the class is then found again


def _is_weight(key: str) -> bool:
    first, last = key.partition(".")[0], key.rpartition(".")[2]
    return first in _WEIGHTS and not last.startswith("_extra_state")


def _compare(ours: Shapes, theirs: Shapes, vocab_size: int | None = None) -> None:
    """Refuse a checkpoint (`theirs`) that has other names or shapes of tensors than the model.

    Args:
        vocab_size: how many rows a tensor of the vocabulary must have at least; padding beyond them
            may differ. None means that the number of rows must be equal.
    """
    if missing := sorted(ours.keys() - theirs.keys()):
        raise ValueError(f"it has no {missing[0]} (tensors that it lacks: {len(missing)})")
    if unknown := sorted(theirs.keys() - ours.keys()):
        raise ValueError(
            f"the model has no place for its {unknown[0]} (such tensors: {len(unknown)})"
        )
    for name, shape in ours.items():
        want, got = shape, theirs[name]
        if vocab_size is not None and name in _VOCABULARY and got[0] >= vocab_size:
            want, got = want[1:], got[1:]
        if want != got:
            raise ValueError(
                f"its {name} is {theirs[name]}, the model's is {shape}: give the model arguments "
                "of the checkpoint"
            )


def check_save(args: Any) -> None:
    """Refuse arguments that name no folder for a new checkpoint.

    Raises:
        ValueError: --save is missing, holds a checkpoint already, or cannot be written.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    if args.save is None:
        raise ValueError("--hf-import needs --save DIR, where the checkpoint goes")
    folder, tracker = Path(args.save), Path(get_checkpoint_tracker_filename(args.save))
    if tracker.exists() or _iteration_0(folder).exists():
        raise ValueError(
            f"--save {folder}: there is a checkpoint already: choose another folder, or move it"
        )
    refuse_folder("--save", folder)


def save_whole(models: Sequence[torch.nn.Module], args: Any) -> None:
    """Save a model as iteration 0 of the new checkpoint `args.save`.

    All ranks must call this function.

    Args:
        models: this rank's model chunks.

    Raises:
        ValueError: the checkpoint cannot be written; what was written is removed if possible.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename, save_checkpoint

    args.async_save = False  # this process ends right after the save
    folder = Path(args.save)
    try:
        save_checkpoint(0, list(models), None, None, 0)
    except _FAILURES as error:
        if my_rank() == 0:
            with suppress(OSError):
                shutil.rmtree(_iteration_0(folder))
        raise ValueError(
            f"--save {folder}: the checkpoint cannot be written (is the disk full?): "
            f"{_reason(error)}"
        ) from error
    if not Path(get_checkpoint_tracker_filename(args.save)).is_file():
        raise ValueError(
            f"--save {folder}: Megatron wrote no checkpoint there; see the lines above"
        )


def _iteration_0(folder: Path) -> Path:
    return folder / "iter_0000000"
