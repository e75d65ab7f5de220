"""The GPT-2 family: pre-norm blocks with biases, learned positions, and a head that is tied."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict

from heteropp.models.spec import ModelError, ModelSpec, Parameter

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from heteropp.models.gpt2.hugging_face import GPT2Format
    from heteropp.models.gpt2.stage import GPT2Stage
    from heteropp.models.parallel.context_parallel import ContextParallelGroup
    from heteropp.models.parallel.expert_parallel import ExpertParallelGroup
    from heteropp.models.parallel.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, kw_only=True)
class GPT2Model(ModelSpec):
    """A model of the GPT-2 family, built of this project's own modules."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    family: Literal["gpt2"] = "gpt2"
    heads: int  # number of attention heads
    intermediate: int  # inner size of the MLP
    positions: int  # number of learned positions; a sequence may be shorter
    norm_eps: float = 1e-5  # what LayerNorm adds to the variance
    tied_embeddings: bool = True  # whether the head's weight is the embedding's

    @classmethod
    def hugging_face(cls) -> GPT2Format:
        from heteropp.models.gpt2.hugging_face import GPT2Format

        return GPT2Format()

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether ranks share the vocabulary; every rank holds all of an odd one, such as GPT-2's
        own 50257.
        """
        return self.vocab % 2 == 0

    def parameters(self, layers: tuple[int, int] | None = None) -> list[Parameter]:
        first, last = layers or (0, self.layers)
        hidden, inner = self.hidden, self.intermediate
        vocabulary = 0 if self.cuts_vocabulary else None
        result = []
        if first == 0:
            result.append(Parameter("embedding.weight", (self.vocab, hidden), vocabulary))
            result.append(Parameter("positions.weight", (self.positions, hidden), None))
        for layer in range(first, last):
            for name, shape, cut in (
                ("attention_norm", (hidden,), None),
                ("attention.query", (hidden, hidden), 0),
                ("attention.key", (hidden, hidden), 0),
                ("attention.value", (hidden, hidden), 0),
                ("attention.output", (hidden, hidden), 1),
                ("mlp_norm", (hidden,), None),
                ("mlp.up", (inner, hidden), 0),
                ("mlp.down", (hidden, inner), 1),
            ):
                result += _weight_and_bias(f"layers.{layer}.{name}", shape, cut)
        if last == self.layers:
            result += _weight_and_bias("norm", (hidden,), None)
            if not (self.tied_embeddings and first == 0):
                result.append(Parameter("head.weight", (self.vocab, hidden), vocabulary))
        return result

    @property
    def tied(self) -> Mapping[str, str]:
        return {"head.weight": "embedding.weight"} if self.tied_embeddings else {}

    def untied(self) -> GPT2Model:
        return replace(self, tied_embeddings=False)

    @property
    def tp_sizes(self) -> dict[str, int]:
        names = ["heads", "intermediate", "sequence_length"]
        names += ["vocab"] if self.cuts_vocabulary else []
        return {name: getattr(self, name) for name in names}

    @classmethod
    def sequence_parallel_problem(cls) -> str | None:
        return "a GPT-2's positions are added to whole sequences"

    def selective_recompute_problem(self) -> str | None:
        return "a GPT-2 computes attention again with its whole block, or not at all"

    def documents_problem(self) -> str | None:
        return "a GPT-2's positions count from the begin of a sequence, not of each document"

    def flops_per_token(self) -> float:
        """Returns the FLOPs that a token's forward and backward take; recompute does not count.

        They are counted as in PaLM, appendix B.
        """
        matrices = sum(
            math.prod(parameter.shape)
            for parameter in self.parameters()
            if parameter.name.startswith("layers.") and len(parameter.shape) == 2
        )
        attention = 12 * self.layers * self.hidden * self.sequence_length
        return 6.0 * (matrices + self.vocab * self.hidden) + attention

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
    ) -> GPT2Stage:
        from heteropp.models.gpt2.stage import GPT2Stage

        return GPT2Stage(self, layers, group, device, dtype)

    def initial_values(self, layers: tuple[int, int], seed: int) -> Iterator[tuple[str, Tensor]]:
        for parameter in self.parameters(layers):
            named = replace(parameter, name=self.global_name(parameter.name))
            yield parameter.name, self._initial_value(named, seed)

    def _initial_value(self, parameter: Parameter, seed: int) -> Tensor:
        import torch

        if parameter.name.endswith("norm.weight"):
            return torch.ones(parameter.shape)
        if parameter.name.endswith("bias"):
            return torch.zeros(parameter.shape)
        digest = hashlib.sha256(f"{seed}/{parameter.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        std = 0.02
        if parameter.name.endswith(("attention.output.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * self.layers)  # they add to the residual stream, twice a layer
        return torch.randn(parameter.shape, generator=generator) * std

    def validate(self) -> None:
        super().validate()
        for name in ("heads", "intermediate", "positions"):
            self._validate_size(name)
        if self.hidden % self.heads:
            raise ModelError(f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        if self.sequence_length > self.positions:
            raise ModelError(
                f"sequence_length is {self.sequence_length}; the model learns {self.positions} "
                "positions"
            )
        if not 0 < self.norm_eps < 1:
            raise ModelError(f"norm_eps is {self.norm_eps}; expected a number between 0 and 1")


SPEC = GPT2Model


def _weight_and_bias(name: str, shape: tuple[int, ...], cut: int | None) -> list[Parameter]:
    """Returns a layer's parameters; a bias is cut where its weight's outputs are."""
    return [
        Parameter(f"{name}.weight", shape, cut, decays=len(shape) == 2),
        Parameter(f"{name}.bias", shape[:1], 0 if cut == 0 else None, decays=False),
    ]
