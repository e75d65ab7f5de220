"""A data loader's workers are forked children of a rank: they have no part in its group."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from ranks import Processes
from torch.utils.data import DataLoader, Dataset


class Communicating(Dataset[Any]):
    """Says what a worker that communicates is told."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[str]:
        told = []
        for call in (
            lambda: dist.all_reduce(torch.ones(1)),
            lambda: dist.send(torch.ones(1), 1),
            dist.barrier,
        ):
            try:
                call()
                told.append("it worked")
            except dist.DistBackendError as error:
                told.append(str(error))
        told.append(str(os.getpid()))
        return told


def load_in_workers_and_die(rank: int) -> None:
    total = torch.ones(3)
    dist.all_reduce(total)
    if rank == 0:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        works = [dist.all_reduce(torch.ones(3), async_op=True), dist.isend(torch.ones(5), 1)]
        loader = DataLoader(
            Communicating(), num_workers=2, collate_fn=lambda batch: batch[0],
            persistent_workers=True, multiprocessing_context="fork",
        )  # fmt: skip
        for *told, worker in loader:
            sentence = f"belongs to process {os.getpid()}, and this is process {worker}"
            assert all(sentence in words for words in told), told
        if (child := os.fork()) == 0:
            works.clear()  # neither this nor what follows tells the peer anything, or waits
            dist.destroy_process_group()
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        for work in works:
            work.wait()
        dist.all_reduce(total)
        os.kill(os.getpid(), signal.SIGKILL)  # the workers live on for a while
    dist.all_reduce(torch.ones(3))
    dist.recv(torch.ones(5), 0)
    dist.all_reduce(total)
    assert (total == 4).all()
    dist.recv(torch.ones(3), 0)


def test_a_loaders_workers_leave_the_group_alone_and_do_not_hide_a_death() -> None:
    succeeded, text = Processes(2, load_in_workers_and_die).outcomes({1})[1]
    last = text.strip().splitlines()[-1]
    assert not succeeded and "rank 0" in last and "died" in last, text
