"""Write a Megatron model as a transformers directory, or read one, in any parallel layout.

All ranks must call these functions, in or outside of a training. The files are the same, byte by
byte, in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_r3.data.digest import file_digest
from megatron_r3.replay.layers import unwrapped
from megatron_r3.replay.words import quoted
from megatron_r3.train.reference_policy import finish_updates
from megatron_r3.weights.adapters import Adapters, adapters_of
from megatron_r3.weights.all_ranks import agree, everyones, my_rank, on_first_rank, together
from megatron_r3.weights.directory import (
    CONFIG,
    INDEX,
    Reading,
    appearing,
    check_target,
    copy_beside_weights,
    read_config,
    write_json,
    writing,
)
from megatron_r3.weights.families import family_named, family_of
from megatron_r3.weights.family import (
    EMBEDDING,
    VOCABULARY,
    Family,
    Mapped,
    ModelSettings,
    check_described,
    settings_of,
)
from megatron_r3.weights.gather import Plan, by_place, gather, plan_of
from megatron_r3.weights.pieces import Piece, Place, pieces_of

Finish = Callable[[Path, dict[str, str]], None]


@dataclass(frozen=True)
class _Model:
    """This rank's pieces of a model, and what the family maps in the whole model."""

    config: Any
    settings: ModelSettings
    pieces: list[Piece]
    family: Family
    mapped: list[Mapped]


@dataclass(frozen=True)
class _File:
    """A file of weights that a rank has written."""

    name: str
    names: list[str]  # of its tensors
    size: int  # of its tensors, in bytes
    sha256: str


def write_policy(
    models: Sequence[torch.nn.Module],
    directory: Path,
    family: Family | None = None,
    like: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    vocab_size: int,
    finish: Finish | None = None,
) -> int:
    """Write a model as a transformers directory. All ranks must call this function.

    The first file has the embedding, each layer has a file, the last file has what is left. The
    first rank that holds a part of a layer gathers and writes the layer. A rank needs memory for
    its part of the model, and for the largest layer that it writes. LoRA adapters are added to the
    weights (adapters.py).

    Args:
        models: this rank's model chunks, in Megatron's wrappers or without.
        directory: a folder on a file system that all ranks see. Afterwards it has all files; after
            an error it has none.
        family: None means the family in config.json of `like` or, without `like`, the family that
            accepts the model.
        like: a transformers directory of the same model; its config.json and tokenizer files are
            copied. If `like` is None, the family makes config.json, and no tokenizer is written.
        dtype: the dtype of the weights in the files, except expert biases, which are in float32.
        vocab_size: how many rows of the vocabulary are written; padding rows follow them in the
            model.
        finish: called on rank 0 with the folder and the SHA-256 of each file in it, before the
            folder gets its name. `finish` may write more files.

    Returns:
        How many bytes of weights were written, by all ranks.

    Raises:
        ValueError: `directory` is not empty or cannot be written, a weight is not finite, `like`
            describes another model, or the model cannot be moved. All ranks raise the same.
    """
    finish_updates(models)
    model, described = together(
        lambda: _model_to_write(models, directory, family, like, dtype, vocab_size)
    )
    plan = plan_of(model.pieces)
    adapters = adapters_of(models, plan)
    _check_plan(model, plan, adapters)
    with appearing(directory) as folder:
        written = _write_files(model, plan, adapters, folder, directory, dtype)
        on_first_rank(lambda: _write_rest(written, folder, directory, described, like, finish))
    return sum(file.size for file in written)


def _model_to_write(
    models: Sequence[torch.nn.Module],
    directory: Path,
    family: Family | None,
    like: Path | None,
    dtype: torch.dtype,
    vocab_size: int,
) -> tuple[_Model, dict[str, Any]]:
    """The model, and the config.json to write ({} with `like`); arguments as in `write_policy`."""
    if my_rank() == 0:
        check_target(directory)
    if like is not None:
        return _model_of(models, like, family, vocab_size), {}
    model = _model(models, family, vocab_size)
    described = model.family.hf_config(model.config, model.settings)
    return model, {**described, "dtype": str(dtype).removeprefix("torch.")}


def _write_rest(
    written: Sequence[_File],
    folder: Path,
    directory: Path,
    described: dict[str, Any],
    like: Path | None,
    finish: Finish | None,
) -> None:
    """Write all files but those of weights, on rank 0; arguments as in `write_policy`."""
    with writing(directory):
        of_tensor = {name: file.name for file in written for name in file.names}
        size = {"total_size": sum(file.size for file in written)}
        write_json(
            folder / INDEX, {"metadata": size, "weight_map": dict(sorted(of_tensor.items()))}
        )
        if like is not None:
            copy_beside_weights(like, folder)
        else:
            write_json(folder / CONFIG, described)
        if finish is not None:
            digests = {file.name: file.sha256 for file in written}
            others = (path for path in folder.iterdir() if path.name not in digests)
            digests |= {path.name: file_digest(path) for path in others}
            finish(folder, dict(sorted(digests.items())))


