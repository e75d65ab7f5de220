"""torch.compile: inductor generates code for a list of devices."""

from __future__ import annotations

import functools
from typing import Any

import torch


def teach_inductor(module: Any, device: torch.device) -> None:
    """Inductor's own answer to a device without a code generator is a KeyError of its name."""
    compile_graph = module.compile_fx

    @functools.wraps(compile_graph)
    def compile_fx(graph: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        nodes = getattr(getattr(graph, "graph", None), "nodes", ())
        values = (node.meta.get("example_value") for node in nodes)
        if any(isinstance(v, torch.Tensor) and v.device.type == device.type for v in values):
            raise NotImplementedError(
                f"inductor, torch.compile's default backend, generates no code for {device.type}: "
                'use torch.compile(..., backend="aot_eager"), or "eager"'
            )
        return compile_graph(graph, inputs, *rest, **named)

    module.compile_fx = compile_fx
