"""Groups beside the default one: what they cost, and that each goes its own way."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_processes

GROUPS = 50


def entries(of: str) -> int:
    return len(list(Path("/proc/self", of).iterdir()))


def total(group: dist.ProcessGroup | None, value: float) -> float:
    tensor = torch.full((3,), value)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def exchange_with_all(rank: int, size: int) -> None:
    works = [dist.isend(torch.tensor([rank]), peer) for peer in range(size) if peer != rank]
    for peer in range(size):
        if peer != rank:
            dist.recv(received := torch.zeros(1, dtype=torch.int64), peer)
            assert received.item() == peer
    for work in works:
        assert work
        work.wait()


def count_what_groups_add(rank: int, size: int) -> tuple[int, int]:
    everyone = list(range(size))
    exchange_with_all(rank, size)
    dist.barrier()
    before = entries("task"), entries("fd")
    groups = [dist.new_group(everyone) for _ in range(GROUPS)]
    for number, group in enumerate(groups):
        assert total(group, rank + number) == sum(everyone) + size * number
    dist.barrier()
    return entries("task") - before[0], entries("fd") - before[1]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_groups_add_neither_threads_nor_descriptors(transport: str) -> None:
    added = run_processes(4, count_what_groups_add, 4, environment={"DICOMM_TRANSPORT": transport})
    assert max(threads for threads, _ in added) <= 0
    assert max(descriptors for _, descriptors in added) <= 0


def destroy_one_while_another_works(rank: int, size: int) -> None:
    everyone = list(range(size))
    one, other = dist.new_group(everyone), dist.new_group(everyone)
    assert total(one, 1) == total(other, 1) == size
    if rank == 0:
        dist.destroy_process_group(one)
    for _ in range(50):
        assert total(other, rank) == sum(everyone)
    if rank != 0:
        dist.destroy_process_group(one)
    for _ in range(50):
        assert total(other, rank) == total(dist.group.WORLD, rank) == sum(everyone)


def test_a_group_is_destroyed_while_another_works() -> None:
    run_processes(3, destroy_one_while_another_works, 3)


def abort_one_while_another_works(rank: int, size: int) -> None:
    everyone = list(range(size))
    one, other = dist.new_group(everyone), dist.new_group(everyone)
    assert total(one, 1) == total(other, 1) == size
    if rank == 0:
        one._get_backend(torch.device("cpu")).abort()
    for _ in range(50):
        assert total(other, rank) == sum(everyone)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"worked/{rank}", "")
    store.wait([f"worked/{each}" for each in everyone])
    with pytest.raises(dist.DistBackendError, match=r"rank 0.* aborted|this rank aborted"):
        total(one, 1)  # the job ends here


def test_a_group_is_aborted_while_another_works() -> None:
    run_processes(3, abort_one_while_another_works, 3)


def use_two_from_two_threads(rank: int, size: int) -> None:
    everyone = list(range(size))
    groups = [dist.new_group(everyone), dist.new_group(everyone[::-1])]
    wrong: list[float] = []

    def work(number: int) -> None:
        for turn in range(100):
            found = total(groups[number], rank + turn * number)
            if found != sum(everyone) + size * turn * number:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_groups_are_used_from_two_threads() -> None:
    run_processes(3, use_two_from_two_threads, 3)


def use_another_transport(rank: int, size: int) -> None:
    import dicomm.distributed

    assert total(dist.group.WORLD, rank) == sum(range(size))
    before = entries("fd")
    options = dicomm.distributed.Options(transport="tcp")
    group = dist.new_group(list(range(size)), pg_options=options)
    assert total(group, rank) == sum(range(size))
    assert entries("fd") >= before + 4  # listeners and connections of its own


def test_a_group_over_another_transport_has_connections_of_its_own() -> None:
    run_processes(2, use_another_transport, 2, environment={"DICOMM_TRANSPORT": "shm"})


def make_a_second_world(rank: int, size: int, port: int) -> float | None:
    """The second one is that of two jobs: rank 0 trains in one, and rank 2 stands for the other."""
    from torch.distributed import distributed_c10d as c10d

    if rank == 1:
        return None
    store = dist.PrefixStore("second", dist.TCPStore("127.0.0.1", port, is_master=False))
    group, _ = c10d._new_process_group_helper(
        2, rank // 2, [], "dicomm", store, group_name="second", timeout=timedelta(seconds=60)
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return total(group, rank)


def test_a_group_may_span_jobs() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run_processes(3, make_a_second_world, 3, store.port)
    assert found == [2.0, None, 2.0]
