"""A process that sends a tensor of the device to another, which sends back its double.

A program of its own: the suite's workers are daemons, which may have no children.
"""

from __future__ import annotations

import torch
import torch.multiprocessing as mp

import ditorch

DEADLINE_S = 60


def _double(inbox: mp.Queue[torch.Tensor], outbox: mp.Queue[torch.Tensor]) -> None:
    x = inbox.get(timeout=DEADLINE_S)
    if x.device != ditorch.device:
        raise AssertionError(f"the tensor arrived on {x.device}, expected {ditorch.device}")
    outbox.put(x * 2)
    inbox.get(timeout=DEADLINE_S)  # the sender keeps its shared memory until the receiver has it


def main() -> None:
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=_double, args=(inbox, outbox), daemon=True)
    child.start()
    inbox.put(torch.arange(10.0).to(ditorch.device)[2:5])
    doubled = outbox.get(timeout=DEADLINE_S)
    found = (doubled.device, doubled.tolist())
    inbox.put(torch.zeros(0))
    child.join(DEADLINE_S)
    if found != (ditorch.device, [4.0, 6.0, 8.0]) or child.exitcode != 0:
        raise AssertionError(f"{found} came back, and the process ended with {child.exitcode}")


if __name__ == "__main__":
    main()
