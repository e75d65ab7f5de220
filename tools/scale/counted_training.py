"""heteropp-train whose ranks reach the job's store through a relay that counts what they ask.

They take themselves for ranks of machines of MACHINE_RANKS each, as those of a large job are: what
a rank has for each other of its machine would else grow with the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from heteropp.cli.train import app
from heteropp.description.files import write_text
from heteropp.runtime.ranks import launch as launching
from heteropp.runtime.ranks import processes
from scale.sizes import MACHINE_RANKS

launch, loopback_store = launching.launch, launching.loopback_store


def main() -> None:
    """Trains as the command line says: PORT_FILE PORTS, then what heteropp-train takes.

    Rank i calls the i-th of the PORTS, separated by commas. The store's own port is written to
    PORT_FILE before.
    """
    port_file, ports = Path(sys.argv[1]), [int(port) for port in sys.argv[2].split(",")]

    def counted_store() -> TCPStore:
        store = loopback_store()
        write_text(port_file, str(store.port))
        return store

    def launch_counted(train: Callable[..., int | None], *arguments: Any, **settings: Any) -> int:
        return launch(_train_through_relay, train, ports, *arguments, **settings)

    launching.loopback_store, launching.launch = counted_store, launch_counted
    app(sys.argv[3:])


def _train_through_relay(
    train: Callable[..., int | None], ports: Sequence[int], *arguments: Any
) -> int | None:
    machine, local_rank = divmod(int(os.environ["RANK"]), MACHINE_RANKS)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(MACHINE_RANKS))
    os.environ["MASTER_PORT"] = str(ports[machine * MACHINE_RANKS + local_rank])
    processes._machine = lambda: f"machine {machine}"
    return train(*arguments)
