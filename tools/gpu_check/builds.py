"""Step 1: the C++ parts load, and the GPU computes."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path

from evidence import row

from gpu_check.part import Found, Part
from gpu_check.processes import StepError

PARTS = ("ditorch._ditorch", "dicomm._dicomm", "dicomm._c10d", "heteropp._planner")
REMEDY = "where it was not built for this torch, python setup.py build_ext --inplace does it"


def found(part: Part, folder: Path) -> Found:
    os.environ.update(part.environment)
    import torch

    for name in PARTS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise StepError(f"{name} does not load: {error}; {REMEDY}") from None
    import ditorch

    ones = torch.ones(64, 64, device="device")
    if (ones @ ones).sum().item() != 64**3:
        raise StepError(f"{ditorch.device} computes a product of ones that is not right")
    driver = "" if part.is_rehearsed else f", driver {_driver()}"
    chip = ditorch.chip()
    note = f"torch {torch.__version__}, CUDA {torch.version.cuda}{driver}, {chip.chip_type}"
    return Found(
        [row("C++ parts that load", "parts", len(PARTS), bar=len(PARTS), better="higher")], [note]
    )


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return said.stdout.strip().splitlines()[0] if said.stdout.strip() else "unknown"
