"""A trained model as a Hugging Face folder: config.json and weights, which transformers loads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from heteropp.description.files import FileError, flush, make_folder, read_json, write_text
from heteropp.description.model import Model
from heteropp.models.llama.hugging_face_weights import INDEX, SINGLE, check_same, tensor_name
from heteropp.models.llama.parameters import Parameter, model_parameters
from hyperhetero_output import held

FILE_BYTES = 5 << 30  # of a file of weights, at most, as transformers cuts them
# what goes along from the folder that a model came from
COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("generation_config.json", "*.jinja", "LICENSE*"),
)


def export(
    model: Model,
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
    model: Model,
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


def _config(model: Model, source: Path | None) -> dict[str, Any]:
    if source is None:
        return _config_of(model)
    check_same(source, model)
    theirs = read_json(source / "config.json", dict)
    theirs.pop("dtype", None)  # the newer name, which older releases do not know
    return {**theirs, "torch_dtype": model.dtype}


def _config_of(model: Model) -> dict[str, Any]:
    """Returns a model's config.json, as releases 4 and 5 of transformers read it."""
    scaling = model.rope_scaling and {"rope_type": "llama3", **asdict(model.rope_scaling)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.sequence_length,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        "torch_dtype": model.dtype,
    }


def _write_weights(
    model: Model, read: Callable[[Parameter], Tensor], folder: Path, file_bytes: int
) -> None:
    files, dtype = list(_files(model, file_bytes)), getattr(torch, model.dtype)
    places: dict[str, str] = {}
    for i, parameters in enumerate(files):
        name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {
            tensor_name(parameter.name): read(parameter).to(dtype).contiguous()
            for parameter in parameters
        }
        save_file(tensors, folder / name, metadata={"format": "pt"})  # transformers wants to know
        (folder / name).chmod(0o644)
        flush(folder / name)
        places.update(dict.fromkeys(tensors, name))
    if len(files) > 1:
        total = sum(_bytes(model, parameter) for part in files for parameter in part)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(folder / INDEX, _as_text(index))


def _files(model: Model, file_bytes: int) -> Iterator[list[Parameter]]:
    """Yields the parameters of each file; no file is larger than asked, unless one tensor is."""
    held: list[Parameter] = []
    for parameter in model_parameters(model):
        size = sum(_bytes(model, each) for each in held)
        if held and size + _bytes(model, parameter) > file_bytes:
            yield held
            held = []
        held.append(parameter)
    yield held


def _bytes(model: Model, parameter: Parameter) -> int:
    return prod(parameter.shape) * model.dtype_bytes


def _copy_companions(source: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
                flush(folder / path.name)


def _as_text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
