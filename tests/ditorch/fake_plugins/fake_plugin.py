"""The public surface that vendors' torch plugins share, small and fake.

`make("npu")` gives torch the device "npu" and the module torch.npu, as `import torch_npu` does.
The chip behind it is the emulated one of FAKE_PLUGIN_CHIP_FILE, so tensors really work; all that
Python sees is this file's. The environment plays the plugin's troubles:
FAKE_PLUGIN_BROKEN=npu       installed, and its import fails
FAKE_PLUGIN_WITHOUT_CHIP=npu installed, on a machine without its chip
"""

import contextlib
import importlib.util
import os
import sys
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]


def make(device_type: str) -> None:
    if os.environ.get("FAKE_PLUGIN_BROKEN") == device_type:
        raise ImportError("libchip.so: cannot open shared object file: No such file or directory")
    has_chip = os.environ.get("FAKE_PLUGIN_WITHOUT_CHIP") != device_type
    if has_chip:
        driver = _driver()
        os.environ["EMUCHIP_CHIP"] = os.environ["FAKE_PLUGIN_CHIP_FILE"]
        driver.load(str(ROOT / "ditorch" / "lib" / "libemuchip.so"))
        del os.environ["EMUCHIP_CHIP"]  # ditorch would take it for its own
    module = types.ModuleType(f"torch.{device_type}")
    module.__dict__.update(
        is_available=lambda: has_chip,
        is_initialized=lambda: has_chip,
        device_count=lambda: int(has_chip),
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=contextlib.nullcontext,
        synchronize=lambda device=None: driver.synchronize(0),
        get_device_name=lambda device=None: f"{device_type.upper()} (fake)",
        get_device_properties=lambda device=None: types.SimpleNamespace(
            name=f"{device_type.upper()} (fake)", total_memory=2**30
        ),
        manual_seed_all=lambda seed: has_chip and driver.default_generator(0).manual_seed(seed),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        _is_in_bad_fork=lambda: False,
    )
    torch.utils.rename_privateuse1_backend(device_type)
    torch._register_device_module(device_type, module)
    torch.utils.generate_methods_for_privateuse1_backend()


def _driver() -> types.ModuleType:
    """ditorch's C++ part, without importing ditorch: a plugin knows nothing of it."""
    if "ditorch._ditorch" in sys.modules:
        return sys.modules["ditorch._ditorch"]
    (path,) = (ROOT / "ditorch").glob("_ditorch.cpython-*.so")
    spec = importlib.util.spec_from_file_location("_ditorch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
