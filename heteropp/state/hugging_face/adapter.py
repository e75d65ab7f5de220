"""What LoRA has learnt: as an adapter of the peft library, or merged into the weights beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from heteropp.description.files import FileError, flush
from heteropp.models.hugging_face.family import family
from heteropp.models.hugging_face.lora import A, B, Lora, is_added
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.spec import Parameter
from heteropp.state.hugging_face.export import new_folder, write_tensors
from heteropp.state.hugging_face.weights import check_same

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

Read = Callable[[Parameter], Tensor]  # gives a whole parameter on the host


def export_adapter(
    model: HuggingFaceModel, read: Read, output: Path, source: Path | None = None
) -> None:
    """Writes a folder that peft loads, which appears whole or not at all.

    source: the Hugging Face folder that the model came from, which is what the adapter is for.
    Raises FileError or LockError.
    """
    lora = model.lora
    assert lora is not None
    if source is not None:
        check_same(source, model)
    try:
        from peft import LoraConfig
    except ImportError:
        raise FileError(
            "an adapter needs the peft library (pip install 'hyperhetero[lora]')"
        ) from None
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(source) if source else None,
        inference_mode=True,
    )
    prefix = f"base_model.model.{family(model.config).model.base_model_prefix}."
    with new_folder(output, source) as folder:
        tensors = {
            f"{prefix}{parameter.name}": read(parameter).to(getattr(torch, model.dtype))
            for parameter in model.parameters()
            if is_added(parameter.name)
        }
        write_tensors(tensors, folder / WEIGHTS)
        config.save_pretrained(str(folder))
        flush(folder / CONFIG)


def merged(model: HuggingFaceModel, read: Read) -> Read:
    """Returns what reads the base model's parameters with LoRA's products added in."""
    parameters = {parameter.name: parameter for parameter in model.parameters()}
    lora: Lora | None = model.lora
    assert lora is not None

    def read_merged(parameter: Parameter) -> Tensor:
        value = read(parameter)
        layer, _, leaf = parameter.name.rpartition(".")
        if leaf != "weight" or (a := parameters.get(f"{layer}.{A}.weight")) is None:
            return value
        wide = torch.promote_types(value.dtype, torch.float32)
        product = read(parameters[f"{layer}.{B}.weight"]).to(wide) @ read(a).to(wide)
        return value.to(wide).add_(product, alpha=lora.scale).to(value.dtype)

    return read_merged
