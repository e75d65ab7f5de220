"""Lists of vendors that are written into a library's function, with nothing to register in."""

from __future__ import annotations

import types


def add(function: types.FunctionType, known: str, device_type: str) -> None:
    """Adds `device_type` to the constant tuples and sets of a function that name `known`.

    Raises:
        LookupError: the function has none.
    """
    code = function.__code__
    constants = tuple(
        type(constant)([*constant, device_type])
        if isinstance(constant, tuple | frozenset) and known in constant
        else constant
        for constant in code.co_consts
    )
    if constants == code.co_consts:
        raise LookupError(f"{function.__qualname__} has no list of devices with {known!r}")
    function.__code__ = code.replace(co_consts=constants)
