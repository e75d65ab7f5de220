"""Folders of a family that transformers does not have, whose model is code in them."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).parent / "scaled_family"
MODELING = "modeling_scaled.py"


def write_scaled(folder: Path, *, weights: bool = True, **changes: Any) -> Path:
    """Writes a folder whose model has random weights, none of which is a plain 0 or 1.

    changes: of config.json, where a norm's scale is not the usual one already.
    """
    auto_map = {
        "AutoConfig": "configuration_scaled.ScaledConfig",
        "AutoModelForCausalLM": "modeling_scaled.ScaledForCausalLM",
    }
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    values = {"model_type": "scaled", "norm_scale": 1.5, "auto_map": auto_map, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    keep_modules_apart()
    if weights:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
        with torch.no_grad():
            for value in model.parameters():
                value.add_(torch.randn(value.shape) * 0.05)
        model.save_pretrained(folder)
    return folder


@cache
def keep_modules_apart() -> tempfile.TemporaryDirectory[str]:
    """Has transformers keep modules in a folder of this process, and not in the user's cache."""
    from transformers import dynamic_module_utils

    place = tempfile.TemporaryDirectory(prefix="modules-")
    dynamic_module_utils.HF_MODULES_CACHE = place.name
    return place  # until the process ends
