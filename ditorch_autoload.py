"""Imports ditorch with torch, where DITORCH_AUTOLOAD=1 asks for it.

torch calls `autoload` at the end of `import torch` (entry point group "torch.backends"). This is
a module of its own because importing anything inside the package ditorch starts ditorch.
"""

import os
import sys


def autoload() -> None:
    """Never raises: `import torch` works whatever becomes of ditorch."""
    wanted = os.environ.get("DITORCH_AUTOLOAD", "0")
    if wanted == "0":
        return
    try:
        if wanted != "1":
            raise ValueError(f"DITORCH_AUTOLOAD is {wanted!r}, expected 0 or 1")
        import ditorch  # noqa: F401
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"ditorch: not loaded with torch ({reason})", file=sys.stderr)
