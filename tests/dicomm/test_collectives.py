"""Every collective of the backend against a single-process computation: types, sizes, layouts.

collective_oracle.cpp (see test_collectives_groups.py) does the same below torch, for more groups.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from ranks import Failed, run_threads

from dicomm import _c10d
from dicomm.distributed import register_backend

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
SIZES = [0, 1, 7, 5_000, 200_003]  # empty, tiny, odd, short and long algorithms
COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class Ranks:
    """The ranks of one group, as threads, each with its own backend."""

    def __init__(self, size: int) -> None:
        register_backend()
        self.size = size
        store = dist.HashStore()
        self.backends = run_threads(
            size,
            lambda rank: _c10d.Backend(
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=60),
                name="test",
                rank_label=f"rank {rank}",
                secret="of the test",
                strategy="device-direct",
                transport="auto",
                listen_address="",
            ),
        )

    def each(self, function: Callable[[int, Any], Any]) -> list[Any]:
        return run_threads(self.size, lambda rank: function(rank, self.backends[rank]))


@pytest.fixture(scope="module", params=[1, 3, 9])
def ranks(request: pytest.FixtureRequest) -> Any:
    group = Ranks(request.param)
    yield group
    group.each(lambda _, backend: backend.shutdown())


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def in_rank_order(tensors: list[torch.Tensor], op: Any) -> torch.Tensor:
    """What H2's chips must agree on: accumulated in float32 for 16-bit floats, rounded once."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if op == dist.ReduceOp.AVG:
        total = reduce(torch.add, [t.to(wide) for t in tensors])
        return (total / len(tensors)).to(dtype)
    return reduce(COMBINE[op], [t.to(wide) for t in tensors]).to(dtype)


def reductions(dtype: torch.dtype) -> list[Any]:
    op = dist.ReduceOp
    common = [op.SUM, op.PRODUCT, op.MIN, op.MAX]
    return [*common, op.AVG] if dtype.is_floating_point else [*common, op.BAND, op.BOR, op.BXOR]


