"""The model file: a model of any family, from TOML, a Hugging Face folder or a preset."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from heteropp.description.files import FileError, read_json, read_toml
from heteropp.description.presets import model_path
from heteropp.models.families import families, spec_of
from heteropp.models.spec import Attention, Dtype, ModelError, ModelSpec, NoFormError

if TYPE_CHECKING:
    from heteropp.models.hugging_face.remote_code import RemoteCode

OF_TRANSFORMERS = "hugging_face"  # the family of all that we have no modules of
EXTRA = "pip install 'hyperhetero[models]' for any that transformers knows"


@dataclass(frozen=True, kw_only=True)
class _ModelType:
    __pydantic_config__ = ConfigDict(extra="ignore", strict=True)
    model_type: str


@dataclass(frozen=True, kw_only=True)
class ConfiguredModel:
    """A model file that stands on a Hugging Face config, and says what it has otherwise."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    hugging_face: str  # path of the folder or its config.json, from where this file is
    name: str | None = None  # the model's name; absent: this file's
    sequence_length: int | None = None  # tokens of a sequence; absent: as the config says
    dtype: Dtype | None = None  # dtype of weights and activations; absent: as the config says
    attention: Attention | None = None  # explicit keeps scores; fused: one kernel that keeps none


def read_model(
    path: str | Path,
    sequence_length: int | None = None,
    lora: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Reads a model file, a Hugging Face folder or its config.json, or a preset by name.

    "path/of/file.py:function" is the model that a user's function defines. A sequence length, in
    tokens, is taken in place of the file's. lora: what is put beside a Hugging Face folder's model,
    such as "r=16,targets=q_proj+v_proj". trust_remote_code: whether code in a Hugging Face folder,
    of a family that transformers lacks, may run. Raises FileError.
    """
    if lora is not None:
        return _read_with_lora(path, sequence_length, lora, trust_remote_code)
    if ".py:" in str(path):
        return _read_definition(str(path), sequence_length)
    path = model_path(path)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        family, fields = read_config(path, trust_remote_code)
        model = family(name=path.absolute().parent.name or family.__name__, **fields)
    elif "hugging_face" in read_toml(path, dict):
        model = _read_of_config(path, trust_remote_code)
    else:
        model = read_toml(path, ModelSpec)  # type: ignore[type-abstract]
    if sequence_length is not None:
        model = replace(model, sequence_length=sequence_length)
    try:
        model.validate()
    except ModelError as error:
        raise FileError(f"{path}: {error}") from None
    return model


def _read_of_config(path: Path, trust_remote_code: bool) -> ModelSpec:
    chosen = asdict(read_toml(path, ConfiguredModel))
    config = path.parent / chosen.pop("hugging_face")
    file = config / "config.json" if config.is_dir() else config
    family, fields = read_config(file, trust_remote_code)
    chosen["name"] = chosen["name"] or path.stem
    chosen = {key: value for key, value in chosen.items() if value is not None}
    if unknown := chosen.keys() - {field.name for field in dataclass_fields(family)}:
        raise FileError(f"{path}: {unknown.pop()}: a model of this family has none")
    return family(**{**fields, **chosen})


def _read_with_lora(
    path: str | Path, sequence_length: int | None, lora: str, trust_remote_code: bool
) -> ModelSpec:
    config = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if config.suffix != ".json":
        raise FileError(f"{path} is no Hugging Face folder, whose models alone can have LoRA")
    if not find_spec("transformers"):
        raise FileError(
            f"{config}: LoRA needs transformers (pip install 'hyperhetero[models,lora]')"
        )
    from heteropp.models.hugging_face.lora import with_lora
    from heteropp.models.hugging_face.reading import read

    try:
        values = read_json(config, dict)
        code = _code(values, config, trust_remote_code)
        model = with_lora(read(values, config.absolute().parent.name, code), lora)
        model = replace(model, sequence_length=sequence_length or model.sequence_length)
        model.validate()
        return model
    except ModelError as error:
        raise FileError(f"{config}: {error}") from None


def _read_definition(source: str, sequence_length: int | None) -> ModelSpec:
    from heteropp.models.custom.reading import read  # which needs torch

    try:
        model = read(source)
        if sequence_length not in (None, model.sequence_length):
            raise ModelError(f"its sequences have {model.sequence_length} tokens, which it decides")
        model.validate()
        return model
    except ModelError as error:
        raise FileError(f"{source}: {error}") from None


def read_config(
    path: Path, trust_remote_code: bool = False
) -> tuple[type[ModelSpec], dict[str, Any]]:
    """Returns what a config.json says of a model: its family, and fields of the family's spec.

    Raises FileError.
    """
    model_type = read_json(path, _ModelType).model_type
    readers = {
        name: (spec, format_)
        for spec in map(spec_of, set(families()) - {OF_TRANSFORMERS})  # which reads any
        if (format_ := spec.hugging_face()) is not None
        for name in format_.model_types
    }
    if model_type not in readers and not find_spec("transformers"):
        raise FileError(
            f"{path}: model_type is {model_type!r}; expected one of {', '.join(sorted(readers))} "
            f"({EXTRA}, or plan another family as a Llama-shaped model of its size, as preset "
            "autohet-gpt3-6.7b does)"
        )
    try:
        if model_type not in readers:
            return _read_by_transformers(path, trust_remote_code)
        spec, format_ = readers[model_type]
        try:
            return spec, format_.fields(read_json(path, format_.config))
        except NoFormError as error:  # of ours; transformers' modules may have it
            if not find_spec("transformers"):
                raise ModelError(f"{error} ({EXTRA})") from None
            try:
                return _read_by_transformers(path, trust_remote_code)
            except ModelError:
                raise error from None
    except ModelError as error:
        raise FileError(f"{path}: {error}") from None


def _read_by_transformers(
    path: Path, trust_remote_code: bool
) -> tuple[type[ModelSpec], dict[str, Any]]:
    values = read_json(path, dict)
    if (code := _code(values, path, trust_remote_code)) is not None:
        from heteropp.models.hugging_face.reading import fields_of

        return spec_of(OF_TRANSFORMERS), fields_of(values, code)
    from heteropp.description import kept_configs

    return spec_of(OF_TRANSFORMERS), kept_configs.fields_of(values)


def _code(values: dict[str, Any], path: Path, trust_remote_code: bool) -> RemoteCode | None:
    """Returns the code that stands beside a config.json, if it is needed. Raises ModelError."""
    from heteropp.models.hugging_face.config import code_of

    if (code := code_of(values, path.parent)) is not None:
        code.allow(trust_remote_code)
    return code
