"""Models that plans contain as tables: each part's parameters and cuts, and the order of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Self

from pydantic import ConfigDict

from heteropp.layout.parameter import Parameter
from heteropp.models.spec import ModelError, ModelSpec


@dataclass(frozen=True)
class Part:
    """The parameters of an embedding, a kind of block, or a head, by their names in it."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    name: str  # "embedding", "head", or the kind of a block
    parameters: tuple[Parameter, ...]  # its parameters, in order


@dataclass(frozen=True, kw_only=True)
class PartedModel(ModelSpec):
    """A model of which a plan says all that needs no code."""

    order: tuple[str, ...]  # the kind of each block, from the first to the last
    parts: tuple[Part, ...]  # the parameters of embedding, head and each kind of block
    tied_names: tuple[tuple[str, str], ...] = ()  # pairs of names: a tied parameter, its original
    tp_divides: tuple[tuple[str, int], ...] = ()  # pairs of a name and a size that tp must divide

    # how the parameters of the embedding and of the head are called before their names there
    first_prefix = "embedding."
    last_prefix = "head."

    @cached_property
    def _of_part(self) -> dict[str, tuple[Parameter, ...]]:
        return {part.name: part.parameters for part in self.parts}

    def parameters(self, layers: tuple[int, int] | None = None) -> list[Parameter]:
        first, last = layers or (0, self.layers)
        held = [(self.first_prefix, "embedding")] if first == 0 else []
        held += [(f"layers.{i}.", self.order[i]) for i in range(first, last)]
        held += [(self.last_prefix, "head")] if last == self.layers else []
        tied = self.tied if first == 0 and last == self.layers else {}
        return [
            replace(parameter, name=f"{prefix}{parameter.name}")
            for prefix, part in held
            for parameter in self._of_part[part]
            if f"{prefix}{parameter.name}" not in tied
        ]

    @property
    def tied(self) -> Mapping[str, str]:
        return dict(self.tied_names)

    def untied(self) -> Self:
        return replace(self, tied_names=())

    def block_kind(self, layer: int) -> str:
        return self.order[layer]

    def repeated(self, kind: str, layers: int) -> Self:
        return replace(self, order=(kind,) * layers, layers=layers)

    def cost_key(self) -> dict[str, Any]:
        left_out = ("name", "layers", "order")
        return {key: value for key, value in asdict(self).items() if key not in left_out}

    @property
    def tp_sizes(self) -> dict[str, int]:
        sizes = {"sequence_length": self.sequence_length, **dict(self.tp_divides)}
        for part in self.parts:
            for parameter in part.parameters:
                if parameter.split_dimension is not None:
                    whole = (parameter.shape[parameter.split_dimension],)
                    for i, size in enumerate(parameter.packed or whole):
                        piece = f"[{i}]" if parameter.packed else ""
                        sizes[f"{part.name}.{parameter.name}{piece}"] = size
        return sizes

    @property
    def has_frozen_weights(self) -> bool:
        """Whether some of the matrices that the model computes with do not train."""
        return False

    def flops_per_token(self) -> float:
        """Returns the FLOPs that a token's forward and backward take, as torch counts a forward's.

        A backward takes twice as many; recompute does not count, nor does what a kernel of
        attention leaves out.
        """
        return self._flops_per_token

    @cached_property
    def _flops_per_token(self) -> float:
        import torch
        from torch.utils.flop_counter import FlopCounterMode

        from heteropp.models.masked_flops import MaskedFlops
        from heteropp.models.parallel.tensor_parallel import SoloGroup

        group, length = SoloGroup(), self.sequence_length
        tokens = torch.zeros(length, dtype=torch.int64, device="meta")

        def flops(*kinds: str) -> float:
            model = replace(self, order=kinds, layers=len(kinds))
            module = model.build((0, len(kinds)), group, "meta", getattr(torch, self.dtype))
            with (
                FlopCounterMode(display=False) as counter,
                torch.device("meta"),
                MaskedFlops() as masked,
            ):
                loss = module(tokens, tokens)
                if not self.has_frozen_weights:
                    return 3.0 * (counter.get_total_flops() - masked.total)
                loss.backward()  # of frozen weights there are no gradients
            return float(counter.get_total_flops() - 3 * masked.total)

        first = self.order[0]
        ends = 2 * flops(first) - flops(first, first)
        each = {kind: flops(kind) - ends for kind in set(self.order)}
        return (ends + sum(each[kind] for kind in self.order)) / length

    def validate(self) -> None:
        super().validate()
        if len(self.order) != self.layers:
            raise ModelError(f"order has {len(self.order)} blocks; layers is {self.layers}")
        names = {part.name for part in self.parts}
        for name in ("embedding", "head", *self.order):
            if name not in names:
                raise ModelError(f"parts has no {name}")
        for part in self.parts:
            for parameter in part.parameters:
                if problem := parameter.problem():
                    raise ModelError(f"part {part.name}: parameter {parameter.name} has {problem}")
        ends = {f"{self.first_prefix}{p.name}" for p in self._of_part["embedding"]}
        ends |= {f"{self.last_prefix}{p.name}" for p in self._of_part["head"]}
        for name in (name for pair in self.tied_names for name in pair):
            if name not in ends:
                raise ModelError(
                    f"tied_names has {name}; expected parameters of the embedding and the head"
                )
