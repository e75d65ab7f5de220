"""One rank of test_precision_tools.py's job: overflows that travel between ranks, over gloo."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as traced

from ditorch.precision import Cast, Fallback, FindOverflow, MeasureTime, place
from ditorch.precision.overflow import first_of_all_ranks
from ditorch.precision.results import Findings, read_findings

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])


def watch(name: str, work: object) -> list[Findings]:
    """The overflows of all ranks while each does `work()`."""
    with FindOverflow(output=FOLDER / name) as overflow:
        work()  # type: ignore[operator]
    dist.barrier()
    found = [read_findings(FOLDER / name / f"overflow-rank{rank}.json") for rank in range(2)]
    assert found[RANK] == overflow.findings().model_copy(update={"steps": found[RANK].steps})
    return found


def operators(findings: Findings) -> list[str]:
    return [each.where.operator for each in findings.overflows]


def one_rank_overflows() -> None:
    values = torch.full((1000,), 100.0 if RANK == 1 else 1.0, dtype=torch.float16)
    total = values.sum().float().reshape(1)
    dist.all_reduce(total)
    total * 2


def the_sum_overflows() -> None:
    dist.all_reduce(torch.full((4,), 40000.0, dtype=torch.float16))


def asynchronously() -> None:
    total = torch.full((4,), float("nan") if RANK == 1 else 1.0)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    gathered = [torch.full((1,), float("nan")) for _ in range(2)]  # written only
    dist.all_gather(gathered, torch.ones(1))


def messages() -> None:
    """Both ranks ask to receive before they send: waiting for either would hold both for ever."""
    place.next_step()
    sent = torch.ones(2) / (0 if RANK == 1 else 1)
    received = torch.full((2,), float("nan"))
    first = dist.irecv(received, 1 - RANK)
    dist.isend(sent, 1 - RANK).wait()
    first.wait()
    received + 1


def traced_collectives() -> None:
    total = traced.all_reduce(
        torch.full((4,), 40000.0, dtype=torch.float16), "sum", dist.group.WORLD
    )
    total + 1


def data_parallel() -> None:
    """Gradients are summed by autograd's hooks, on threads of their own."""
    linear = nn.Linear(4, 4)
    nn.init.ones_(linear.weight)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(linear, nn.ReLU()))
    with MeasureTime() as timed:
        model(torch.full((1, 4), 3e38 if RANK == 1 else 1.0)).sum().backward()
    calls = {each.operator: each.calls for each in timed.findings().times}
    assert calls["c10d.allreduce_.default"] == 1 and calls["aten.addmm.default"] == 1


def main() -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(FOLDER / "store"), 2),
        rank=RANK,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    found = watch("one", one_rank_overflows)
    assert operators(found[1]) == ["aten.sum.default"]
    assert operators(found[0]) == ["c10d.allreduce_.default"]
    assert "another rank's" in found[0].first_bad_reason
    first = first_of_all_ranks(found)
    assert first is not None
    assert (first.where.rank, first.where.operator) == (1, "aten.sum.default")

    found = watch("sum", the_sum_overflows)
    assert [operators(each) for each in found] == [["c10d.allreduce_.default"]] * 2
    first = first_of_all_ranks(found)
    assert first is not None and first.kind == "inf" and first.tensor == "tensors.0"

    found = watch("async", asynchronously)
    assert [operators(each) for each in found] == [["c10d.allreduce_.default"], []]

    found = watch("messages", messages)
    assert [operators(each) for each in found] == [["c10d.recv_.default"], ["aten.div.Tensor"]]
    assert found[0].overflows[0].where.step == 1
    first = first_of_all_ranks(found)
    assert first is not None and first.where.rank == 1

    found = watch("traced", traced_collectives)
    assert [operators(each) for each in found] == [["_c10d_functional.all_reduce.default"]] * 2

    found = watch("data parallel", data_parallel)
    first = first_of_all_ranks(found)
    assert first is not None and first.where.rank == 1
    assert (first.where.operator, first.where.module) == ("aten.addmm.default", "0")

    for tool in (Fallback, Cast):
        total = torch.ones(1)
        with tool(operators="*"):
            dist.all_reduce(total)
        assert total == 2
        try:
            with tool(operators="allreduce*"):
                dist.all_reduce(total)
        except RuntimeError as error:
            assert "c10d.allreduce_.default" in str(error) and "communicates" in str(error)
        else:
            raise AssertionError("a collective was not refused")
    dist.destroy_process_group()
    assert place.rank() == RANK


if __name__ == "__main__":
    main()