def options(kind: Any, **fields: Any) -> Any:
    result = kind()
    for name, value in fields.items():
        setattr(result, name, value)
    return result


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(
        (a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all()
        if a.numel()
        else True
    )  # fmt: skip


def all_reduce(backend: Any, tensor: torch.Tensor, op: Any, run_async: bool = False) -> None:
    opts = options(dist.AllreduceOptions, reduceOp=op, asyncOp=run_async)
    backend.allreduce([tensor], opts).wait()


def assert_reduced(results: list[torch.Tensor], inputs: list[torch.Tensor], op: Any) -> None:
    expected = in_rank_order(inputs, op)
    for result in results:
        assert same_bits(result, results[0]), "ranks differ"
    if len(inputs) <= 8:
        assert same_bits(results[0], expected)
    else:  # more ranks combine short vectors along a tree
        torch.testing.assert_close(results[0], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_all_reduce(ranks: Ranks, dtype: torch.dtype) -> None:
    for count in SIZES:
        inputs = [values(rank, count, dtype) for rank in range(ranks.size)]
        for op in reductions(dtype) if count == 7 else [dist.ReduceOp.SUM]:

            def body(rank: int, backend: Any, op: Any = op, inputs: Any = inputs) -> torch.Tensor:
                result = inputs[rank].clone()
                all_reduce(backend, result, op)
                return result

            assert_reduced(ranks.each(body), inputs, op)


def test_all_reduce_bool_is_logical(ranks: Ranks) -> None:
    inputs = [values(rank, 50, torch.bool) for rank in range(ranks.size)]
    for op, expected in [
        (dist.ReduceOp.SUM, torch.stack(inputs).any(0)),
        (dist.ReduceOp.PRODUCT, torch.stack(inputs).all(0)),
        (dist.ReduceOp.MIN, torch.stack(inputs).all(0)),
        (dist.ReduceOp.MAX, torch.stack(inputs).any(0)),
    ]:

        def body(rank: int, backend: Any, op: Any = op) -> torch.Tensor:
            result = inputs[rank].clone()
            all_reduce(backend, result, op)
            return result

        for result in ranks.each(body):
            assert same_bits(result, expected)


def test_min_and_max_keep_nan_and_sum_keeps_infinity(ranks: Ranks) -> None:
    for dtype in FLOATS:

        def body(rank: int, backend: Any, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
            found = []
            for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM):
                tensor = torch.tensor([float(rank), 1.0, 1.0], dtype=dtype)
                if rank == ranks.size - 1:
                    tensor[1:] = torch.tensor([torch.nan, torch.inf])
                all_reduce(backend, tensor, op)
                found.append(tensor)
            return found

        for low, high, total in ranks.each(body):
            assert low[0] == 0 and high[0] == ranks.size - 1
            assert low[1].isnan() and high[1].isnan() and total[1].isnan()
            assert total[2] == torch.inf and high[2] == torch.inf


def test_extreme_halves_round_as_torch_does(ranks: Ranks) -> None:
    """Subnormals, overflow to infinity and ties to even."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [bits.view(dtype).roll(rank * 7919).nan_to_num(0.0) for rank in range(ranks.size)]

        def body(rank: int, backend: Any, inputs: Any = inputs) -> torch.Tensor:
            result = inputs[rank].clone()
            all_reduce(backend, result, dist.ReduceOp.SUM)
            return result.nan_to_num(123.0)

        results = ranks.each(body)
        expected = in_rank_order(inputs, dist.ReduceOp.SUM).nan_to_num(123.0)
        assert same_bits(results[0], results[-1])
        if ranks.size <= 8:  # more combine in another order
            assert same_bits(results[0], expected)


@pytest.mark.parametrize("count", SIZES)
def test_broadcast_and_reduce_from_every_root(ranks: Ranks, count: int) -> None:
    inputs = [values(rank, count, torch.float32) for rank in range(ranks.size)]
    for root in {0, ranks.size // 2, ranks.size - 1}:

        def body(rank: int, backend: Any, root: int = root) -> tuple[torch.Tensor, torch.Tensor]:
            copy, total = inputs[rank].clone(), inputs[rank].clone()
            backend.broadcast([copy], options(dist.BroadcastOptions, rootRank=root)).wait()
            backend.reduce([total], options(dist.ReduceOptions, rootRank=root)).wait()
            return copy, total

        results = ranks.each(body)
        for rank, (copy, total) in enumerate(results):
            assert same_bits(copy, inputs[root])
            if rank != root:
                assert same_bits(total, inputs[rank]), "reduce wrote on a rank that is not root"
        assert_reduced([results[root][1]], inputs, dist.ReduceOp.SUM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool], ids=str)
def test_gather_scatter_allgather_alltoall_with_uneven_sizes(
    ranks: Ranks, dtype: torch.dtype
) -> None:
    size = ranks.size

    def part(source: int, target: int) -> torch.Tensor:
        return values(100 * source + target, 3 * source + 5 * target, dtype)  # 0 of rank 0 for 0

    def body(rank: int, backend: Any) -> None:
        own = part(rank, 1)
        gathered = [torch.empty_like(part(peer, 1)) for peer in range(size)]
        backend.allgather([gathered], [own]).wait()
        for peer in range(size):
            assert same_bits(gathered[peer], part(peer, 1))

        root = size - 1
        lists = [[torch.empty_like(part(p, 2)) for p in range(size)]] if rank == root else []
        backend.gather(lists, [part(rank, 2)], options(dist.GatherOptions, rootRank=root)).wait()
        for peer in range(size if rank == root else 0):
            assert same_bits(lists[0][peer], part(peer, 2))

        dealt = torch.empty_like(part(0, rank))
        lists = [[part(0, peer) for peer in range(size)]] if rank == 0 else []
        backend.scatter([dealt], lists, options(dist.ScatterOptions, rootRank=0)).wait()
        assert same_bits(dealt, part(0, rank))

        outputs = [torch.empty_like(part(peer, rank)) for peer in range(size)]
        backend.alltoall(outputs, [part(rank, peer) for peer in range(size)]).wait()
        for peer in range(size):
            assert same_bits(outputs[peer], part(peer, rank))
        backend.barrier().wait()

    ranks.each(body)


@pytest.mark.parametrize("count", [0, 3, 40_001])
def test_reduce_scatter_even_uneven_and_in_place(ranks: Ranks, count: int) -> None:
    size = ranks.size

    def part(source: int, target: int, uneven: int) -> torch.Tensor:
        return values(100 * source + target, count + uneven * target, torch.bfloat16)

    def body(rank: int, backend: Any) -> None:
        for uneven in (0, 1000):
            inputs = [part(rank, peer, uneven) for peer in range(size)]
            expected = in_rank_order(
                [part(peer, rank, uneven) for peer in range(size)], dist.ReduceOp.SUM
            )
            output = torch.empty_like(expected)
            backend.reduce_scatter([output], [inputs]).wait()
            assert same_bits(output, expected)
        whole = torch.cat([part(rank, peer, 0) for peer in range(size)])
        own = whole[rank * count : (rank + 1) * count]
        expected = in_rank_order([part(p, rank, 0) for p in range(size)], dist.ReduceOp.SUM)
        opts = dist.ReduceScatterOptions()
        backend._reduce_scatter_base(own, whole, opts).wait()
        assert same_bits(own, expected)
        everything = torch.zeros(size * count, dtype=torch.bfloat16)
        slot = everything[rank * count : (rank + 1) * count]
        slot.copy_(values(rank, count, torch.bfloat16))
        backend._allgather_base(everything, slot, c10d.AllgatherOptions()).wait()
        assert same_bits(everything, torch.cat([values(p, count, torch.bfloat16)
                                                for p in range(size)]))  # fmt: skip

    ranks.each(body)


def test_tensors_that_are_not_contiguous(ranks: Ranks) -> None:
    size = ranks.size

    def matrix(rank: int) -> torch.Tensor:
        return values(rank, 60, torch.float32).view(6, 10)

    def body(rank: int, backend: Any) -> None:
        tensor = matrix(rank).t()
        all_reduce(backend, tensor, dist.ReduceOp.SUM)
        assert tensor.shape == (10, 6) and not tensor.is_contiguous()
        expected = reduce(torch.add, [matrix(peer) for peer in range(size)])
        torch.testing.assert_close(tensor, expected.t())
        target = torch.zeros(12, 10)[::2]
        if rank == size - 1:
            target.copy_(matrix(7))
        backend.broadcast([target], options(dist.BroadcastOptions, rootRank=size - 1)).wait()
        assert torch.equal(target, matrix(7))
        if size > 1:  # around the ring
            send = backend.send([matrix(rank).t()], (rank + 1) % size, 5)
            column = torch.zeros(10, 12)[:, ::2]
            backend.recv([column], (rank - 1) % size, 5).wait()
            send.wait()
            assert torch.equal(column, matrix((rank - 1) % size).t())

    ranks.each(body)


def test_works_in_flight_do_not_mix(ranks: Ranks) -> None:
    """Asynchronous collectives and messages with equal tags, waited for in reverse."""
    size = ranks.size

    def body(rank: int, backend: Any) -> None:
        tensors = [values(rank, count, torch.float64) for count in (3, 40_000, 5, 90_000)]
        opts = options(dist.AllreduceOptions, asyncOp=True)
        works = [backend.allreduce([tensor], opts) for tensor in tensors]
        if size > 1:
            number = torch.tensor([rank])
            works.append(backend.send([number], (rank + 1) % size, 0))
            received = torch.tensor([-1])
            works.append(backend.recv([received], (rank - 1) % size, 0))
        for work in reversed(works):
            work.wait()
            assert work.is_completed()
        for tensor, count in zip(tensors, (3, 40_000, 5, 90_000), strict=True):
            parts = [values(peer, count, torch.float64) for peer in range(size)]
            torch.testing.assert_close(tensor, reduce(torch.add, parts))
        if size > 1:
            assert received.item() == (rank - 1) % size

    ranks.each(body)


def test_futures_complete_without_wait(ranks: Ranks) -> None:
    def body(rank: int, backend: Any) -> None:
        for run_async in (True, False):
            opts = options(dist.AllreduceOptions, asyncOp=run_async)
            future = backend.allreduce([torch.ones(10)], opts).get_future()
            doubled = future.then(lambda done: done.value()[0] * 2).wait()
            assert torch.equal(doubled, torch.full((10,), 2.0 * ranks.size))

    ranks.each(body)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: all_reduce(b, torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG), "avg"),
        (lambda b: all_reduce(b, torch.ones(2), dist.ReduceOp.BAND), "band"),
        (lambda b: all_reduce(b, torch.zeros(2).to(torch.float8_e5m2), dist.ReduceOp.SUM),
         "no reductions over"),
        (lambda b: b.allgather([[torch.ones(2)] * 9], [torch.ones(2)]), "9 tensors for a group"),
        (lambda b: b._allgather_base(torch.ones(7), torch.ones(2), c10d.AllgatherOptions()),
         "7 elements are not 2 times 2"),
        (lambda b: b.alltoall_base(torch.ones(4), torch.ones(4), [1, 2], [2, 2]), "split sizes"),
        (lambda b: b.allreduce([torch.ones(2), torch.ones(2)]), "one tensor expected, got 2"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_clear_error(call: Any, message: str) -> None:
    pair = Ranks(2)
    with pytest.raises(Exception, match=message):
        call(pair.backends[0])
    pair.each(lambda _, backend: all_reduce(backend, torch.ones(1), dist.ReduceOp.SUM))


def test_sizes_that_differ_between_ranks_are_an_error() -> None:
    pair = Ranks(2)
    with pytest.raises(Failed, match="bytes"):
        pair.each(lambda rank, b: all_reduce(b, torch.ones(4 + rank), dist.ReduceOp.SUM))


def test_a_message_shorter_than_its_tensor_is_an_error() -> None:
    pair = Ranks(2)

    def body(rank: int, backend: Any) -> None:
        if rank == 0:
            backend.send([torch.ones(3)], 1, 0).wait()
            backend.send([torch.ones(4)], 1, 0).wait()
        else:
            with pytest.raises(Exception, match="received 12 bytes into a tensor of 16 bytes"):
                backend.recv([torch.ones(4)], 0, 0).wait()
            tensor = torch.zeros(4)
            backend.recv([tensor], 0, 0).wait()  # the stream of messages stays usable
            assert tensor.sum() == 4

    pair.each(body)
