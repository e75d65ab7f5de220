"""The Llama family: pre-norm blocks of grouped-query attention and SwiGLU, without biases."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict

from heteropp.models.attention_work import seen_pairs
from heteropp.models.spec import LARGEST, Attention, ModelError, ModelSpec, Parameter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from heteropp.models.llama.hugging_face import LlamaFormat
    from heteropp.models.llama.stage import LlamaStage
    from heteropp.models.parallel.context_parallel import ContextParallelGroup
    from heteropp.models.parallel.expert_parallel import ExpertParallelGroup
    from heteropp.models.parallel.tensor_parallel import TensorParallelGroup

# what changes a stage's results, but neither its operators nor their sizes
_COSTS_NOTHING = ("name", "layers", "rope_theta", "norm_eps", "rope_scaling")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's scaling of the rotary angles, under the names of its config.json.

    A frequency is told by its turns over the original length of a sequence.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    factor: float  # what low frequencies are divided by
    low_freq_factor: float  # turns below which a frequency is low
    high_freq_factor: float  # turns above which a frequency is not changed
    original_max_position_embeddings: int  # original length of a sequence, in tokens


@dataclass(frozen=True, kw_only=True)
class LlamaModel(ModelSpec):
    """A model of the Llama family, built of this project's own modules."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    family: Literal["llama"] = "llama"
    heads: int  # number of attention heads
    kv_heads: int  # number of heads of keys and values, fewer in grouped-query attention
    intermediate: int  # inner size of the MLP
    rope_theta: float = 10000.0  # base of the rotary position embedding
    norm_eps: float = 1e-5  # what RMSNorm adds to the mean square
    attention: Attention = "explicit"  # explicit keeps scores in memory; a fused kernel keeps none
    tied_embeddings: bool = False  # whether the head's weight is the embedding's
    rope_scaling: RopeScaling | None = None  # Llama 3's scaling of the rotary angles; absent: none
    dropout: float = 0.0  # share of elements dropped of what embedding, attention and MLP give

    @classmethod
    def hugging_face(cls) -> LlamaFormat:
        from heteropp.models.llama.hugging_face import LlamaFormat

        return LlamaFormat()

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def parameters(self, layers: tuple[int, int] | None = None) -> list[Parameter]:
        first, last = layers or (0, self.layers)
        hidden, kv = self.hidden, self.kv_heads * self.head_size
        result = []
        if first == 0:
            result.append(Parameter("embedding.weight", (self.vocab, hidden), 0))
        for layer in range(first, last):
            for name, shape, dimension in (
                ("attention_norm", (hidden,), None),
                ("attention.query", (hidden, hidden), 0),
                ("attention.key", (kv, hidden), 0),
                ("attention.value", (kv, hidden), 0),
                ("attention.output", (hidden, hidden), 1),
                ("mlp_norm", (hidden,), None),
                ("mlp.gate", (self.intermediate, hidden), 0),
                ("mlp.up", (self.intermediate, hidden), 0),
                ("mlp.down", (hidden, self.intermediate), 1),
            ):
                result.append(Parameter(f"layers.{layer}.{name}.weight", shape, dimension))
        if last == self.layers:
            result.append(Parameter("norm.weight", (hidden,), None))
            if not (self.tied_embeddings and first == 0):
                result.append(Parameter("head.weight", (self.vocab, hidden), 0))
        return result

    @property
    def tied(self) -> Mapping[str, str]:
        return {"head.weight": "embedding.weight"} if self.tied_embeddings else {}

    def untied(self) -> LlamaModel:
        return replace(self, tied_embeddings=False)

    def cost_key(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in _COSTS_NOTHING}

    @property
    def tp_sizes(self) -> dict[str, int]:
        names = ("kv_heads", "intermediate", "vocab", "sequence_length")
        return {name: getattr(self, name) for name in names}

    def context_parallel_problem(self) -> str | None:
        return None

    def token_slices_problem(self) -> str | None:
        return None

    def selective_recompute_problem(self) -> str | None:
        if self.attention == "fused":
            return "fused attention keeps no scores to compute again"
        return None

    @property
    def fused_head_sizes(self) -> frozenset[tuple[int, int]]:
        return frozenset({(self.head_size,) * 2} if self.attention == "fused" else ())

    @property
    def keeps_no_scores(self) -> bool:
        return self.attention == "fused"

    def mixed_lengths_problem(self) -> str | None:
        if self.dropout:
            return (
                f"the model has dropout {self.dropout}; expected 0, as a document is not in the "
                "same rows under every plan"
            )
        return None

    def describe(self) -> str:
        return f"{self.attention} attention, {self.dtype}"

    def flops_per_token(self) -> float:
        """Returns the FLOPs that a token's forward and backward take; recompute does not count.

        They are six for each weight of a matrix that a token is multiplied with, and the products
        of attention with all tokens of its sequence, masked or not (PaLM, appendix B): fused
        attention has none with those that are masked.
        """
        matrices = sum(
            math.prod(parameter.shape)
            for parameter in self.parameters()
            if parameter.name.startswith("layers.") and len(parameter.shape) == 2
        )
        head = self.vocab * self.hidden
        length = self.sequence_length
        seen = seen_pairs(length) / length if self.attention == "fused" else length
        attention = 12 * self.layers * self.hidden * seen
        return 6.0 * (matrices + head) + attention

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
    ) -> LlamaStage:
        from heteropp.models.llama.stage import LlamaStage

        return LlamaStage(
            *(self, layers, group, device, dtype),
            selective_recompute=selective_recompute,
            seed=seed,
            context=context,
        )

    def initial_values(self, layers: tuple[int, int], seed: int) -> Iterator[tuple[str, Tensor]]:
        for parameter in self.parameters(layers):
            named = replace(parameter, name=self.global_name(parameter.name))
            yield parameter.name, self.initial_value(named, seed)

    def initial_value(self, parameter: Parameter, seed: int) -> Tensor:
        """Returns the whole float32 tensor, on the host."""
        import torch

        if parameter.name.endswith("norm.weight"):
            return torch.ones(parameter.shape)
        digest = hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        std = 0.02
        if parameter.name.endswith(("attention.output.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * self.layers)  # they add to the residual stream, twice a layer
        return torch.randn(parameter.shape, generator=generator) * std

    def validate(self) -> None:
        for name in (
            *("layers", "hidden", "heads", "kv_heads", "intermediate", "vocab"),
            "sequence_length",
        ):
            self._validate_size(name)
        if self.hidden % (2 * self.heads):
            raise ModelError(
                f"hidden {self.hidden} is not an even multiple of heads {self.heads}; "
                "rotary embedding turns pairs within a head"
            )
        if self.heads % self.kv_heads:
            raise ModelError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if not 0 < self.rope_theta < math.inf or not 0 < self.norm_eps < 1:
            raise ModelError("rope_theta must be positive and finite, and norm_eps between 0 and 1")
        if not 0 <= self.dropout < 1:
            raise ModelError(f"dropout is {self.dropout}; expected at least 0 and below 1")
        if self.rope_scaling is not None:
            _validate_scaling(self.rope_scaling)


SPEC = LlamaModel


def _validate_scaling(scaling: RopeScaling) -> None:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 1 <= scaling.factor < math.inf:
        raise ModelError(f"rope_scaling.factor is {scaling.factor}; expected at least 1")
    if not 0 < low < high < math.inf:
        raise ModelError(
            f"rope_scaling has low_freq_factor {low} and high_freq_factor {high}; "
            "expected positive numbers, the second the larger"
        )
    if not 1 <= scaling.original_max_position_embeddings <= LARGEST:
        raise ModelError(
            "rope_scaling.original_max_position_embeddings is "
            f"{scaling.original_max_position_embeddings}; expected 1 to {LARGEST}"
        )
