"""A stage of a family's model: the family's own forward over the layers that a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heteropp.layout.parameter import Parameter
from heteropp.models.auxiliary_loss import Routing
from heteropp.models.documents import Documents
from heteropp.models.hugging_face.attention import Masks, given_mask, masked_by, windows_of
from heteropp.models.hugging_face.auxiliary_loss import auxiliary_loss, routers_of
from heteropp.models.hugging_face.family import LAYERS, around, family, shallow
from heteropp.models.hugging_face.layers import CutEmbedding, install
from heteropp.models.parallel.context_parallel import ContextParallelGroup
from heteropp.models.parallel.expert_parallel import ExpertParallelGroup
from heteropp.models.parallel.tensor_parallel import (
    SoloGroup,
    TensorParallelGroup,
    cross_entropy_sum,
    own_rows,
    total,
)
from heteropp.models.parallel.token_context import own_part
from heteropp.models.parallel.token_slices import TokenSlice
from heteropp.models.stage_module import StageModule

if TYPE_CHECKING:
    from heteropp.models.hugging_face.model import HuggingFaceModel


class HuggingFaceStage(StageModule):
    positions: Tensor  # of this rank's tokens of a sequence, [1, length]

    def __init__(
        self,
        model: HuggingFaceModel,
        layers: tuple[int, int],
        group: TensorParallelGroup,
        device: torch.device | str,
        dtype: torch.dtype,
        context: ContextParallelGroup | None = None,
        experts: ExpertParallelGroup | None = None,
    ) -> None:
        super().__init__(model, layers, group)
        self.experts = None if experts is None else experts.parts[experts.index]
        self.tokens = own_part(context, model.sequence_length)  # of a pass, in a sequence
        self.hidden, self.vocab = model.hidden, model.vocab
        found = family(model.config)
        sources = [found.source(kind) for kind in model.order]
        own = {parameter.name: self._held(parameter) for parameter in model.parameters(layers)}

        def held(name: str, like: str) -> nn.Module:
            """Returns this rank's part of a module; like: the name of one that is alike."""
            start = f"{name}."
            mine = {n.removeprefix(start): p for n, p in own.items() if n.startswith(start)}
            kind = (device, dtype, lambda: self.length, model.lora, experts)
            return install(found, found.module(like), f"{like}.", mine, group, *kind)

        names = list(found.first) if self.is_first else []
        names += [*found.last, found.head_name] if self.is_last else []
        parts = {name: held(name, name) for name in names}
        for i in range(*layers):
            layer = held(f"{LAYERS}.{i}", f"{LAYERS}.{sources[i]}")
            for module in layer.modules():
                if hasattr(module, "expert_group"):
                    module.expert_layer = i  # type: ignore[assignment]
            parts[f"{LAYERS}.{i}"] = layer
        for name in names:
            self.add_module(name, parts[name])
        self.layers = nn.ModuleDict({str(i): parts[f"{LAYERS}.{i}"] for i in range(*layers)})
        if self.is_first and self.is_last:
            for name, other in model.tied.items():
                owner, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(owner), leaf, self.get_parameter(other))
        if found.has_auxiliary_loss:
            self.auxiliary_loss = auxiliary_loss(found, sources, model.sequence_length)
            for router in routers_of(found, self.layers):
                router.register_forward_hook(self._routed)
        windows = {window for layer in self.layers.values() for window in windows_of(layer)}
        self.has_windows = any(w is not None and w < model.sequence_length for w in windows)
        fused = model.attention == "fused"
        length = model.sequence_length
        self.masks = Masks(windows, length, device, dtype, fused=fused, context=context)
        positions = torch.arange(*self.tokens, device="cpu").unsqueeze(0)
        self.register_buffer("positions", positions.to(device), persistent=False)
        whole = shallow(found.model)
        setattr(whole, found.model.base_model_prefix, around(found, parts, sources, device))
        if self.is_last:
            setattr(whole, found.head_name, parts[found.head_name])
        self.whole = (whole,)  # in a tuple, as what is held has its names above

    @property
    def length(self) -> int:
        """The tokens that a pass has of each sequence."""
        first, last = self.tokens
        return last - first

    def _held(self, parameter: Parameter) -> Parameter:
        """Returns a parameter as this rank's tensor-parallel group holds it."""
        if (rows := self.rows_of(parameter)) is None:
            return parameter
        first, last = rows
        return replace(parameter, shape=(last - first, *parameter.shape[1:]))

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Documents | None = None,
        part: TokenSlice | None = None,
    ) -> Tensor:
        (model,) = self.whole
        self.masks.begin(documents, part)
        self.tokens = first, last = self.masks.tokens
        positions = self.positions if part is None else self.positions[:, first:last]
        if documents is not None:
            positions = documents.positions(last)[:, first:]
        given: dict[str, Any] = {"position_ids": positions, "use_cache": False}
        if (mask := given_mask(model.config, self.masks)) is not None:
            given["attention_mask"] = mask
        if self.auxiliary_loss is not None:
            given["output_router_logits"] = False  # the family's own needs the layers of all stages
        given |= self._entering(x)
        with masked_by(self.masks):
            if not self.is_last:
                base = model.get_submodule(model.base_model_prefix)
                return base(**given).last_hidden_state.reshape(-1, self.hidden)
            assert targets is not None
            logits = model(**given).logits
        return self._loss(logits.reshape(-1, logits.shape[-1]), targets)

    def new_routing(self, sequences: int) -> Routing:
        assert self.auxiliary_loss is not None
        part = 1 / self.group.size if self.group.sequence_parallel else 1.0
        wide = getattr(torch, self.model.wide_dtype)
        return Routing(self.auxiliary_loss, sequences, part, self.positions, wide)

    def _routed(self, _: nn.Module, __: Any, result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, weights, *chosen = result
        routing = self.routing or self.new_routing(1)  # of a forward that is only traced
        return (logits, routing.passed(weights, logits), *chosen)

    def count_expert_loads(self) -> None:
        biases = [
            p for p in self.model.parameters(self.layer_range) if self.model.is_expert_bias(p)
        ]
        for bias in biases:
            layer = self.layers[bias.name.split(".")[1]]
            (experts,) = (m for n, m in layer.named_modules() if n.endswith(".experts"))
            counts = torch.zeros(
                self.model.expert_count, dtype=torch.int64, device=self.positions.device
            )
            self.expert_loads[bias.name] = counts
            experts.register_forward_pre_hook(_counting(counts), with_kwargs=True)

    def _entering(self, x: Tensor) -> dict[str, Tensor]:
        """Returns tokens or activations as sequences, or a rank's own rows as if they were one."""
        has_own = self.group.sequence_parallel
        if not self.is_first:
            length = len(x) if has_own else self.length
            return {"inputs_embeds": x.view(-1, length, self.hidden)}
        table = self.whole[0].get_input_embeddings()
        if has_own and not isinstance(table, CutEmbedding):
            return {"input_ids": own_rows(x, self.group).unsqueeze(0)}
        return {"input_ids": x.view(-1, self.length)}

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if logits.shape[-1] != self.vocab:
            return cross_entropy_sum(logits, targets, self.group)
        if not self.group.sequence_parallel:
            return cross_entropy_sum(logits, targets, SoloGroup())
        loss = cross_entropy_sum(logits, own_rows(targets, self.group), SoloGroup())
        return total(loss, self.group)


def _counting(counts: Tensor) -> Callable[..., None]:
    """Returns a hook of experts that counts the rows which come to each."""

    def count(_: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        if torch.is_grad_enabled():
            chosen = named["top_k_index"] if "top_k_index" in named else given[1]
            counts.add_(torch.bincount(chosen.flatten(), minlength=len(counts)))

    return count
