"""One server for all tests whose ranks are forked: whichever comes first starts it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = [
    "numpy",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",  # the first optimizer would import it
    "dicomm.distributed",
    "heteropp.runtime.trainer",
    "heteropp.runtime.ranks.first_step_imports",
    "transformers.modeling_utils",
    "transformers.integrations.moe",
]


def context() -> ForkServerContext:
    """Its processes begin with what takes seconds to import."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    return found
