"""What "cuda" means with cuda_compat, and what it refuses to pretend."""

from __future__ import annotations

import json

import pytest
from on_chip import run_python

REFUSALS = """
import json, types, torch, ditorch

def message(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None

before = {
    "is_available": torch.cuda.is_available(),
    "to cuda": message(lambda: torch.ones(1).to("cuda")) is not None,
}
ditorch.enable(cuda_compat=True)
ditorch.enable(cuda_compat=True)
unserved = ["CUDAGraph", "graph", "make_graphed_callables", "cudart", "MemPool", "ExternalStream",
            "memory_snapshot", "utilization", "current_blas_handle"]
after = {name: message(getattr(torch.cuda, name)) for name in unserved}
names = {
    name: message(lambda: torch.device(name)) for name in ("cudas", "cuda:", "cuda:x", "Cuda")
}
"""


def answers(code: str, chip: str | None, **extra: str) -> list:
    done = run_python(REFUSALS + code, chip, **extra)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chip", ["d-mini", None])
def test_what_cannot_be_served_is_named(chip: str | None) -> None:
    code = """
print(json.dumps(before))
print(json.dumps(after))
print(json.dumps(names))
x = torch.ones(2, device="cuda")
class Holder:
    graph: torch.cuda.CUDAGraph | None = None
print(json.dumps([x.device.type, x.is_cuda, isinstance(x, torch.cuda.CUDAGraph)]))
print(json.dumps([x.to(0).device.type, torch.nn.Linear(1, 1).to(0).weight.device.type]))
print(json.dumps([message(lambda: torch.ones(1).cuda(3)), message(lambda: torch.cuda.set_device(3)),
                  message(lambda: torch.cuda.get_device_properties(0).multi_processor_count),
                  message(lambda: ditorch.enable(cuda_compat=False))]))
left = [
    name for name in torch.cuda.__all__
    if getattr(getattr(torch.cuda, name), "__module__", "").startswith("torch.cuda")
    and not isinstance(getattr(torch.cuda, name), types.ModuleType)
    and not name.endswith(("Storage", "Tensor"))
]
print(json.dumps(left))
"""
    before, after, names, honest, numbered, errors, left = answers(code, chip)
    device = "cpu" if chip is None else "emuchip:0"
    assert before == {"is_available": False, "to cuda": True}
    for name, message in after.items():
        assert message.startswith(f"NotImplementedError: torch.cuda.{name} exists only on CUDA")
        assert device in message
    assert all(message for message in names.values()), names
    assert honest == [device.partition(":")[0], False, False]
    assert set(numbered) == {honest[0]}
    assert all(errors), errors
    assert "multi_processor_count" in errors[2]
    # nothing is left of CUDA's own code that would fail deep inside it, but for data
    assert left == ["CudaError", "DeferredCudaCallError", "cudaStatus"]


def test_the_environment_turns_it_on_and_ranges_reach_the_profiler() -> None:
    code = """
import torch, ditorch
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    with torch.cuda.nvtx.range("outer {}", 1):
        torch.cuda.nvtx.range_push("inner")
        torch.ones(2).cuda()
        torch.cuda.nvtx.range_pop()
events = {event.key for event in profile.key_averages()}
print({"outer 1", "inner"} <= events)
print(torch.ones(1).to(0).device, torch.nn.Linear(1, 1).cuda(0).weight.device)
print(torch.ones(1).pin_memory().is_pinned(), torch.ones(1).is_pinned())
packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)]).cuda()
print(packed.data.device, torch.ones(2).storage().cuda().device)
print(torch.get_device_module("cuda").__name__)
"""
    done = run_python(code, "c-mini", DITORCH_CUDA_COMPAT="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "True",
        "emuchip:0 emuchip:0",
        "True False",
        "emuchip:0 emuchip:0",
        "ditorch.device_module",
    ]
