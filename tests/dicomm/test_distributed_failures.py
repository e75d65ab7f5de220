"""What happens when ranks die, stall or disagree: errors that name the cause, and no hang."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Processes, run_processes

import dicomm.distributed


def die_in_all_reduce(rank: int) -> None:
    """Rank 2 is killed; ranks 0 and 3 share no group with it but the world, which is idle."""
    groups = [dist.new_group([1, 2]), dist.new_group([0, 1]), dist.new_group([0, 3])]
    mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    tensor = torch.ones(1_000_000)
    for group in mine:  # all connections are up
        dist.all_reduce(tensor.clone(), group=group)
    dist.barrier()
    for step in range(10_000):
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        works = [dist.all_reduce(tensor.clone(), group=group, async_op=True) for group in mine]
        for work in works:
            work.wait()


def test_a_killed_rank_is_named_by_every_other_rank() -> None:
    start = time.monotonic()
    job = Processes(4, die_in_all_reduce, environment={"DICOMM_RANK_LABEL": "chip B"})
    outcomes = job.outcomes({0, 1, 3})
    assert time.monotonic() - start < 60
    for rank, (succeeded, text) in outcomes.items():
        last = text.strip().splitlines()[-1]
        assert not succeeded and "rank 2 (chip B)" in last, f"rank {rank}: {text}"
        assert "DistBackendError" in text
        # One cause, however many ranks and groups it was passed on through.
        assert last.count("failed after") == 1 and "aborted" not in last, last


def die_while_waited_for(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.ones(3), 1)


def test_a_receive_from_a_killed_rank_names_it() -> None:
    succeeded, text = Processes(2, die_while_waited_for).outcomes({0})[0]
    assert not succeeded and "rank 1" in text.strip().splitlines()[-1]


def stall(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    dist.barrier()
    if rank < 2:
        dist.all_reduce(torch.ones(5), group=group)  # they are connected
    dist.all_reduce(torch.ones(5))
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=r"all_reduce.*rank 1"):
            dist.all_reduce(torch.ones(5), group=group)
        assert 1.9 < time.monotonic() - start < 30
    elif rank == 1:
        time.sleep(4)
        with pytest.raises(dist.DistBackendError, match=r"rank 0.*all_reduce"):
            dist.all_reduce(torch.ones(5), group=group)  # learns why its peer gave up
    else:
        with pytest.raises(dist.DistBackendError, match=r"rank 0.*all_reduce.*rank 1"):
            dist.recv(torch.ones(5), 0)  # another group: the job is over everywhere
    assert time.monotonic() - start < 30


def test_a_collective_honours_its_timeout_and_tells_everyone() -> None:
    run_processes(3, stall)


def wait_with_timeout(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        tensor = torch.zeros(5)
        work = dist.irecv(tensor, 1)
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            work.wait(timedelta(milliseconds=200))
        dist.send(torch.ones(1), 1)
        work.wait(timedelta(seconds=30))  # a message may be waited for again
        assert (tensor == 7).all()
        total = torch.ones(3)
        reduced = dist.all_reduce(total, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"not done after 200 ms"):
            reduced.wait(timedelta(milliseconds=200))
        dist.send(torch.ones(1), 1)
        reduced.wait()
        assert (total == 2).all()
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.full((5,), 7.0), 0)
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(3))


def test_wait_honours_its_own_timeout() -> None:
    run_processes(2, wait_with_timeout)


def wait_for_centuries(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(days=110_000))
    if rank == 1:
        time.sleep(0.3)
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert (total == 2).all()
    work = dist.all_reduce(total, group=group, async_op=True)
    if rank == 1:
        time.sleep(0.3)
    work.wait(timedelta(days=110_000))
    message = torch.zeros(3 * 2**20)  # goes in parts where a rank is CPU-mediated
    if rank == 0:
        dist.irecv(message, 1, group=group).wait(timedelta(days=110_000))
    else:
        time.sleep(0.3)
        dist.send(message + 7, 0, group=group)
    assert rank == 1 or (message == 7).all()
    dicomm.distributed.monitored_barrier(group)


@pytest.mark.parametrize("strategy", ["device-direct", "cpu-mediated"])
def test_a_timeout_longer_than_the_clock_can_count_is_kept(strategy: str) -> None:
    run_processes(2, wait_for_centuries, environment={"DICOMM_STRATEGY": strategy})


def abort_one(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        dist.distributed_c10d._abort_process_group()
        return
    with pytest.raises(dist.DistBackendError, match=r"rank 0.*aborted"):
        dist.recv(torch.ones(1), 0)


def test_abort_reaches_the_peers() -> None:
    outcomes = Processes(2, abort_one).outcomes()
    assert outcomes[1][0], outcomes[1][1]


def with_own_secret(rank: int) -> None:
    os.environ["DICOMM_SECRET"] = f"secret of {rank}"
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    with pytest.raises(dist.DistBackendError, match="the secrets differ"):
        dist.barrier(group=group)


def test_a_rank_with_another_secret_is_refused() -> None:
    run_processes(2, with_own_secret)


def without_the_secret(rank: int) -> None:
    if rank == 0:
        os.environ["DICOMM_SECRET"] = "only here"
        dist.new_group([0, 1], timeout=timedelta(seconds=5))
        return
    with pytest.raises(dist.DistBackendError, match="DICOMM_SECRET is set for rank 0"):
        dist.new_group([0, 1], timeout=timedelta(seconds=5))


def test_a_secret_that_some_ranks_lack_is_told() -> None:
    run_processes(2, without_the_secret)


def bad_option(rank: int, strategy: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="expected"):
        dist.new_group([0], pg_options=strategy)


def test_bad_options_are_refused() -> None:
    run_processes(1, bad_option, dicomm.distributed.Options(strategy="teleport"))
    run_processes(1, bad_option, {"strategy": "device-direct"})
