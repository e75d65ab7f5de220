"""Collectives on this host against Gloo, alternating: the C++ API, and through torch.distributed.

    python csrc/dicomm/bench/collectives.py --program build/collectives --ranks 2

Every figure is a median over rounds; in each round Gloo, dicomm through torch.distributed and
dicomm's C++ API (--program: collectives.cpp, compiled) take turns on the same vectors.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "allreduce", "broadcast", "reduce", "allgather", "reduce_scatter", "alltoall", "barrier",
)  # fmt: skip


def operation(name: str, count: int, group: dist.ProcessGroup, size: int) -> Any:
    """A call of the collective on a vector of `count` float32 that the whole group works on."""
    whole, other = torch.ones(count), torch.empty(count)
    own = torch.ones(count // size)
    op = dist.ReduceOp.MAX
    return {
        "allreduce": lambda: dist.all_reduce(whole, op, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "reduce": lambda: dist.reduce(whole, 0, op, group=group),
        "allgather": lambda: dist.all_gather_into_tensor(other, own, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole, op, group=group),
        "alltoall": lambda: dist.all_to_all_single(other, whole, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }[name]


def rank_main(rank: int, size: int, port: int, pipe: Connection) -> None:
    import dicomm.distributed  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    groups = {
        name: dist.new_group(backend=name, timeout=timedelta(minutes=5))
        for name in ("gloo", "dicomm")
    }
    pipe.send("ready")
    while command := pipe.recv():
        backend, name, count, repeats = command
        call = operation(name, count, groups[backend], size)
        for _ in range(2):
            call()
        dist.barrier(groups[backend])
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        pipe.send((time.perf_counter() - start) * 1e6 / repeats)
    dist.destroy_process_group()


class TorchRanks:
    def __init__(self, size: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, self.store.port, theirs)
            context.Process(target=rank_main, args=arguments, daemon=True).start()
            self.pipes.append(ours)
        for pipe in self.pipes:
            pipe.recv()

    def time_us(self, backend: str, name: str, count: int, repeats: int) -> float:
        for pipe in self.pipes:
            pipe.send((backend, name, count, repeats))
        return max(pipe.recv() for pipe in self.pipes)


class Program:
    def __init__(self, path: str, size: int, transport: str) -> None:
        self.process = subprocess.Popen(
            [path, str(size), transport], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout
        self.process.stdout.readline()  # "ready"

    def time_us(self, name: str, count: int, repeats: int) -> float:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{name} {count * 4} 1 {repeats}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline().split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--program", required=True, help="collectives.cpp, compiled")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=["allreduce"])
    parser.add_argument("--bytes", type=int, nargs="+", default=[8, 1024, 65536, 1 << 20, 16 << 20])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--budget-s", type=float, default=0.03, help="per size, round and side")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto")
    parser.add_argument("--no-torch", action="store_true", help="only the C++ API, without a peer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    program = Program(options.program, options.ranks, options.transport)
    ranks = None if options.no_torch else TorchRanks(options.ranks)
    sides = {"C++": program.time_us}
    if ranks:
        sides["Gloo"] = lambda *call: ranks.time_us("gloo", *call)
        sides["torch"] = lambda *call: ranks.time_us("dicomm", *call)
    rows = []
    for name in options.collectives:
        for size_bytes in [0] if name == "barrier" else options.bytes:
            count = max(size_bytes // 4 // options.ranks, 1) * options.ranks
            found: dict[str, list[float]] = {side: [] for side in sides}
            repeats = {
                side: max(3, min(300, int(options.budget_s * 1e6 / time_us(name, count, 3))))
                for side, time_us in sides.items()
            }
            for _ in range(options.rounds):
                for side, time_us in sides.items():
                    found[side].append(time_us(name, count, repeats[side]))
            medians = {side: statistics.median(times) for side, times in found.items()}
            gloo = medians.get("Gloo")
            for side in ("C++", "torch"):
                if side in medians:
                    rows.append({
                        "name": f"{name}, {options.ranks} ranks, {count * 4} B, {side}",
                        "unit": "us", "ours": medians[side], "peer": gloo, "peer_name": "Gloo",
                        "ratio": gloo / medians[side] if gloo else None,
                        "bar": None, "better": "lower",
                    })  # fmt: skip
                    if not options.json:
                        row = rows[-1]
                        against = f"   Gloo {gloo:10.1f}   {row['ratio']:6.2f}x" if gloo else ""
                        print(f"{row['name']:48} {row['ours']:10.1f} us{against}", flush=True)
    for pipe in ranks.pipes if ranks else []:
        pipe.send(None)
    if options.json:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "cpu": platform.machine()}
        json.dump({"tool": "collectives", "machine": machine, "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
