"""A config.json as a plan contains it, whatever the family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import core_schema

from heteropp.models.hugging_face.remote_code import RemoteCode, classes
from heteropp.models.spec import ModelError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema
    from transformers import PretrainedConfig

RELEASE = "5.23"  # of transformers, as in pyproject.toml
# of config.json, what no forward depends on
_LEFT_OUT = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path")
CODE = "remote_code"  # beside its entries in a plan, where the model is code in its folder


@dataclass(frozen=True)
class Config:
    """What config.json says, as JSON with sorted keys, so that equal ones are equal."""

    text: str
    code: RemoteCode | None = None  # None: transformers has the family

    @staticmethod
    def of(values: dict[str, Any], code: RemoteCode | None = None) -> Config:
        kept = {key: value for key, value in values.items() if key not in (*_LEFT_OUT, CODE)}
        return Config(json.dumps(kept, sort_keys=True), code)

    def values(self) -> dict[str, Any]:
        return json.loads(self.text)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Config], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        def read(value: Any) -> Config:
            if isinstance(value, Config):
                return value
            if not isinstance(value, dict):
                raise ValueError("expected a model's config.json")
            if CODE not in value:
                return Config.of(value)
            try:
                return Config.of(value, _CODE.validate_json(json.dumps(value[CODE])))
            except ValidationError:
                raise ValueError(f"{CODE}: expected a folder, and its files' sha256") from None

        def write(config: Config) -> dict[str, Any]:
            code = {} if config.code is None else {CODE: _CODE.dump_python(config.code)}
            return {**config.values(), **code}

        return core_schema.no_info_plain_validator_function(
            read,
            json_schema_input_schema=core_schema.dict_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(write),
        )


_CODE = TypeAdapter(RemoteCode)


def code_of(values: dict[str, Any], folder: Path) -> RemoteCode | None:
    """Returns the code of a folder with this config.json, where transformers lacks the family.

    Raises ModelError.
    """
    check_release()
    if "auto_map" not in values:
        return None
    from transformers import CONFIG_MAPPING

    return None if values.get("model_type") in CONFIG_MAPPING else RemoteCode.of(folder)


@lru_cache(maxsize=64)
def family_config(config: Config) -> PretrainedConfig:
    """Returns transformers' own object of a config. Raises ModelError."""
    check_release()
    from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from heteropp.models.hugging_face import attention, experts

    values = config.values()
    model_type = values.pop("model_type", None)
    if config.code is not None:
        kind, model = classes(config.code, values.get("auto_map"))
    elif model_type in CONFIG_MAPPING:
        kind, model = CONFIG_MAPPING[model_type], None
    else:
        raise ModelError(f"transformers knows no model_type {model_type!r}")
    try:
        if model is not None:
            AutoModelForCausalLM.register(kind, model, exist_ok=True)
        found = kind(**values)
    except Exception as error:  # of whatever the family checks
        text = " ".join(str(error).split())
        raise ModelError(f"transformers refuses the config: {text}") from error
    AttentionInterface.register(attention.NAME, attention.attention)
    ALL_EXPERTS_FUNCTIONS.register(experts.NAME, experts.experts)
    found._attn_implementation = attention.NAME
    found.use_cache = False
    return found


def check_release() -> None:
    """Checks that transformers is there, of the release that we follow. Raises ModelError."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = ""
    if not found.startswith(f"{RELEASE}."):
        raise ModelError(
            f"its family needs transformers {RELEASE}; "
            + (f"{found} is installed" if found else "none is installed")
            + " (pip install 'hyperhetero[models]')"
        )
