"""A plugin whose device is written in Python: no streams, no timed events, no account of memory.

The plugin is played by fake_plugins/torch_mojo_backend.
"""

from __future__ import annotations

from pathlib import Path

from on_chip import ROOT, run_python

FAKE_PATH = f"{ROOT}:{Path(__file__).parent / 'fake_plugins'}"


def on_mojo(code: str, **extra: str) -> list[str]:
    done = run_python(code, None, PYTHONPATH=FAKE_PATH, **extra)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_is_adopted_where_it_is_named_and_not_looked_for_elsewhere() -> None:
    code = "import torch, ditorch; print(ditorch.vendor(), torch.ones(2, device='device').device)"
    assert on_mojo(code, DITORCH_VENDOR="mojo") == ["mojo mojo:0"]
    code = "import sys, ditorch; print(ditorch.vendor(), 'torch_mojo_backend' in sys.modules)"
    assert on_mojo(code, DITORCH_VENDOR="cpu") == ["cpu False"]


def test_a_rank_keeps_the_hosts_time_and_no_account_of_memory() -> None:
    code = """
from heteropp.runtime.ranks.device import open_device
chip = open_device("chip", "unused", "MOJO")
chip.begin_step()
first, second = chip.clock.mark(), chip.clock.mark()
print(chip.device, chip.peak_memory_bytes(), chip.clock.seconds(second) > chip.clock.seconds(first))
"""
    assert on_mojo(code, DITORCH_VENDOR="mojo") == ["mojo:0 0 True"]


def test_collectives_do_without_streams() -> None:
    code = """
import torch, ditorch, dicomm.distributed
import torch.distributed as dist
dist.init_process_group("dicomm", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2, device="device")
dist.all_reduce(x)
gathered = torch.zeros(2, device="device")
dist.all_gather_into_tensor(gathered, x)
print(gathered.cpu())
"""
    strategy = {"DICOMM_STRATEGY": "cpu-mediated"}
    assert on_mojo(code, DITORCH_VENDOR="mojo", **strategy) == ["tensor([1., 1.])"]


def test_precision_tools_see_its_operators() -> None:
    code = """
import torch, ditorch
from ditorch.precision import Fallback
x = torch.ones(2, device="device")
with Fallback(operators="aten.neg.default,aten.add_.Tensor") as tool:
    x.add_(-x * 3)
print(x.cpu(), tool.findings().fallbacks)
"""
    assert on_mojo(code, DITORCH_VENDOR="mojo") == [
        "tensor([-2., -2.]) {'aten.neg.default': 1, 'aten.add_.Tensor': 1}"
    ]


def test_parameters_become_views_of_the_flat_buffer() -> None:
    code = """
import torch, ditorch
from heteropp.optimizer.flat import place
parameter = torch.nn.Parameter(torch.zeros(2, device="device"))
buffer = torch.ones(4, device="device")
place(parameter, buffer[:2])
with torch.no_grad():
    buffer.mul_(3)
print(parameter.detach().cpu(), parameter.requires_grad)
"""
    assert on_mojo(code, DITORCH_VENDOR="mojo") == ["tensor([3., 3.]) True"]
