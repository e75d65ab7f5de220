"""A store for the ranks of this machine alone, which nobody can call from another."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore

from heteropp.runtime.ranks.launchers import LOOPBACK


def loopback_store() -> TCPStore:
    """Returns a server of torch's store that listens on the loopback address only.

    By default torch's server listens on every address, serves anyone, and asks DNS for the name of
    each caller before it hears the next one: a thousand silent strangers keep it from answering for
    20 s, and for hours where DNS does not answer either.
    """
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,  # torch's launcher finds it by its port
            master_listen_fd=listener.detach(),
        )
