"""Sends messages with tags between two processes, without torch: dicomm's point-to-point core.

python examples/messages.py                        over the fastest way that both ends have
DICOMM_TRANSPORT=tcp python examples/messages.py   over TCP
"""

import multiprocessing
import secrets
import tempfile

import numpy as np

import dicomm

COUNT = 1 << 20
ACTIVATIONS, GRADIENTS = 1, 2  # tags


def stage(rank: int, folder: str, secret: str) -> None:
    """Rank 0 sends activations to rank 1, which sends gradients of them back."""
    communicator = dicomm.Communicator(rank, 2, dicomm.FileStore(folder), secret=secret)
    if rank == 0:
        gradients = np.empty(COUNT, np.float32)
        pending = communicator.irecv(gradients, 1, tag=GRADIENTS)
        communicator.send(np.arange(COUNT, dtype=np.float32), 1, tag=ACTIVATIONS)
        pending.wait()
        print(f"rank 0: gradients of {gradients.nbytes >> 20} MiB, the last {gradients[-1]:.0f}")
    else:
        activations = np.empty(COUNT, np.float32)
        communicator.recv(activations, 0, tag=ACTIVATIONS)
        print(
            f"rank 1: activations of {activations.nbytes >> 20} MiB, the last {activations[-1]:.0f}"
        )
        communicator.send(2 * activations, 0, tag=GRADIENTS)
    communicator.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        secret = secrets.token_hex()
        start = multiprocessing.get_context("spawn").Process
        ranks = [start(target=stage, args=(rank, folder, secret)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if failed := [index for index, rank in enumerate(ranks) if rank.exitcode]:
            raise SystemExit(f"ranks that failed: {failed}")
