""" "device" wherever PyTorch takes a device."""

import io
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ditorch

ON_CHIP = "DITORCH_CHIP" in os.environ


def is_honest(device: torch.device) -> bool:
    return device == ditorch.device


def test_the_papers_example() -> None:
    x = torch.randn(4, 4, device="device")
    y = x + x
    assert torch.equal(y.cpu(), 2 * x.cpu())
    assert is_honest(y.device)


def test_the_honest_device() -> None:
    assert str(ditorch.device) == ("emuchip:0" if ON_CHIP else "cpu")
    assert ditorch.is_emulated() == ON_CHIP
    assert torch.device("device") == torch.device(ditorch.device.type)
    assert torch.device("device:0") == torch.device(ditorch.device.type, 0)
    assert torch.device("device", 0) == torch.device(ditorch.device.type, 0)
    shown = repr(torch.ones(1, device="device"))
    assert ("device='emuchip:0'" in shown) == ON_CHIP


@pytest.mark.skipif(not ON_CHIP, reason="the CPU is no chip")
def test_the_chip_of_the_environment() -> None:
    chip = ditorch.chip()
    assert chip.chip_type.lower() == os.environ["DITORCH_CHIP"]
    assert chip.memory_bytes == torch.accelerator.get_memory_info()[1]


def test_factories_and_moves() -> None:
    made = [
        torch.empty(2, device="device"),
        torch.zeros(2, device="device"),
        torch.full((2,), 3.0, device="device"),
        torch.arange(5, device="device"),
        torch.linspace(0, 1, 5, device="device"),
        torch.eye(3, device="device"),
        torch.randperm(5, device="device"),
        torch.randint(9, (3,), device="device"),
        torch.tensor([1, 2], device="device"),
        torch.as_tensor([1.0], device="device"),
        torch.tril_indices(3, 3, device="device"),
        torch.ones(2).to("device"),
        torch.ones(2).to("device:0"),
        torch.ones(2).to(device="device", dtype=torch.float64),
        torch.ones(2).new_zeros(3, device="device"),
        torch.zeros_like(torch.ones(2), device="device"),
        torch.nn.Linear(2, 2).to("device").weight,
        torch.nn.Linear(2, 2, device="device").weight,
    ]
    assert all(is_honest(tensor.device) for tensor in made)


def test_contexts_and_defaults() -> None:
    with torch.device("device"):
        assert is_honest(torch.ones(2).device)
    torch.set_default_device("device")
    try:
        assert is_honest(torch.ones(2).device)
    finally:
        torch.set_default_device(None)
    with torch.autocast(device_type="device", dtype=torch.bfloat16):
        a = torch.ones(2, 2, device="device")
        assert (a @ a).dtype == torch.bfloat16


def test_generators() -> None:
    generator = torch.Generator(device="device").manual_seed(5)
    first = torch.rand(4, device="device", generator=generator)
    assert torch.equal(first, torch.rand(4, device="device", generator=generator.manual_seed(5)))


def test_map_location() -> None:
    file = io.BytesIO()
    torch.save({"x": torch.arange(3)}, file)
    for location in ("device", "device:0", torch.device("device")):
        file.seek(0)
        loaded = torch.load(file, map_location=location, weights_only=True)["x"]
        assert loaded.device.type == ditorch.device.type
        assert loaded.tolist() == [0, 1, 2]


def test_functions_that_compare_names_in_python() -> None:
    with torch.autocast("device", dtype=torch.bfloat16) as region:
        assert region.device == ditorch.device.type
    assert torch.amp.GradScaler(device="device")._device == ditorch.device.type

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("device", (1, 1), mesh_dim_names=("dp", "tp"))
        assert mesh.device_type == mesh["tp"].device_type == ditorch.device.type
        assert DeviceMesh(device_type="device", mesh=[0]).device_type == ditorch.device.type
    finally:
        dist.destroy_process_group()


def test_operators_that_take_a_device_deep_inside() -> None:
    assert is_honest(torch.ops.aten.empty.memory_format([2], device="device").device)
    assert is_honest(torch.nn.Module().to_empty(device="device").to("device") and ditorch.device)
    scripted = torch.jit.script(_made_in_script)
    assert is_honest(scripted().device)


def _made_in_script() -> torch.Tensor:
    return torch.zeros(2, device=torch.device("device"))


def test_other_names_are_left_alone() -> None:
    assert torch.device("cpu") == torch.ones(1).device
    assert torch.device("meta").type == "meta"
    for name in ("devices", "device:", "device:x", "Device", "my device"):
        with pytest.raises(RuntimeError):
            torch.device(name)
