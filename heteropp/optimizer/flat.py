"""The parameters of a ministage, and their gradients, each in one flat buffer."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from heteropp.layout.flat_buffer import Entry, Experts, Layout, layout
from heteropp.models.stage_module import StageModule


class FlatBuffers:
    """The parameters and gradients of a ministage as one rank holds them.

    Backwards add to the gradients; a model of 16 bits sums them in float32.
    """

    def __init__(
        self,
        module: StageModule,
        shards: int = 1,
        *,
        gradients: bool = True,
        experts: Experts = "all",
    ) -> None:
        """Moves a module's parameters into a buffer that can be cut into equal shards.

        What is frozen stands at its end, and has no gradient. experts: which parameters these are.
        """
        tp = module.group
        self.module = module
        self.layout: Layout = layout(
            module.model, module.layer_range, tp.size, tp.index, shards, experts
        )
        self.parameters = dict(module.named_parameters())
        example = next(iter(self.parameters.values()))
        self.mixed = example.dtype.itemsize == 2
        self.wide = torch.float32 if self.mixed else example.dtype
        self.values = torch.zeros(
            self.layout.whole_size, dtype=example.dtype, device=example.device
        )
        self._adopt()
        self.gradients: Tensor | None = self._empty_gradients() if gradients else None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of what trains."""
        return self.layout.entries

    def begin(self) -> None:
        """Zeroes the gradients, or allocates them, before the first backward of a step."""
        if self.gradients is None:
            self.gradients = self._empty_gradients()
        else:
            self.gradients.zero_()

    @torch.no_grad()
    def add_expert_loads(self) -> None:
        """Adds what the module's routers have counted to the gradients of their biases, which are
        summed as any: for each expert how far it is above the mean load, times the number of
        experts, which makes it a whole number. The module then counts from 0 on.
        """
        for entry in self.entries:
            if (counts := self.module.expert_loads.get(entry.name)) is not None:
                assert self.gradients is not None
                self.gradients[entry.first : entry.last] += counts * len(counts) - counts.sum()
                counts.zero_()

    def _adopt(self) -> None:
        """Makes every parameter a view of the flat buffer."""
        for entry in (*self.entries, *self.layout.frozen):
            parameter = self.parameters[entry.name]
            assert parameter.requires_grad == entry.parameter.trains, entry.name
            view = self.values[entry.first : entry.last].view(parameter.shape)
            view.copy_(parameter.data)
            place(parameter, view)
            if self.mixed and entry.parameter.trains:
                parameter.register_post_accumulate_grad_hook(self._adder(entry))

    def _adder(self, entry: Entry) -> Callable[[Tensor], None]:
        owner = weakref.ref(self)  # a cycle through the parameter's hook would never be freed

        def add(parameter: Tensor) -> None:
            if parameter.grad is None:  # put off, for W to add
                return
            flat = owner()
            assert flat is not None and flat.gradients is not None
            flat.gradients[entry.first : entry.last].view(parameter.shape).add_(parameter.grad)
            parameter.grad = None

        return add

    def _empty_gradients(self) -> Tensor:
        """Returns zeros that the backward adds to.

        Every parameter's gradient is a view of them; a model of 16 bits adds through hooks instead.
        """
        gradients = torch.zeros(self.layout.size, dtype=self.wide, device=self.values.device)
        if not self.mixed:
            for entry in self.entries:
                parameter = self.parameters[entry.name]
                parameter.grad = gradients[entry.first : entry.last].view(parameter.shape)
        return gradients

    def _let_gradients_go(self) -> None:
        self.gradients = None
        for entry in self.entries:
            self.parameters[entry.name].grad = None


def place(parameter: Tensor, view: Tensor) -> None:
    """Makes a parameter, which stays the same object, a view of the flat buffer.

    Devices whose tensors are Python's own ignore an assignment to `data`, and their plugins say so
    to torch, which then swaps parameters as modules move.
    """
    if torch.__future__.get_swap_module_params_on_conversion():
        moved = torch.nn.Parameter(view, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, moved)
    else:
        parameter.data = view
