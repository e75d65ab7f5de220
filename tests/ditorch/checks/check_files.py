"""Tensors in files and between processes."""

import copy
import pickle
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import nn

import ditorch


def test_save_and_load(tmp_path: Path) -> None:
    x = torch.arange(6.0, device="device").view(2, 3)
    torch.save({"x": x, "view": x[1]}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["x"].device == ditorch.device
    assert torch.equal(loaded["x"], x)
    loaded["x"][1, 0] = 99  # views share their storage again
    assert loaded["view"][0].item() == 99
    on_cpu = torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=True)
    assert on_cpu["x"].device == torch.device("cpu")
    assert torch.equal(on_cpu["x"], x.cpu())


def test_state_dicts_travel_from_the_cpu_and_back() -> None:
    on_cpu = nn.Linear(3, 3)
    on_chip = nn.Linear(3, 3, device="device")
    on_chip.load_state_dict(on_cpu.state_dict())
    assert torch.equal(on_chip.weight.cpu(), on_cpu.weight)
    twin = copy.deepcopy(on_chip)
    assert twin.weight.device == ditorch.device
    assert twin.weight.data_ptr() != on_chip.weight.data_ptr()
    on_chip.cpu()
    assert torch.equal(on_chip.weight, twin.weight.cpu())


def test_pickle() -> None:
    x = torch.randn(5, device="device", requires_grad=True)
    y = pickle.loads(pickle.dumps(x))
    assert y.device == ditorch.device
    assert y.requires_grad
    assert torch.equal(x, y)


def _double(inbox: "mp.Queue[torch.Tensor]", outbox: "mp.Queue[torch.Tensor]") -> None:
    x = inbox.get(timeout=60)
    assert x.device == ditorch.device
    outbox.put(x * 2)
    inbox.get(timeout=60)  # the sender keeps its shared memory until the receiver has it


def test_spawned_processes() -> None:
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    child = context.Process(target=_double, args=(inbox, outbox))
    child.start()
    x = torch.arange(10.0, device="device")
    inbox.put(x[2:5])
    doubled = outbox.get(timeout=60)
    inbox.put(torch.zeros(0))
    child.join(60)
    assert child.exitcode == 0
    assert doubled.device == ditorch.device
    assert doubled.tolist() == [4.0, 6.0, 8.0]
