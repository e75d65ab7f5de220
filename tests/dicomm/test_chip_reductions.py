"""Reductions of tensors in the memory of one vendor's chips in a host: the chips do them.

The chip is the asynchronous one, whose memory the host cannot touch; it counts what it copies to
the host. What a single process makes of all ranks' tensors is the truth, bit for bit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import reduce
from random import Random
from typing import Any

import async_chip
import pytest
import test_distributed_async
import torch
import torch.distributed as dist
from ranks import Processes, run_processes
from sampled import sampled
from test_chip_memory import environment, join
from test_distributed_async import Bench, all_reduce, reduce_scatter
from torch import Tensor

import dicomm.distributed

Op = dist.ReduceOp
LONG = 270_001  # elements of four bytes, which is long enough, and not a multiple of anything
PIECES = 3 * 2**20 + 7  # elements that a chip does not reduce in one piece
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BITS = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
WHOLE = {Op.SUM: torch.add, Op.PRODUCT: torch.mul, Op.MIN: torch.minimum, Op.MAX: torch.maximum}
REDUCED = [
    *((dtype, op) for dtype in FLOATS for op in (*WHOLE, Op.AVG)),
    *((dtype, op) for dtype in (*INTEGERS, torch.bool) for op in (*WHOLE, *BITS)),
    *((dtype, op) for dtype in (torch.complex64, torch.complex128) for op in (Op.SUM, Op.AVG)),
]


def given(rank: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype in (*INTEGERS, torch.bool):
        return torch.randint(-128, 128, (count,), generator=generator).to(dtype)
    real = torch.randn(count, generator=generator)
    if dtype.is_complex:
        return torch.complex(real, torch.randn(count, generator=generator)).to(dtype)
    real[::1001] = torch.nan
    return real.to(dtype)


def alone(tensors: list[Tensor], op: Any = Op.SUM) -> Tensor:
    """The same by one process, 16-bit floats in float32."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = reduce((BITS | WHOLE).get(op, torch.add), [tensor.to(wide) for tensor in tensors])
    if op == Op.AVG:
        numbers = torch.view_as_real(total) if total.is_complex() else total
        numbers /= len(tensors)
    return total.to(dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    found = found.cpu()
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def copied_to_host(function: Callable[[], object]) -> int:
    before, _ = async_chip.copies_to_host()
    function()
    return async_chip.copies_to_host()[0] - before


def every_type(rank: int, size: int, cases: list[tuple[torch.dtype, Any]]) -> list[str]:
    """What went wrong."""
    device, group = join()
    wrong = []
    for dtype, op in cases:
        inputs = [given(r, 4 * LONG // dtype.itemsize, dtype) for r in range(size)]
        tensor = inputs[rank].to(device)
        dist.all_reduce(tensor, op, group=group)
        if not same(tensor, alone(inputs, op)):
            wrong.append(f"{dtype} {op}")
    return wrong


@pytest.mark.parametrize(
    ("size", "cases"), sampled([(n, REDUCED[first::5]) for first in range(5) for n in (3, 2)], 10)
)
def test_every_type_is_reduced_as_by_one_process(size: int, cases: list[Any]) -> None:
    assert run_processes(size, every_type, size, cases, environment=environment()) == [[]] * size


def every_reduction(rank: int, size: int) -> int:
    """How many copies to the host the collectives made."""
    device, group = join()
    copies = 0

    def check(call: Callable[[], object], *pairs: tuple[Tensor, Tensor]) -> None:
        nonlocal copies
        copies += copied_to_host(call)
        for number, (found, expected) in enumerate(pairs):
            assert same(found, expected), number

    inputs = [given(r, PIECES) for r in range(size)]
    tensor = inputs[rank].to(device)
    check(lambda: dist.all_reduce(tensor, group=group), (tensor, alone(inputs)))

    inputs = [given(r, 2 * LONG, torch.bfloat16) for r in range(size)]
    tensor = inputs[rank].to(device)
    check(
        lambda: dist.reduce(tensor, size - 1, Op.AVG, group=group),
        (tensor, alone(inputs, Op.AVG) if rank == size - 1 else inputs[rank]),
    )

    lengths = [LONG, 0, 5, 3 * LONG][:size]
    inputs = [given(r, sum(lengths)) for r in range(size)]
    parts = [part.to(device) for part in inputs[rank].split(lengths)]
    target = torch.zeros(lengths[rank], device=device)
    expected = alone(inputs).split(lengths)[rank]
    check(lambda: dist.reduce_scatter(target, parts, group=group), (target, expected))
    for part, kept in zip(parts, inputs[rank].split(lengths), strict=True):
        assert same(part, kept)

    inputs = [given(r, size * LONG) for r in range(size)]
    tensor, target = inputs[rank].to(device), torch.zeros(LONG, device=device)
    expected = alone(inputs).chunk(size)[rank]
    check(lambda: dist.reduce_scatter_tensor(target, tensor, group=group), (target, expected))
    assert same(tensor, inputs[rank])

    lists = [[given(r, n, seed=n) for n in (3, LONG, 0, 1000)] for r in range(size)]
    tensors = [tensor.to(device) for tensor in lists[rank]]
    totals = [alone(list(of_one)) for of_one in zip(*lists, strict=True)]

    def coalesced() -> None:
        with dist._coalescing_manager(group, torch.device(device), async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
        manager.wait()

    check(coalesced, *zip(tensors, totals, strict=True))

    inputs = [given(r, 600 * 500) for r in range(size)]
    columns = inputs[rank].to(device).view(600, 500).t()
    check(
        lambda: dist.all_reduce(columns, group=group), (columns, alone(inputs).view(600, 500).t())
    )
    step = torch.zeros(2 * LONG, device=device)[::2]
    step += rank + 1
    check(
        lambda: dist.all_reduce(step, group=group),
        (step, torch.full((LONG,), float(size * (size + 1) // 2))),
    )
    with torch.inference_mode():
        strange = inputs[rank].to(device).view(600, 500).t()
        work: Any = dist.all_reduce(strange, group=group, async_op=True)
    check(work.wait, (strange, alone(inputs).view(600, 500).t()))
    weight = torch.nn.Parameter(inputs[rank].to(device))
    check(lambda: dist.all_reduce(weight, group=group), (weight.detach(), alone(inputs)))
    return copies


@pytest.mark.parametrize("size", sampled([3, 2, 4], 1, everyday=1))
def test_the_host_copies_nothing(size: int) -> None:
    found = run_processes(size, every_reduction, size, environment=environment())
    assert found == [0] * size


def views(rank: int) -> None:
    """Tensors whose memory is not their elements, or not theirs alone."""
    device, group = join()
    backend = group._get_backend(torch.device(device))  # torch resolves some views before it calls
    inputs = [given(r, 2 * LONG, torch.complex64) for r in range(2)]
    conjugate, target = inputs[rank].to(device).conj(), torch.zeros(LONG, device=device) + 0j
    backend._reduce_scatter_base(target, conjugate).wait()
    assert same(target, alone(inputs).conj().resolve_conj().chunk(2)[rank])

    inputs = [given(r, LONG) for r in range(2)]
    negative = torch._neg_view(-inputs[rank].to(device))
    largest = dist.AllreduceOptions()
    largest.reduceOp = Op.MAX
    backend.allreduce([negative], largest).wait()
    assert same(negative, alone(inputs, Op.MAX))

    origin = inputs[rank].to(device)
    shared = torch._lazy_clone(origin)
    dist.all_reduce(shared, group=group)
    assert same(shared, alone(inputs)) and same(origin, inputs[rank])


def test_views_and_shared_memory() -> None:
    run_processes(2, views, environment=environment())


def in_order(rank: int, seed: int) -> list[str]:
    """What went wrong where chips are late: older work writes to the tensors, newer overwrites."""
    test_distributed_async.SMALL = LONG
    device, group = join()
    host = dist.new_group(backend="gloo")
    wrong = []
    for case in (all_reduce, test_distributed_async.reduce, reduce_scatter, handed_over):
        expected = case(Bench("cpu", host, seed))
        found = case(Bench(device, group, seed))
        wrong += [
            case.__name__ for a, b in zip(found, expected, strict=True) if not torch.equal(a, b)
        ]
    return wrong


def handed_over(bench: Bench) -> list[Tensor]:
    """The call returns while older work still holds the chip, and a callback reads the result."""
    tensor, columns = bench.given(LONG, 600 * 500, until_read=True)
    work = dist.all_reduce(tensor, group=bench.group, async_op=True)
    other = dist.all_reduce(columns.view(600, 500).t(), group=bench.group, async_op=True)
    if bench.device != "cpu":
        assert not work.is_completed()
        async_chip.release()
    doubled = work.get_future().then(lambda future: 2 * future.value()[0]).wait()
    other.wait()
    return bench.read(tensor, columns, doubled)


@pytest.mark.parametrize("seed", sampled([1, 2], 1, everyday=1))
def test_reductions_keep_the_order_of_streams(seed: int) -> None:
    chip = environment(seed, delay_us=2000)
    assert run_processes(2, in_order, seed, environment=chip) == [[], []]


def other_ways(rank: int, shares: list[bool]) -> int:
    """Reductions that the chips cannot do, as one of them at least does not reach all memory."""
    device, group = join(shares[rank])
    inputs = [given(r, LONG) for r in range(2)]
    for where in ([device, device], ["cpu", device], [device, "cpu"], ["cpu", "cpu"]):
        tensor = inputs[rank].to(where[rank], copy=True)
        dist.all_reduce(tensor, group=group)
        assert same(tensor, alone(inputs)), where
        whole = torch.cat([inputs[rank]] * 2).to(where[rank])
        target = torch.zeros(LONG, device=where[rank])
        dist.reduce_scatter_tensor(target, whole, group=group)
        assert same(target, alone(inputs)), where
        columns = inputs[rank][: 600 * 450].view(600, 450).to(where[rank], copy=True).t()
        dist.all_reduce(columns, group=group)
        assert same(columns, alone(inputs)[: 600 * 450].view(600, 450).t()), where
    return async_chip.imports()[0]


@pytest.mark.parametrize(
    ("shares", "imports"), [([True, True], "1"), ([True, True], "0"), ([True, False], "1")]
)
def test_where_no_chip_can_reduce_the_host_does(shares: list[bool], imports: str) -> None:
    chip = environment(ASYNC_CHIP_IMPORTS=imports)
    for imported in run_processes(2, other_ways, shares, environment=chip):
        assert (imported > 0) == (all(shares) and imports == "1")


def only_one_cannot(rank: int) -> None:
    os.environ["ASYNC_CHIP_IMPORTS"] = str(int(rank == 0))  # read at the first import
    device, group = join()
    inputs = [given(r, LONG) for r in range(3)]
    for _ in range(2):
        tensor = inputs[rank].to(device)
        dist.all_reduce(tensor, group=group)
        assert same(tensor, alone(inputs))


def test_one_chip_that_cannot_is_heard_by_all() -> None:
    run_processes(3, only_one_cannot, environment=environment())


def overlapping(rank: int) -> None:
    """Tensors with memory in common, of one rank only: what the host made of them before."""
    device, group = join()
    inputs = [given(r, 2 * LONG) for r in range(2)]
    tensor = inputs[rank].to(device)
    for place in range(2):  # into the rank's own part of the input, and into the other's
        whole = tensor.clone()
        dist.reduce_scatter_tensor(whole.chunk(2)[rank ^ place], whole, group=group)
        expected = inputs[rank].clone()
        expected.chunk(2)[rank ^ place].copy_(alone(inputs).chunk(2)[rank])
        assert same(whole, expected), place
    works = [torch.zeros(LONG, device=device) for _ in range(2)] if rank else [tensor[:LONG]] * 2
    if rank:
        for each in works:
            each.copy_(tensor[:LONG])
    dist.all_reduce_coalesced(works, group=group)
    for each in works:
        assert same(each, alone([values[:LONG] for values in inputs]))


def test_tensors_that_overlap() -> None:
    run_processes(2, overlapping, environment=environment())


def of_other_lengths(rank: int, lengths: list[int]) -> None:
    device, group = join()
    dist.all_reduce(torch.zeros(lengths[rank], device=device), group=group)


@pytest.mark.parametrize("lengths", [[LONG, LONG + 1], [10, LONG]])
def test_ranks_that_disagree_on_the_length(lengths: list[int]) -> None:
    processes = Processes(2, of_other_lengths, lengths, environment=environment())
    texts = [text for succeeded, text in processes.outcomes().values() if not succeeded]
    assert len(texts) == 2 and all("bytes" in text for text in texts), texts
    assert any("the ranks disagree on the sizes" in text for text in texts), texts


def behind_a_stuck_chip(rank: int) -> str:
    device, group = join(timeout_s=3)
    tensor = torch.ones(LONG, device=device)
    dist.all_reduce(tensor, group=group)
    if rank == 0:
        async_chip.hold(20_000)
        tensor.add_(1)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(tensor, group=group)
    if rank == 0:
        async_chip.release()
    return str(caught.value)


def test_a_chip_that_never_gets_there_is_waited_for_no_longer_than_the_timeout() -> None:
    first, second = run_processes(2, behind_a_stuck_chip, environment=environment())
    assert "Timed out" in first or "rank 1" in first
    assert "Timed out" in second or "rank 0" in second


def ever_new_memory(rank: int) -> int:
    device, group = join()
    for number in range(40):
        inputs = [given(r, LONG + number, seed=number) for r in range(2)]
        tensor = inputs[rank].to(device)
        dist.all_reduce(tensor, group=group)
        assert same(tensor, alone(inputs))
        del tensor
        torch.accelerator.empty_cache()
    return async_chip.imports()[1]


def test_memory_that_is_used_no_more_is_let_go_of() -> None:
    assert max(run_processes(2, ever_new_memory, environment=environment())) <= 16


def of_two_vendors(rank: int) -> int:
    """Chips of a vendor reduce what goes on between vendors through their hosts."""
    device, _ = join()
    options = dicomm.distributed.Options(vendor="aab"[rank], native="dicomm")
    group = dist.new_group(pg_options=options)
    inputs = [given(r, LONG, torch.int64) for r in range(3)]
    tensor = inputs[rank].to(device)
    dist.all_reduce(tensor, group=group)
    assert same(tensor, alone(inputs))
    return async_chip.imports()[0]


def test_chips_of_a_vendor_within_a_group_of_several() -> None:
    *imports, alone_of_its_vendor = run_processes(3, of_two_vendors, environment=environment())
    assert min(imports) > 0 and alone_of_its_vendor == 0


def full_memory(rank: int) -> int:
    """There is no room on one rank's chip to reduce anything."""
    device, group = join()
    inputs = [given(r, PIECES) for r in range(2)]
    tensor = inputs[rank].to(device)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    filled = []
    if rank == 0:
        for size_bytes in (2**23, 2**20):
            while True:
                try:
                    filled.append(torch.empty(size_bytes, dtype=torch.uint8, device=device))
                except torch.OutOfMemoryError:
                    break
    copies = copied_to_host(lambda: dist.all_reduce(tensor, group=group))
    assert same(tensor, alone(inputs))
    return copies


def test_a_chip_whose_memory_is_full() -> None:
    for copies in run_processes(2, full_memory, environment=environment()):
        assert copies > 0


def mixture(rank: int, size: int, seed: int) -> None:
    """Collectives of many kinds under way at once in two groups, waited for in any order."""
    device, group = join()
    groups = [group, dist.new_group()]
    random = Random(seed)  # the same on every rank
    under_way: list[tuple[Any, Tensor, Tensor, Tensor]] = []
    for step in range(60):
        group, count = random.choice(groups), random.choice([100, 20_000, 300_001])
        root = random.randrange(size)
        inputs = [given(r, size * count, seed=step) for r in range(size)]
        tensor = result = inputs[rank].to(device)
        expected = alone(inputs)
        match random.choice(["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"]):
            case "all_reduce":
                work = dist.all_reduce(tensor, group=group, async_op=True)
            case "reduce":
                work = dist.reduce(tensor, root, group=group, async_op=True)
                expected = expected if rank == root else inputs[rank]
            case "reduce_scatter":
                result, expected = torch.empty(count, device=device), expected.chunk(size)[rank]
                work = dist.reduce_scatter_tensor(result, tensor, group=group, async_op=True)
            case "broadcast":
                work, expected = dist.broadcast(tensor, root, group, True), inputs[root]
            case _:
                tensor, expected = tensor[:count], torch.cat([each[:count] for each in inputs])
                result = torch.empty(size * count, device=device)
                work = dist.all_gather_into_tensor(result, tensor, group=group, async_op=True)
        under_way.append((work, result, expected, tensor))
        if len(under_way) > random.randrange(4) or step == 59:
            random.shuffle(under_way)
            for work, result, expected, _ in under_way:
                work.wait()
                seen = result.clone()
                result.fill_(-1)  # as soon as it may be
                assert same(seen, expected), step
            under_way.clear()


@pytest.mark.parametrize("seed", sampled([1, 2, 3], 3))
@pytest.mark.parametrize("size", [2, 4])
def test_a_mixture_of_collectives_in_two_groups(size: int, seed: int) -> None:
    run_processes(size, mixture, size, seed, environment=environment(seed, delay_us=1000))


def meets_a_death(rank: int, victim: int, late: bool) -> None:
    device, group = join()
    tensor = torch.ones(PIECES, device=device)
    dist.all_reduce(tensor, group=group)  # all memory is imported
    torch.accelerator.synchronize()
    if rank == victim and late:
        async_chip.hold(300)  # the others wait for its chip, or have it read their memory
        tensor.add_(1)
    if rank == victim:
        work = dist.all_reduce(tensor, group=group, async_op=True) if late else None
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
        assert work
    for _ in range(3):
        dist.all_reduce(tensor, group=group)


@pytest.mark.parametrize(
    ("victim", "late"), sampled([(0, True), (2, False), (2, True), (0, False)], 1, everyday=2)
)
def test_a_death_is_named(victim: int, late: bool) -> None:
    processes = Processes(3, meets_a_death, victim, late, environment=environment())
    survivors = {0, 1, 2} - {victim}
    for succeeded, text in processes.outcomes(survivors).values():
        assert not succeeded
        assert f"rank {victim}" in text and "died" in text