def read_policy(
    models: Sequence[torch.nn.Module],
    directory: Path,
    family: Family | None = None,
    vocab_size: int | None = None,
) -> None:
    """Load a transformers directory into a model. All ranks must call this function.

    Each rank first reads and checks all tensors of which it holds a part, and then reads them again
    and loads them. So a wrong tensor leaves the model unchanged. An optimizer that keeps copies of
    the weights must copy them again afterwards (`reload_model_params`).

    Args:
        models: this rank's model chunks, in Megatron's wrappers or without.
        directory: a folder that all ranks see.
        family: None means the family that config.json names.
        vocab_size: the rows of the vocabulary without padding; padding rows become zeros. None
            means the number in config.json.

    Raises:
        ValueError: a tensor is missing, has another shape or dtype or is not finite, or config.json
            describes another model. All ranks raise the same; the model is then unchanged.
    """
    model = together(lambda: _model_of(models, directory, family, vocab_size))
    _check_plan(model, plan_of(model.pieces))
    with together(lambda: Reading(directory)) as reading:
        together(lambda: _check_names(model, reading))
        together(lambda: _load(model, reading, into_model=False))
        together(lambda: _load(model, reading, into_model=True))


def _model_of(
    models: Sequence[torch.nn.Module],
    directory: Path,
    family: Family | None,
    vocab_size: int | None,
) -> _Model:
    """The model, if config.json of `directory` describes it; see `read_policy`."""
    theirs, where = read_config(directory), directory / CONFIG
    chosen = family or family_named(theirs.get("model_type"), where)
    size = vocab_size or theirs.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"{where}: vocab_size is {quoted(size)}; expected a whole number above 0")
    model = _model(models, chosen, size)
    check_described(chosen, theirs, model.config, model.settings, where)
    return model


def _model(models: Sequence[torch.nn.Module], family: Family | None, vocab_size: int) -> _Model:
    settings = settings_of(models[0], vocab_size)
    chunk: Any = unwrapped(models[0])
    config = chunk.config
    if family is None:
        family = family_of(config, settings)
    family.check(config, settings)
    return _Model(config, settings, pieces_of(models), family, family.tensors(config))


def _check_plan(model: _Model, plan: Plan, adapters: Adapters | None = None) -> None:
    """Refuse a model with other tensors than those that the family maps and those of `adapters`.

    An embedding with fewer rows than the vocabulary is refused too.
    """
    mapped = {place for entry in model.mapped for place in entry.places}
    if adapters is not None:
        mapped.update(
            part for place in mapped & adapters.parts.keys() for part in adapters.parts[place]
        )
    if plan.keys() != mapped:
        without_place = [str(place) for place in plan if place not in mapped]
        missing = [str(place) for place in mapped if place not in plan]
        raise ValueError(
            f"not a plain {model.family.model_type} model (biases, MTP, adapters?): transformers "
            f"has no place for {without_place[:3]}, the model has no {sorted(missing)[:3]}"
        )
    vocab_size, rows = model.settings.vocab_size or 0, plan[EMBEDDING].shape[0]
    if rows < vocab_size:
        raise ValueError(f"the model's embedding has {rows} rows, the vocabulary {vocab_size}")


def _files(mapped: Sequence[Mapped]) -> list[list[Mapped]]:
    """The tensors of each file: the embedding, then each layer, then the rest."""
    files: dict[float, list[Mapped]] = {}
    for entry in mapped:
        first = entry.places[0]
        outside = -1 if first == EMBEDDING else math.inf
        files.setdefault(outside if first.layer is None else first.layer, []).append(entry)
    return [files[number] for number in sorted(files)]


def _write_files(
    model: _Model,
    plan: Plan,
    adapters: Adapters,
    folder: Path,
    directory: Path,
    dtype: torch.dtype,
) -> list[_File]:
    """Write all files of weights; a rank writes a file if it gathers the tensors of that file.

    Returns:
        The files that all ranks have written, in the order of their names.
    """
    pieces = by_place(model.pieces)
    files = _files(model.mapped)
    written: list[_File] = []
    failure: Exception | None = None
    for number, entries in enumerate(files, 1):
        dtypes = {place: entry.dtype or dtype for entry in entries for place in entry.places}
        # A rank that has failed still gathers, because the other ranks would wait for its parts.
        gathered = adapters.beside(dtypes)
        wholes = gather(plan, pieces, list(gathered), gathered)
        if wholes and failure is None:
            file = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
            try:
                adapters.merge(wholes, dtypes)
                with writing(directory):
                    written.append(_write_file(file, entries, wholes, model.settings.vocab_size))
            except Exception as error:
                failure = error
        del wholes  # frees the memory before the next file is gathered
    agree(failure)
    everything = (file for files_of_rank in everyones(written) for file in files_of_rank)
    return sorted(everything, key=lambda file: file.name)


