"""A Megatron checkpoint loaded whole or not at all, and saved so.

Megatron's `load_checkpoint` goes on where a training could: without a checkpoint it leaves the
random weights, a tensor that the checkpoint lacks stays random, one that the model lacks is
dropped, missing rows of the vocabulary become zeros, and where it does give up it may exit with
status 0. Here each of these is an error.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from megatron_r3.untrusted import one_line

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_PARTS = ("embedding", "encoder", "decoder", "mtp", "output_layer")  # not optimizer, rng_state
# what the shapes of a model do not show; hf_config writes them
_NO_SHAPES = (
    *("kv_channels", "num_query_groups", "moe_router_topk", "moe_router_pre_softmax"),
    *("layernorm_epsilon", "norm_epsilon", "rotary_base", "vocab_size"),  # epsilon: by release
)


def check_load(args: Any) -> None:
    """Refuse arguments that name no checkpoint.

    Raises:
        ValueError: there is no --load, or no checkpoint in it.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    if args.load is None:
        raise ValueError("--hf-export needs --load DIR, the checkpoint to export")
    tracker = Path(get_checkpoint_tracker_filename(args.load))
    if not tracker.is_file() and not getattr(args, "ckpt_step", None):
        raise ValueError(f"--load {args.load}: there is no checkpoint (no {tracker.name})")


def load_whole(model: torch.nn.Module, args: Any) -> None:
    """Load the checkpoint `args.load` into a whole (one-process) model, all of it.

    Every parameter is NaN before, so one that was not loaded is seen afterwards.

    Raises:
        ValueError: the checkpoint cannot be read, or has other tensors, shapes or settings than
            the model; the model is then useless.
    """
    from megatron.training.checkpointing import load_checkpoint

    args.finetune = False  # with it Megatron does not compare its arguments with the checkpoint's
    args.no_load_optim = args.no_load_rng = True
    _fill_with_nan(model)
    where = f"--load {args.load}"
    try:
        with _comparing(model, args):
            load_checkpoint([model], None, None)
    except SystemExit:  # its status may be 0
        raise ValueError(f"{where}: Megatron cannot load it; its reason is above") from None
    except (Exception, CheckpointException) as error:  # whatever a damaged file makes of a loader
        raise ValueError(f"{where}: not a checkpoint of this model: {_reason(error)}") from error
    for name, tensor in _floats(model.state_dict()).items():
        if count := int(tensor.isnan().sum()):
            raise ValueError(
                f"{where}: {count} of the {tensor.numel()} values of {name} were not loaded, or "
                "are NaN in the checkpoint"
            )


def _reason(error: BaseException) -> str:
    """Why a checkpoint was not read or written, in one line."""
    text = str(error).strip()
    if isinstance(error, CheckpointException):  # torch's: tracebacks, the reason in the last line
        text = text.splitlines()[-1]
    return one_line(text, 1000) or type(error).__name__


def _floats(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and not name.endswith("_extra_state")
    }


def _fill_with_nan(model: torch.nn.Module) -> None:
    for tensor in _floats(model.state_dict()).values():
        tensor.detach().fill_(float("nan"))


@contextmanager
def _comparing(model: Any, args: Any) -> Iterator[None]:
    """Compare, where Megatron is about to load, what the checkpoint has with what the model has."""
    from megatron.training import checkpointing

    dist = checkpointing.dist_checkpointing
    load, check, into = dist.load, checkpointing.check_checkpoint_args, model.load_state_dict

    def compared_load(state: Any, directory: Any, *rest: Any, **more: Any) -> Any:
        theirs = dist.load_tensors_metadata(str(directory))
        ours = {key: shape for key, shape in _sharded(state["model"]) if _is_model(key)}
        shapes = {k: tuple(t.global_shape) for k, t in theirs.items() if _is_model(k)}
        _compare(ours, shapes, args.vocab_size)
        return load(state, directory, *rest, **more)

    def compared_check(saved: Any, **more: Any) -> None:
        check(saved, **more)
        for name in _NO_SHAPES:
            then, now = getattr(saved, name, None), getattr(args, name, None)
            if then is not None and now is not None and then != now:
                raise ValueError(f"it has {name} {then}, the arguments say {now}")

    def load_state_dict(state: Mapping[str, Any], strict: bool = True) -> Any:
        # Megatron asks again, not strictly, where a strict load fails
        theirs = {name: tuple(tensor.shape) for name, tensor in _floats(state).items()}
        ours = {n: tuple(tensor.shape) for n, tensor in _floats(model.state_dict()).items()}
        _compare(ours, theirs)
        return into(state, strict=False)  # of what is left, extra states alone may differ

    dist.load, checkpointing.check_checkpoint_args = compared_load, compared_check
    model.load_state_dict = load_state_dict
    try:
        yield
    finally:
        dist.load, checkpointing.check_checkpoint_args = load, check
        del model.load_state_dict


