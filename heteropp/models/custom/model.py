"""A model that a user wrote, as plans contain it: names, shapes and cuts, and where its code is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict

from heteropp.models.parted import PartedModel
from heteropp.models.spec import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from heteropp.models.custom.stage import CustomStage
    from heteropp.models.parallel.context_parallel import ContextParallelGroup
    from heteropp.models.parallel.expert_parallel import ExpertParallelGroup
    from heteropp.models.parallel.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, kw_only=True)
class CustomModel(PartedModel):
    """A model that a user's own code defines; plans with it are read without running that code."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    family: Literal["custom"] = "custom"
    source: str  # file and function that define the model: "/path/of/file.py:function"
    code_sha256: str  # SHA-256 of the files in which the parts are written
    is_cut: bool = False  # whether the definition says how weights are cut; otherwise tp is 1

    def identity(self) -> dict[str, Any]:
        left_out = ("source", "code_sha256")  # the code may move, and be mended
        return {key: value for key, value in asdict(self).items() if key not in left_out}

    def tp_problem(self, tp: int) -> str | None:
        if tp > 1 and not self.is_cut:
            return (
                f"tensor-parallel degree {tp} needs a definition that says how weights are cut; "
                f"{self.name}'s does not"
            )
        return super().tp_problem(tp)

    @classmethod
    def sequence_parallel_problem(cls) -> str | None:
        return "a user's own modules see whole sequences"

    def selective_recompute_problem(self) -> str | None:
        return "a user's own modules do not say what attention's scores are"

    def documents_problem(self) -> str | None:
        return "a user's own modules do not keep a sequence's documents apart"

    def training_problem(self) -> str | None:
        """Says in a clause that the code is not there, or is another model's."""
        from heteropp.models.custom.reading import read

        try:
            found = read(self.source)
        except ModelError as error:
            return str(error)
        names = ("hidden", "vocab", "sequence_length", "order", "parts", "tied_names")
        for name in names:
            if getattr(found, name) != getattr(self, name):
                return f"{self.source} now defines a model with another {name}"
        return None

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
    ) -> CustomStage:
        from heteropp.models.custom.source import definition_at
        from heteropp.models.custom.stage import CustomStage

        return CustomStage(self, definition_at(self.source), layers, group, device, dtype)

    def initial_values(self, layers: tuple[int, int], seed: int) -> Iterator[tuple[str, Tensor]]:
        from heteropp.models.custom.parts import initialised
        from heteropp.models.custom.source import definition_at

        definition = definition_at(self.source)
        wanted = {self.global_name(p.name): p.name for p in self.parameters(layers)}
        held = [(f"layers.{i}", self.order[i]) for i in range(*layers)]
        for part in ("embedding", "head"):
            if any(name.startswith(f"{part}.") for name in wanted):
                held.append((part, part))
        for prefix, part in held:
            module = initialised(definition.makes()[part], prefix, seed)
            for name, value in module.named_parameters():
                if (own := wanted.get(f"{prefix}.{name}")) is not None:
                    yield own, value.detach()


SPEC = CustomModel
