"""Precision tools that ditorch.toml or the environment ask for are the ranks', which compute."""

from __future__ import annotations

import os

_CONFIGURATION = ("DITORCH_PRECISION", "DITORCH_CONFIG")


def leave_tools_to_ranks() -> None:
    """Imports ditorch without opening them here; processes started from here still do."""
    wanted = {name: os.environ.pop(name) for name in _CONFIGURATION if name in os.environ}
    os.environ["DITORCH_CONFIG"] = os.devnull  # instead of a ditorch.toml of this folder
    import ditorch  # noqa: F401

    del os.environ["DITORCH_CONFIG"]
    os.environ.update(wanted)
