"""A trained model as a Hugging Face folder: config.json and weights, which transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from heteropp.description.files import (
    FileError,
    flush,
    make_folder,
    read_json,
    write_bytes,
    write_text,
)
from heteropp.layout.boxes import Box
from heteropp.models.assembly import Assembly
from heteropp.models.spec import ModelError, ModelSpec, Parameter
from heteropp.state.hugging_face.weights import CONFIG, INDEX, SINGLE, check_same, format_of
from hyperhetero.output import held

FILE_BYTES = 5 << 30  # of a file of weights, at most, as transformers cuts them
# what goes along from the folder that a model came from
COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("generation_config.json", "*.jinja", "LICENSE*"),
)


def export(
    model: ModelSpec,
    read: Callable[[Parameter], Tensor],
    output: Path,
    source: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder, which appears whole or not at all. Raises FileError or LockError.

    read: gives a whole parameter on the host; it is written in the model's dtype.
    source: the Hugging Face folder that the model came from; its config.json is kept as it is but
    for the dtype, and its tokenizer's files go along. So does the model's code, where it has some.
    """
    config, code = _config(model, source), _code(model)
    with new_folder(output, source) as folder:
        for name, content in code.items():
            write_bytes(folder / name, content)
        _write_weights(model, read, folder, file_bytes)
        write_text(folder / CONFIG, _as_text(config))


@contextmanager
def new_folder(output: Path, source: Path | None) -> Iterator[Path]:
    """Gives a folder to write to, which then gets its name. Raises FileError or LockError.

    source: a Hugging Face folder whose tokenizer's files go along.
    """
    if os.path.lexists(output):
        raise FileError(f"{output} is there already; expected the name of a new folder")
    make_folder(output.absolute().parent)
    with held(output.with_name(f".{output.name}.lock"), str(output)):
        partial = output.with_name(f".{output.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            yield partial
            if source:
                _copy_companions(source, partial)
            flush(partial)
            partial.rename(output)
            flush(output.parent)
        except (OSError, SafetensorError) as error:
            raise FileError(f"{output} cannot be written: {error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _config(model: ModelSpec, source: Path | None) -> dict[str, Any]:
    form = format_of(model)
    if source is None:
        return form.config_of(model)
    check_same(source, model)
    theirs = read_json(source / CONFIG, dict)
    theirs.pop("dtype", None)  # the newer name, which older releases do not know
    return {**theirs, "torch_dtype": model.dtype}


def _code(model: ModelSpec) -> Mapping[str, bytes]:
    try:
        return format_of(model).code(model)
    except ModelError as error:
        raise FileError(str(error)) from None


Tensors = dict[str, Assembly]  # each of parameters


def _write_weights(
    model: ModelSpec, read: Callable[[Parameter], Tensor], folder: Path, file_bytes: int
) -> None:
    tensors = format_of(model).written(model)
    dtypes = {name: _dtype(model, assembly) for name, assembly in tensors.items()}
    sizes = {
        name: prod(assembly.shape) * dtypes[name].itemsize for name, assembly in tensors.items()
    }
    files = list(_files(tensors, sizes, file_bytes))
    parameters = _WholeParameters(model, read)
    places: dict[str, str] = {}
    for i, wanted in enumerate(files):
        name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        values = {
            tensor: assembly.read(Box.whole(assembly.shape), parameters.fetch).to(
                dtypes[tensor], copy=True, memory_format=torch.contiguous_format
            )
            for tensor, assembly in wanted.items()
        }
        write_tensors(values, folder / name)
        places.update(dict.fromkeys(values, name))
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        write_text(folder / INDEX, _as_text(index))


def write_tensors(values: dict[str, Tensor], path: Path) -> None:
    save_file(values, path, metadata={"format": "pt"})  # transformers wants to know
    path.chmod(0o644)
    flush(path)


class _WholeParameters:
    """A checkpoint's parameters; the newest is kept, as several tensors may be slices of it."""

    def __init__(self, model: ModelSpec, read: Callable[[Parameter], Tensor]) -> None:
        self.read = read
        self.parameters = {parameter.name: parameter for parameter in model.parameters()}
        self.name = ""
        self.value = torch.empty(0)

    def fetch(self, name: str, box: Box) -> Tensor:
        if name != self.name:
            self.value = torch.empty(0)  # before the next one is read
            self.name, self.value = name, self.read(self.parameters[name])
        return self.value[box.within(Box.whole(self.value.shape))]


def _dtype(model: ModelSpec, assembly: Assembly) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, format_of(model).dtype(model, assembly.sources[0]))
    return dtype


def _files(
    tensors: Mapping[str, Assembly], sizes: Mapping[str, int], file_bytes: int
) -> Iterator[Tensors]:
    """Yields what each file holds; no file is larger than asked, unless one tensor is."""
    held: Tensors = {}
    size = 0
    for name, assembly in tensors.items():
        if held and size + sizes[name] > file_bytes:
            yield held
            held, size = {}, 0
        held[name] = assembly
        size += sizes[name]
    yield held


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
                flush(folder / path.name)


def _as_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
