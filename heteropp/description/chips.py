"""ditorch's chip files, read without opening a chip.

Importing anything of ditorch imports torch and opens this process's device; whoever only plans
needs neither, and would wait seconds for them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ditorch.chips import (
        ChipFileError,
        ChipSpec,
        Collectives,
        Kernels,
        chip_names,
        load_chip,
    )
else:

    def _load():
        """The module ditorch.chips itself, under its own name, without its package."""
        name = "ditorch.chips"
        if name not in sys.modules:
            folder = Path(find_spec("ditorch").submodule_search_locations[0])
            spec = spec_from_file_location(
                name, folder / "chips" / "__init__.py", submodule_search_locations=[]
            )
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    _chips = _load()
    ChipFileError, ChipSpec = _chips.ChipFileError, _chips.ChipSpec
    Collectives, Kernels = _chips.Collectives, _chips.Kernels
    chip_names, load_chip = _chips.chip_names, _chips.load_chip

__all__ = ["ChipFileError", "ChipSpec", "Collectives", "Kernels", "chip_names", "load_chip"]