def _is_model(key: str) -> bool:
    return key.partition(".")[0] in _PARTS and not key.rpartition(".")[2].startswith("_extra_state")


def _sharded(state: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The key and the whole shape of every tensor in a sharded state dict."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for value in state:
            yield from _sharded(value)
    elif hasattr(state, "build"):  # a factory: gate and up, which are one tensor here
        yield from _sharded(state.build())
    elif hasattr(state, "global_shape") and hasattr(state, "dtype"):
        yield state.key, tuple(state.global_shape)


def _compare(
    ours: Mapping[str, tuple[int, ...]],
    theirs: Mapping[str, tuple[int, ...]],
    vocab_size: int | None = None,
) -> None:
    """Compare the tensors of the model with those of the checkpoint, by name and shape.

    Args:
        vocab_size: rows that a tensor of the vocabulary needs; padding beyond it may differ.
    """
    if missing := sorted(ours.keys() - theirs.keys()):
        raise ValueError(f"it has no {missing[0]} (tensors that it lacks: {len(missing)})")
    if left := sorted(theirs.keys() - ours.keys()):
        raise ValueError(f"the model has no place for its {left[0]} (such tensors: {len(left)})")
    for name, shape in ours.items():
        want, got = shape, theirs[name]
        if vocab_size is not None and name in _VOCABULARY and got[0] >= vocab_size:
            want, got = want[1:], got[1:]
        if want != got:
            raise ValueError(
                f"its {name} is {theirs[name]}, the model's is {shape}: other model arguments"
            )


def check_save(args: Any) -> None:
    """Refuse arguments that name no place for a new checkpoint.

    Raises:
        ValueError: there is no --save, it holds a checkpoint, or it cannot be written.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename

    if args.save is None:
        raise ValueError("--hf-import needs --save DIR, where the checkpoint goes")
    folder, tracker = Path(args.save), Path(get_checkpoint_tracker_filename(args.save))
    if tracker.exists() or _iteration_0(folder).exists():
        raise ValueError(
            f"--save {folder}: there is a checkpoint already: choose another folder, or move it"
        )
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if made:
            folder.rmdir()
    except OSError as error:
        raise ValueError(f"--save {folder}: cannot be written ({error.strerror})") from error


def save_whole(model: torch.nn.Module, args: Any) -> None:
    """Save a whole (one-process) model as iteration 0 of the new checkpoint `args.save`.

    Raises:
        ValueError: it cannot be written; then it is not there.
    """
    from megatron.training.checkpointing import get_checkpoint_tracker_filename, save_checkpoint

    args.async_save = False  # this process ends when it is saved
    folder = Path(args.save)
    try:
        save_checkpoint(0, [model], None, None, 0)
    except (Exception, CheckpointException) as error:  # a full disk gives several
        with suppress(OSError):
            shutil.rmtree(_iteration_0(folder))
        text = f"the checkpoint cannot be written (is the disk full?): {_reason(error)}"
        raise ValueError(f"--save {folder}: {text}") from error
    if not Path(get_checkpoint_tracker_filename(args.save)).is_file():
        raise ValueError(f"--save {folder}: Megatron wrote no checkpoint there")


def _iteration_0(folder: Path) -> Path:
    return folder / "iter_0000000"
