"""PyTorch's DistributedTest on backend dicomm, imported as if the backend were the `gate`.

Its tests are gated when they are imported: by the backend's name (BACKEND), by what a table says
the backend can do, by the number of ranks. Under the gate "gloo" or "mpi" the tests that were
written for those open up; the process group that they then use is always dicomm's.
"""
# ruff: noqa: E402

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

os.environ["BACKEND"] = os.environ["C10D_TESTS_GATE"]

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed

from c10d_tests import GATES

for feature in ("ddp", "subgroup", "plugin"):  # not "cuda" and "gpu": those need CUDA itself
    common_distributed.DistTestCases.backend_feature[feature].update(GATES)
for skipping in common_distributed.DistTestCases.skip_collective.values():
    skipping.difference_update(GATES)
# These need three ranks, not the eight they are skipped below.
common_distributed.skip_if_small_worldsize = lambda test: test

from torch.testing._internal.distributed import distributed_test as suite

import dicomm.distributed  # noqa: F401  (registers the backend)


class Named(str):
    """The name "dicomm", which the tests also take for the gate's where they ask for that."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == os.environ["C10D_TESTS_GATE"]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


os.environ["BACKEND"] = "dicomm"
suite.BACKEND = Named("dicomm")
for profiled in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
    getattr(suite, profiled).append("dicomm")
dist.Backend.default_device_backend_map["cpu"] = "dicomm"
torch.set_num_threads(1)


def in_environment(environment: dict[str, str], target: Callable[..., Any], args: tuple) -> None:
    os.environ.update(environment)
    if (device := os.environ["C10D_TESTS_DEVICE"]) != "cpu":
        import ditorch  # noqa: F401  (not before the fork: a chip belongs to one process)

        torch.set_default_device(device)
    target(*args)


class TestDicomm(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
    """Every test of the suite; its ranks are forked from a process that has imported torch."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _spawn_processes(self) -> None:
        context = multiprocessing.get_context("forkserver")

        def process(target: Callable[..., Any], name: str, args: tuple, kwargs: dict) -> Any:
            bound = functools.partial(target, **kwargs)
            return context.Process(
                target=in_environment, name=name, args=(dict(os.environ), bound, args), daemon=True
            )

        self._start_processes(process)
