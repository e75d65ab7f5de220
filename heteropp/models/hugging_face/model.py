"""A model of any family that transformers knows, as plans contain it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict

from heteropp.layout.parameter import Parameter
from heteropp.models.hugging_face import lora as products
from heteropp.models.hugging_face.config import Config
from heteropp.models.parted import PartedModel
from heteropp.models.spec import Attention

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from heteropp.models.hugging_face.folder import HuggingFaceFolder
    from heteropp.models.hugging_face.stage import HuggingFaceStage
    from heteropp.models.parallel.context_parallel import ContextParallelGroup
    from heteropp.models.parallel.expert_parallel import ExpertParallelGroup
    from heteropp.models.parallel.tensor_parallel import TensorParallelGroup

CUTTABLE = (  # whose tokens meet in attention alone, as has been tried
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe"),
    *("deepseek_v3", "gpt_oss"),
)
# what families call the bias that a router adds to the scores it chooses experts by
EXPERT_BIASES = (".e_score_correction_bias", ".expert_bias")
SPREADABLE = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")  # whose experts may lie over ranks


def names_expert_bias(parameter: Parameter, experts: int) -> bool:
    """Whether a parameter is, by name and size, a router's bias of just a layer's experts."""
    fits = f".{parameter.name}".endswith(EXPERT_BIASES)
    return fits and math.prod(parameter.shape) == experts


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(PartedModel):
    """A model of any family that transformers knows; to read a plan needs no transformers."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    family: Literal["hugging_face"] = "hugging_face"
    config: Config  # the model's config.json
    attention: Attention = "explicit"  # explicit keeps scores in memory; a fused kernel keeps none
    experts: int = 0  # number of experts in a layer that has some; 0: none has
    experts_of_token: int = 0  # number of experts that a token goes to
    mixes_documents: str = ""  # kind of a layer that mixes a sequence's documents; "": none
    lora: products.Lora | None = None  # what LoRA adds, which is among `parts`; absent: nothing
    tp_refusal: str = ""  # why tensor parallelism cannot be, in a clause; "": it can
    rows_refusal: str = ""  # why sequence parallelism cannot be, in a clause; "": it can

    # names are the family's own, after that of its base model
    first_prefix = ""
    last_prefix = ""

    @classmethod
    def hugging_face(cls) -> HuggingFaceFolder:
        from heteropp.models.hugging_face.folder import HuggingFaceFolder

        return HuggingFaceFolder()

    def tp_problem(self, tp: int) -> str | None:
        if tp > 1 and self.tp_refusal:
            return f"tensor-parallel degree {tp}: {self.tp_refusal}"
        return super().tp_problem(tp)

    def sequence_parallel_problem(self) -> str | None:  # type: ignore[override]  # not of all alike
        return self.rows_refusal or None

    def context_parallel_problem(self) -> str | None:
        return self._problem_with_parts("be cut over ranks")

    def token_slices_problem(self) -> str | None:
        return self._problem_with_parts("run in slices")

    def _problem_with_parts(self, what: str) -> str | None:
        values = self.config.values()
        kind = values.get("model_type")
        if kind not in CUTTABLE:
            return f"sequences of {kind} cannot {what}; those of {', '.join(CUTTABLE)} can"
        if self.lora is not None:
            return f"sequences cannot {what} where LoRA trains beside frozen weights"
        rotary = f"{values.get('rope_scaling')} {values.get('rope_parameters')}"
        if "dynamic" in rotary or "longrope" in rotary:
            return "positions are turned by the longest of a forward's, and a part has others"
        return None

    @property
    def expert_count(self) -> int:
        return self.experts

    def is_of_experts(self, parameter: Parameter) -> bool:
        return ".experts." in parameter.name and parameter.shape[:1] == (self.experts,)

    def is_expert_bias(self, parameter: Parameter) -> bool:
        return parameter.trains and names_expert_bias(parameter, self.experts)

    def expert_parallel_problem(self) -> str | None:
        kind = self.config.values().get("model_type")
        if kind not in SPREADABLE:
            return f"experts of {kind} cannot lie over ranks; those of {', '.join(SPREADABLE)} can"
        if not self.experts:
            return f"model {self.name} of {kind} has no experts"
        return None

    def selective_recompute_problem(self) -> str | None:
        return "transformers' modules do not say what attention's scores are"

    @cached_property
    def keeps_no_scores(self) -> bool:
        """Whether attention is one kernel in every block: none has a sink or chosen keys, say."""
        return self.attention == "fused" and not self._tried[0]

    @property
    def fused_head_sizes(self) -> frozenset[tuple[int, int]]:
        return self._tried[1] if self.attention == "fused" else frozenset()

    @property
    def caps_fused_scores(self) -> bool:
        return self.attention == "fused" and self._tried[2]

    @property
    def fuses_windows(self) -> bool:
        return self.attention == "fused" and self._tried[3]

    @cached_property
    def _tried(self) -> tuple[bool, frozenset[tuple[int, int]], bool, bool]:
        """Runs a block of each kind.

        Returns whether it made a mask, `fused_head_sizes`, `caps_fused_scores` and whether some
        attention is through a window.
        """
        import torch

        from heteropp.models.masked_flops import MaskedFlops
        from heteropp.models.parallel.tensor_parallel import SoloGroup

        kinds = tuple(dict.fromkeys(self.order))
        model = replace(self, order=kinds, layers=len(kinds))
        # whose kernel of attention takes heads of all sizes
        with torch.device("meta"), MaskedFlops() as masked:
            stage = model.build((0, len(kinds)), SoloGroup(), "meta", getattr(torch, self.dtype))
            tokens = torch.zeros(self.sequence_length, dtype=torch.int64)
            stage(tokens, tokens)
        keeps_scores = any(True for _ in stage.masks.buffers())
        sizes = frozenset(masked.head_sizes)
        return keeps_scores, sizes, masked.caps_scores, stage.has_windows

    def documents_problem(self) -> str | None:
        if self.mixes_documents:
            return f"a layer of kind {self.mixes_documents} goes from one document to the next"
        return None

    def mixed_lengths_problem(self) -> str | None:
        if self.config.values().get("output_router_logits"):
            return "padding would count in the auxiliary loss (output_router_logits)"
        return super().mixed_lengths_problem()

    def active_elements(self) -> int:
        experts = sum(
            math.prod(parameter.shape)
            for parameter in self.parameters()
            if self.is_of_experts(parameter)
        )
        idle = experts * (self.experts - self.experts_of_token) // max(1, self.experts)
        return self.elements() - idle

    def describe(self) -> str:
        return self.dtype if self.lora is None else f"{self.dtype}, LoRA of rank {self.lora.rank}"

    @property
    def has_frozen_weights(self) -> bool:
        return self.lora is not None

    def build(
        self,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        selective_recompute: bool = False,
        seed: int = 0,
        context: ContextParallelGroup | None = None,
        experts: ExpertParallelGroup | None = None,
    ) -> HuggingFaceStage:
        from heteropp.models.hugging_face.stage import HuggingFaceStage

        return HuggingFaceStage(self, layers, group, device, dtype, context, experts)

    def initial_values(self, layers: tuple[int, int], seed: int) -> Iterator[tuple[str, Tensor]]:
        from heteropp.models.hugging_face.initial import initial_values

        yield from initial_values(self, layers, seed)
        yield from self.added_values(layers, seed)

    def base(self) -> HuggingFaceModel:
        return self if self.lora is None else products.without(self)

    def added_values(self, layers: tuple[int, int], seed: int) -> Iterator[tuple[str, Tensor]]:
        return products.initial_values(self, layers, seed)

    def with_code_in(self, folder: Path) -> HuggingFaceModel:
        """Returns the model with its code, where it has some, in a folder that it has moved to."""
        code = self.config.code
        return (
            self
            if code is None
            else replace(self, config=replace(self.config, code=code.at(folder)))
        )

    def allow_code(self, trust_remote_code: bool) -> None:
        if self.config.code is not None:
            self.config.code.allow(trust_remote_code)

    def identity(self) -> dict[str, Any]:
        found = {**super().identity(), "config": self._config_wherever()}
        del found["rows_refusal"]  # plans know it since lately, and what trains is the same
        # Another family has other names; LoRA changes the parts, which come after it.
        return {"family": self.family, "lora": found["lora"], **found}

    def cost_key(self) -> dict[str, Any]:
        from importlib.metadata import version

        found = {**super().cost_key(), "config": self._config_wherever()}
        return {**found, "transformers": version("transformers")}

    def _config_wherever(self) -> dict[str, str]:
        """Returns the config and the hash of its code, which may move."""
        code = self.config.code
        return {"text": self.config.text} | ({"code": code.sha256} if code else {})


SPEC = HuggingFaceModel
