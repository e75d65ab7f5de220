"""A trained model as a Hugging Face folder: config.json and weights, which transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from heteropp.description.files import FileError, flush, make_folder, read_json, write_text
from heteropp.models.hugging_face_format import HuggingFaceFormat
from heteropp.models.spec import ModelSpec, Parameter
from heteropp.state.hugging_face.weights import INDEX, SINGLE, check_same
from hyperhetero_output import held

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
    for the dtype, and its tokenizer's files go along.
    """
    config = _config(model, source)
    if os.path.lexists(output):
        raise FileError(f"{output} is there already; expected the name of a new folder")
    make_folder(output.absolute().parent)
    with held(output.with_name(f".{output.name}.lock"), str(output)):
        _export(model, read, output, config, source, file_bytes)


def _export(
    model: ModelSpec,
    read: Callable[[Parameter], Tensor],
    output: Path,
    config: dict[str, Any],
    source: Path | None,
    file_bytes: int,
) -> None:
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_weights(model, read, partial, file_bytes)
        if source:
            _copy_companions(source, partial)
        write_text(partial / "config.json", _as_text(config))
        flush(partial)
        partial.rename(output)
        flush(output.parent)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{output} cannot be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(model: ModelSpec, source: Path | None) -> dict[str, Any]:
    if source is None:
        return _format(model).config_of(model)
    check_same(source, model)
    theirs = read_json(source / "config.json", dict)
    theirs.pop("dtype", None)  # the newer name, which older releases do not know
    return {**theirs, "torch_dtype": model.dtype}


def _format(model: ModelSpec) -> HuggingFaceFormat:
    if (found := model.hugging_face()) is None:
        raise FileError(f"models of family {model.family} have no form as a Hugging Face folder")
    return found


Written = dict[str, list[Parameter]]  # what each tensor of a file is made of, in order of rows


def _write_weights(
    model: ModelSpec, read: Callable[[Parameter], Tensor], folder: Path, file_bytes: int
) -> None:
    files = list(_files(model, file_bytes))
    places: dict[str, str] = {}
    for i, written in enumerate(files):
        name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {
            tensor: _tensor(model, parameters, read) for tensor, parameters in written.items()
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})  # transformers wants to know
        (folder / name).chmod(0o644)
        flush(folder / name)
        places.update(dict.fromkeys(tensors, name))
    if len(files) > 1:
        total = sum(_bytes(model, parameter) for parameter in model.parameters())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(folder / INDEX, _as_text(index))


def _tensor(
    model: ModelSpec, parameters: list[Parameter], read: Callable[[Parameter], Tensor]
) -> Tensor:
    """Returns a tensor as the folder's files hold it, of the parameters that it is made of."""
    rows = [read(parameter).to(getattr(torch, model.dtype)) for parameter in parameters]
    value = torch.cat(rows) if rows[1:] else rows[0]
    transposed = _format(model).stored(model, parameters[0]).transposed
    return (value.t() if transposed else value).contiguous()


def _files(model: ModelSpec, file_bytes: int) -> Iterator[Written]:
    """Yields what each file holds; no file is larger than asked, unless one tensor is."""
    tensors: Written = {}
    for parameter in model.parameters():
        tensors.setdefault(_format(model).stored(model, parameter).name, []).append(parameter)
    held: Written = {}
    size = 0
    for name, parameters in tensors.items():
        more = sum(_bytes(model, parameter) for parameter in parameters)
        if held and size + more > file_bytes:
            yield held
            held, size = {}, 0
        held[name] = parameters
        size += more
    yield held


def _bytes(model: ModelSpec, parameter: Parameter) -> int:
    return prod(parameter.shape) * model.dtype_bytes


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
                flush(folder / path.name)


def _as_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
