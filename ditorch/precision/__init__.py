"""Precision tools: what a chip computes, operator by operator, against a reference.

    from ditorch.precision import Compare

    with Compare(modules="layers.3*", steps="0:10") as compare:
        train()
    print(compare.findings().summary)

Every tool is a context manager; tools that are open together see the same calls (`tool.py`), and
`ditorch.toml` or the environment opens them without touching the script (`settings.py`).
"""

from importlib import import_module
from typing import Any

# Imported when they are asked for: a program that uses one tool does not load the others.
_TOOLS = {
    "Capture": "capture",
    "Cast": "cast",
    "Compare": "compare",
    "Fallback": "fallback",
    "FindOverflow": "overflow",
    "MeasureTime": "timing",
    "Observe": "observe",
}


def __getattr__(name: str) -> Any:
    if name not in _TOOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_TOOLS[name]}"), name)