def _write_file(
    file: Path, entries: Sequence[Mapped], wholes: dict[Place, Tensor], vocab_size: int | None
) -> _File:
    """Convert the tensors `wholes` and write them to `file`; `wholes` is then empty."""
    tensors: dict[str, Tensor] = {}
    for entry in entries:
        parts = entry.to_hf([wholes.pop(place) for place in entry.places])
        for name, tensor in zip(entry.names, parts, strict=True):
            if entry.places[0] in VOCABULARY:
                tensor = tensor[:vocab_size]
            tensor = tensor.contiguous()
            _refuse_non_finite(name, tensor, f"the model in {str(tensor.dtype)[6:]}")
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})  # the same bytes for the same tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    return _File(file.name, list(tensors), size, file_digest(file))


def _refuse_non_finite(name: str, tensor: Tensor, where: object) -> None:
    # aminmax makes no copy, and returns NaN if a value is NaN
    if not all(bound.isfinite() for bound in tensor.aminmax()):
        count = tensor.numel() - int(tensor.isfinite().sum())
        raise ValueError(
            f"{where}: {count} of the {tensor.numel()} values of {name} are not finite"
        )


def _check_names(model: _Model, reading: Reading) -> None:
    """Refuse a directory that has other tensors than the family has."""
    directory, theirs = reading.directory, reading.names
    names = {name for entry in model.mapped for name in entry.names}
    others = sorted(theirs - names)
    if without_place := [n for n in others if not model.family.is_left_out(n, model.config)]:
        raise ValueError(f"{directory}: the model has no place for {without_place[:3]}")
    for entry in model.mapped:
        for name in entry.names:
            if name not in theirs:
                of = ", ".join(str(place) for place in entry.places[:3])
                raise ValueError(f"{directory}: no tensor {name} (needed for Megatron's {of})")


def _load(model: _Model, reading: Reading, into_model: bool) -> None:
    """Read and check the tensors that this rank's pieces need.

    Args:
        into_model: whether the tensors are also copied into the pieces.
    """
    pieces = by_place(model.pieces)
    for entry in model.mapped:
        if not any(place in pieces for place in entry.places):
            continue
        parts = [reading.tensor(name) for name in entry.names]
        for name, part in zip(entry.names, parts, strict=True):
            _refuse_non_finite(name, part, reading.directory)
        wholes = _to_megatron(entry, parts, reading.directory)
        for place, whole in zip(entry.places, wholes, strict=True):
            if place in VOCABULARY and whole.shape[0] != (size := model.settings.vocab_size):
                raise ValueError(
                    f"{reading.directory}: {entry.names[0]} has {whole.shape[0]} rows for a "
                    f"vocabulary of {size}"
                )
            for piece in pieces.get(place, ()):
                tensor = _cut(whole, piece, entry, reading)
                if into_model:
                    piece.tensor.copy_(tensor)


def _to_megatron(entry: Mapped, parts: list[Tensor], directory: Path) -> list[Tensor]:
    try:
        return entry.to_megatron(parts)
    except RuntimeError as error:  # from torch, if shapes do not fit together
        shapes = {name: tuple(part.shape) for name, part in zip(entry.names, parts, strict=True)}
        raise ValueError(
            f"{directory}: {shapes} do not make up Megatron's {entry.places[0]}: give this model's "
            "arguments"
        ) from error


def _cut(whole: Tensor, piece: Piece, entry: Mapped, reading: Reading) -> Tensor:
    """The part of a whole tensor that a piece holds."""
    if piece.place in VOCABULARY and (rows := piece.shape[0] - whole.shape[0]) > 0:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, rows))
    if tuple(whole.shape) != piece.shape:
        raise ValueError(
            f"{reading.directory}: {list(entry.names)} make {tuple(whole.shape)}; Megatron's "
            f"{piece.place} is {piece.shape}: give this model's arguments"
        )
    for axis, (begin, size) in enumerate(zip(piece.offset, piece.tensor.shape, strict=True)):
        whole = whole.narrow(axis, begin, size)
    return whole
