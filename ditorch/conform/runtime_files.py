"""Checks of tensors in files and between processes."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ditorch.conform.check import Group
from ditorch.conform.runtime_here import DEVICE, expect, expect_equal, expect_error, ramp

serialization = Group("serialization")

SPAWN_DEADLINE_S = 120


@serialization("a saved tensor is loaded to the device it was on")
def _save() -> None:
    x, y = ramp(2, 3), ramp(4).bfloat16()
    loaded = _saved_and_loaded({"x": x, "y": y, "views": [x[1], x.t()]})
    expect_equal(loaded["x"].device, DEVICE, "the device of the loaded tensor")
    expect_equal(loaded["x"], x, "the loaded tensor")
    expect_equal(loaded["y"], y, "the loaded bfloat16 tensor")
    loaded["x"][1, 0] = 99
    expect_equal(loaded["views"][0][0].item(), 99, "a loaded view after its base was written to")


@serialization("map_location moves it")
def _map_location() -> None:
    on_host = _saved_and_loaded({"x": ramp(3)}, map_location="cpu")["x"]
    expect_equal((on_host.device.type, on_host.tolist()), ("cpu", [0, 1, 2]), "what is loaded")
    for location in ("device", str(DEVICE), DEVICE, {"cpu": str(DEVICE)}):
        loaded = _saved_and_loaded({"x": torch.arange(3.0)}, map_location=location)["x"]
        expect_equal(loaded.device.type, DEVICE.type, f"the device for {location!r}")


@serialization("a model and its optimizer are restored")
def _state_dicts() -> None:
    def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        model(ramp(2, 3)).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    model = nn.Linear(3, 3, device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    saved = _saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin = nn.Linear(3, 3, device=DEVICE)
    twin.load_state_dict(saved["model"])
    twin_optimizer = torch.optim.AdamW(twin.parameters())
    twin_optimizer.load_state_dict(saved["optimizer"])
    expect_equal(step(twin, twin_optimizer), step(model, optimizer), "the weights a step later")


@serialization("pickle keeps device, dtype and requires_grad")
def _pickle() -> None:
    x = ramp(3).half().requires_grad_()
    y = pickle.loads(pickle.dumps(x))
    expect_equal((y.device, y.dtype, y.requires_grad), (DEVICE, torch.float16, True), "the copy")
    expect_equal(y.detach(), x.detach(), "its elements")


@serialization("safetensors files are written from the device and read to it")
def _safetensors() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        x = ramp(2, 3)
        save_file({"x": x, "low": x.bfloat16()}, path)
        expect_equal(load_file(path)["x"], x.cpu(), "the file on the host")
        for name in (str(DEVICE), "device"):
            loaded = load_file(path, device=name)
            expect_equal(loaded["x"].device.type, DEVICE.type, f"the device for {name!r}")
            expect_equal(loaded["low"], x.bfloat16(), "the tensor read to the device")


@serialization("numpy is reached through the host")
def _numpy() -> None:
    x = ramp(3)
    expect_equal(x.cpu().numpy().tolist(), [0, 1, 2], "the array")
    if DEVICE.type != "cpu":
        expect_error(TypeError, x.numpy, "an array over device memory")


@serialization("torch.multiprocessing carries tensors to a process of its own and back")
def _processes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ditorch.conform.runtime_spawn"],
        capture_output=True,
        text=True,
        timeout=SPAWN_DEADLINE_S,
    )
    last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    expect(done.returncode == 0, f"two processes, one tensor: {last}")


def _saved_and_loaded(value: object, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)
