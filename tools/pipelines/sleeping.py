"""Stages that sleep where others compute, and send boundary tensors of any size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from heteropp.description.plan import Plan
from heteropp.models.documents import Documents
from heteropp.models.llama.model import LlamaModel
from heteropp.models.llama.stage import LlamaStage
from heteropp.models.parallel.backward import linear
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.parallel.token_slices import TokenSlice
from heteropp.models.stage_module import StageModule
from heteropp.runtime.measuring.metrics import HostClock
from heteropp.runtime.ranks.transport import Coordinates, connect

ROWS = 512  # of a boundary tensor


def sleeping_model(layers: int, boundary_bytes: int) -> LlamaModel:
    """Its hidden size makes boundary tensors as large as that, one sequence of ROWS each."""
    return LlamaModel(
        name="sleeping",
        layers=layers,
        hidden=boundary_bytes // ROWS // 4,
        heads=1,
        kv_heads=1,
        intermediate=1,
        vocab=8,
        sequence_length=ROWS,
    )


class _Sleep(torch.autograd.Function):
    """A copy, each way in no less than so many seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weighed: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, weighed.shape
        end_s = time.monotonic() + seconds
        copied = x.detach().clone()
        _sleep_until(end_s)
        return copied

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        end_s = time.monotonic() + ctx.seconds
        copied = gradient.clone()
        _sleep_until(end_s)
        return copied, gradient.new_ones(ctx.shape), None


class SleepingStage(LlamaStage):
    """F, I and W sleep, W where the gradient of the one weight is added up."""

    def __init__(self, model: LlamaModel, layers: tuple[int, int], seconds: float) -> None:
        super().__init__(
            replace(model, hidden=2),
            layers,
            SoloGroup(),
            "cpu",
            torch.float32,
            selective_recompute=False,
            seed=0,
        )
        self.initialise(seed=0)
        self.weight = torch.zeros(1, 1, requires_grad=True)  # no parameter, and is never updated
        self.weight.register_post_accumulate_grad_hook(self._weigh)
        self.seconds = seconds
        self.shape = (model.sequence_length, model.hidden)
        self.one = torch.ones(1, 1)

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        first_row: int = 0,
        documents: Documents | None = None,
        part: TokenSlice | None = None,
    ) -> Tensor:
        if self.is_first:
            x = torch.zeros(self.shape)
        y = _Sleep.apply(x, linear(self.one, self.weight), self.seconds)
        return y.sum() if self.is_last else y

    def _weigh(self, weight: Tensor) -> None:
        if weight.grad is not None:  # what is put off comes without one first
            weight.grad = None
            time.sleep(self.seconds)


def _sleep_until(end_s: float) -> None:
    time.sleep(max(0.0, end_s - time.monotonic()))


class SleepingRank:
    """Our 1F1B and torch's, with a boundary of each size."""

    def __init__(
        self,
        stages: int,
        micro_batches: int,
        boundaries: Sequence[int],
        action_s: float,
        backend: str,
        rank: int,
        store: Any,
    ) -> None:
        from pipelines.stages import OurPipeline, even_plan, tokens
        from pipelines.torch_pipelining import TorchPipelining

        if backend == "dicomm":
            import dicomm.distributed  # noqa: F401
        connect(store, rank, stages, backend)
        host = torch.device("cpu")
        self.made: dict[tuple[str, int], TorchPipelining | OurPipeline] = {}
        for size_bytes in boundaries:
            plan = even_plan(sleeping_model(stages, size_bytes), "1f1b", stages, micro_batches, 1)
            place = Coordinates.of(plan, rank)

            def held(plan: Plan = plan, place: Coordinates = place) -> list[StageModule]:
                return [SleepingStage(plan.model, layers, action_s) for layers in place.layers]

            self.made["ours", size_bytes] = OurPipeline(plan, place, held(), HostClock())
            self.made["torch", size_bytes] = TorchPipelining(plan, held(), *tokens(plan, host))

    def step(self, who: str, size_bytes: int) -> float:
        """Runs a step and returns its seconds."""
        dist.barrier()
        start_s = time.perf_counter()
        self.made[who, size_bytes].step()
        dist.barrier()
        return time.perf_counter() - start_s
