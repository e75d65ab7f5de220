"""A config.json as a plan contains it, whatever the family."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from pydantic_core import core_schema

from heteropp.models.spec import ModelError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema
    from transformers import PretrainedConfig

RELEASE = "5.23"  # of transformers, as in pyproject.toml
# of config.json, what no forward depends on
_LEFT_OUT = ("architectures", "transformers_version", "torch_dtype", "dtype", "_name_or_path")


@dataclass(frozen=True)
class Config:
    """What config.json says, as JSON with sorted keys, so that equal ones are equal."""

    text: str

    @staticmethod
    def of(values: dict[str, Any]) -> Config:
        kept = {key: value for key, value in values.items() if key not in _LEFT_OUT}
        return Config(json.dumps(kept, sort_keys=True))

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
            return Config.of(value)

        return core_schema.no_info_plain_validator_function(
            read, serialization=core_schema.plain_serializer_function_ser_schema(Config.values)
        )


@lru_cache(maxsize=64)
def family_config(config: Config) -> PretrainedConfig:
    """Returns transformers' own object of a config. Raises ModelError."""
    check_release()
    from transformers import CONFIG_MAPPING, AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from heteropp.models.hugging_face import attention, experts

    values = config.values()
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING and "auto_map" in values:
        raise ModelError(
            f"model_type {model_type!r} is of code in the folder (auto_map), which is not run "
            "(--trust-remote-code is not supported)"
        )
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"transformers knows no model_type {model_type!r}")
    try:
        found = CONFIG_MAPPING[model_type](**values)
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
