"""The process that ranks are forked from: it imports everything once, and not once a rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

ALWAYS = ("typer", "heteropp.runtime.ranks.first_step_imports")


def fork_server(*called: Callable) -> ForkServerContext:
    """Returns the context whose processes begin with the modules of what they will call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*(function.__module__ for function in called), *ALWAYS])
    return context
