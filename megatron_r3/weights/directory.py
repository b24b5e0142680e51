"""Reads transformers directories tensor by tensor, and writes them whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_r3.data.untrusted import read_json
from megatron_r3.replay.words import one_line, quoted
from megatron_r3.weights.all_ranks import my_rank, on_first_rank, together
from megatron_r3.weights.quantized import Format, format_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The other files of a model; `*.py` is the code of a tokenizer that transformers does not have.
_BESIDE_WEIGHTS = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "*.model", "chat_template*", "*.py"),
)


class Reading(ExitStack):
    """The tensors of a transformers directory; a tensor is read when the caller asks for it.

    This is a context manager, which closes the files at its end. The files are those that the
    directory's index names or, without an index, all *.safetensors.

    Raises:
        ValueError: a file is missing (config.json too), is not whole, or has a tensor that another
            file has too; or there are no tensors.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self._format: Format | None = format_of(read_config(directory))
        self._of: dict[str, Any] = {}  # the open file of each tensor
        with ExitStack() as opened:  # closes all files if one is refused
            for path in _files_of(directory):
                try:
                    file = opened.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
                if twice := self._of.keys() & {*file.keys()}:
                    raise ValueError(
                        f"{path}: the tensor {min(twice)} is in another file too; remove one"
                    )
                self._of |= dict.fromkeys(file.keys(), file)
            if not self._of:
                raise ValueError(f"{directory}: no tensors in its *.safetensors")
            # of each quantized tensor the names of its values and of its scales
            self._parts = self._format.parts(self._of) if self._format else {}
            self.push(opened.pop_all())

    @property
    def names(self) -> set[str]:
        """The names of all tensors; of a quantized tensor its own name, not those of its parts.

        The parts are the values and the scales.
        """
        parts = {part for both in self._parts.values() for part in both}
        return (self._of.keys() - parts) | self._parts.keys()

    def tensor(self, name: str) -> Tensor:
        """A tensor, on the host. A quantized tensor is multiplied by its scales.

        Raises:
            ValueError: the tensor's dtype is none of bfloat16, float16 and float32, or the scales
                do not fit.
        """
        if self._format and name in self._parts:
            values, scales = (self._of[part].get_tensor(part) for part in self._parts[name])
            try:
                return self._format.dequantized(values, scales)
            except ValueError as error:
                raise ValueError(f"{self.directory}: {name}: {error}") from error
        tensor = self._of[name].get_tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"{self.directory}: {name} is {tensor.dtype}; expected one of {_DTYPES}"
            )
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading the tensor."""
        stored = self._parts.get(name, (name,))[0]
        shape = tuple(self._of[stored].get_slice(stored).get_shape())
        return self._format.shape(shape) if self._format and name in self._parts else shape


def _files_of(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    found = read_json(index.read_bytes(), str(index))
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"{index}: expected a JSON object with the field weight_map")
    for file in names.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: {quoted(file)} is no file of this folder")
    return [directory / file for file in sorted(set(names.values()))]


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a transformers directory.

    Raises:
        ValueError: there is no config.json, or it is no JSON object.
    """
    file = directory / CONFIG
    if not file.is_file():
        raise ValueError(f"{directory}: no {CONFIG}")
    config = read_json(file.read_bytes(), str(file))
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected an object")
    return config


def dtype_of(config: Mapping[str, Any], file: Path) -> torch.dtype:
    """The dtype of weights that a config.json names; bfloat16 if it names none.

    Args:
        config: the content of `file`.
        file: the config.json, named in messages.

    Raises:
        ValueError: the dtype is none of bfloat16, float16 and float32.
    """
    names = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}
    name = str(config.get("dtype", config.get("torch_dtype", "bfloat16")))
    if name not in names:
        raise ValueError(
            f"{file}: dtype {quoted(name)}; weights are written in one of {', '.join(names)}"
        )
    return names[name]


def check_target(directory: Path) -> None:
    """Refuse to write a transformers directory over existing files.

    Raises:
        ValueError: `directory` is a file, a symbolic link, or not empty.
    """
    if directory.is_symlink() or (
        directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
    ):
        raise ValueError(
            f"{directory}: something is there already: move it away, or choose another folder"
        )


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """If a write inside the block fails, name `directory` in the error.

    Raises:
        ValueError: a write has failed; the message has the reason.
    """
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = one_line(str(error), 500)
        raise ValueError(
            f"{directory}: cannot be written; nothing is left there ({reason})"
        ) from error


@contextmanager
def appearing(directory: Path) -> Iterator[Path]:
    """A folder that is renamed to `directory` at the end, or removed after an error.

    All ranks enter and leave the block, and must see the same file system. An error inside the
    block must be raised on all ranks (see `all_ranks.together`).

    Inside the block the folder is `.NAME.part`, beside `directory`. If rank 0 is killed, the folder
    stays until somebody writes `directory` again.

    Raises:
        ValueError: the folder cannot be made or renamed; all ranks raise the same.
    """
    part = directory.parent / f".{directory.name}.part"

    def make() -> None:
        with writing(directory):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

    def see() -> None:
        if not part.is_dir():
            raise ValueError(f"{directory}: its folder is not on a file system that all ranks see")

    def name() -> None:
        with writing(directory):
            part.rename(directory)  # a rename replaces an empty folder too

    try:
        on_first_rank(make)
        together(see)
        yield part
        on_first_rank(name)
    except BaseException:
        if my_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise


def write_json(file: Path, value: object) -> None:
    """Write a JSON file in transformers' layout: indented by two spaces."""
    file.write_text(json.dumps(value, indent=2) + "\n")


def copy_beside_weights(source: Path, target: Path) -> None:
    """Copy config.json, generation_config.json and the tokenizer's files, but no weights.

    The copy of a config.json with quantized weights has no quantization_config, because weights
    are written in 16 or 32 bits.
    """
    for pattern in (CONFIG, *_BESIDE_WEIGHTS):
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
    if format_of(config := read_config(source)):
        del config["quantization_config"]
        write_json(target / CONFIG, config)
