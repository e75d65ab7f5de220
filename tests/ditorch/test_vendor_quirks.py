"""What a vendor lacks is declared as data and handled in one place."""

from __future__ import annotations

import json
from pathlib import Path

from on_chip import ROOT, run_python

FAKES = Path(__file__).parent / "fake_plugins"
PLUGINS = {
    "PYTHONPATH": f"{ROOT}:{FAKES}",
    "FAKE_PLUGIN_CHIP_FILE": str(ROOT / "ditorch" / "chips" / "b-mini.toml"),
}


def run_on(vendor: str, code: str) -> list:
    done = run_python(code, None, DITORCH_VENDOR=vendor, **PLUGINS)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_missing_dtype_is_substituted_with_one_warning_or_refused() -> None:
    code = """
import io, json, threading, warnings
import torch, torch_other, ditorch
from ditorch.vendors import quirks
from ditorch.vendors.mps import QUIRKS
from ditorch.vendors.vendor import Quirks

source = torch.arange(6, dtype=torch.float64).reshape(2, 3).requires_grad_()
file = io.BytesIO()
torch.save({"x": source.detach(), "y": source.detach().T}, file)
before = torch.ones(1, dtype=torch.float64, device="device").dtype

quirks.handle("other", QUIRKS)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    made = {
        "factory": torch.ones(2, dtype=torch.float64, device="device"),
        "arange": torch.arange(3, dtype=torch.float64, device="device"),
        "tensor": torch.tensor([1.5], dtype=torch.float64, device="device"),
        "moved": source.to("device"),
        "converted": torch.ones(2, device="device").double(),
        "to dtype": torch.ones(2, device="device").to(torch.float64),
        "module": torch.nn.Linear(2, 2).double().to("device").weight,
        "strided": source.detach().T.to("device"),
    }
    thread = threading.Thread(
        target=lambda: made.update(thread=torch.zeros(2, dtype=torch.float64, device="device"))
    )
    thread.start()
    thread.join()
    torch.set_default_dtype(torch.float64)
    made["default"] = torch.ones(2, device="device")
    torch.set_default_dtype(torch.float32)
    file.seek(0)
    loaded = torch.load(file, map_location="device")
    made["loaded"] = loaded["x"]
    complex_made = torch.ones(2, dtype=torch.complex128, device="device").dtype
print(json.dumps(str(before)))
print(json.dumps({name: str(tensor.dtype) for name, tensor in made.items()}))
print(json.dumps([made["moved"].tolist(), made["strided"].tolist(), made["loaded"].tolist(),
                  loaded["y"].tolist()]))
made["moved"].square().sum().backward()
print(json.dumps([str(source.grad.dtype), source.grad.tolist()]))
print(json.dumps([str(complex_made), str(torch.ones(2, dtype=torch.float64).dtype)]))
print(json.dumps([str(w.message).splitlines()[0] for w in warned]))

quirks.handle("other", Quirks(refused={torch.float16: torch.bfloat16}))
try:
    torch.ones(2, device="device").half()
except TypeError as error:
    print(json.dumps(str(error).splitlines()[0]))
"""
    before, dtypes, values, gradient, others, warned, refused = run_on("privateuse1", code)
    assert before == "torch.float64"
    assert set(dtypes.values()) == {"torch.float32"}, dtypes
    rows, columns = [[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]
    assert values == [rows, columns, rows, columns]
    assert gradient == ["torch.float64", [[0, 2, 4], [6, 8, 10]]]
    assert others == ["torch.complex64", "torch.float64"]
    assert len(warned) == 2, warned  # one for each dtype
    assert warned[0].startswith("the device other has no Double tensors; ditorch makes them Float")
    assert refused.startswith("the device other has no Half tensors; use BFloat16")


def test_reductions_a_vendor_lacks() -> None:
    """The fake's collectives are recorded: the vendor's own must never see what they lack."""
    code = """
import json
import torch, ditorch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

seen = []
def record(name):
    def reduce(group, *arguments):
        options = arguments[-1]
        tensors = [t for a in arguments[:-1] for t in (a if isinstance(a, list) else [a])]
        seen.append([name, str(options.reduceOp.op), [t.flatten()[0].item() for t in tensors]])
    return reduce

from ditorch.vendors import quirks
from ditorch.vendors.npu import VENDOR
for name in ("allreduce", "_reduce_scatter_base"):
    setattr(dist.ProcessGroup, name, record(name))
dist.ProcessGroup.size = lambda group: 4
quirks.handle("npu", VENDOR.quirks)

group = dist.group.WORLD
x = torch.full((8,), 8.0, device="device")
options = dist.AllreduceOptions()
options.reduceOp = dist.ReduceOp.AVG
group.allreduce([x], options)
options = dist.ReduceScatterOptions()
options.reduceOp = dist.ReduceOp.AVG
group._reduce_scatter_base(torch.zeros(2, device="device"), x, options)
options = dist.AllreduceOptions()
options.reduceOp = dist.ReduceOp.MAX
group.allreduce([x], options)
host = dist.AllreduceOptions()
host.reduceOp = dist.ReduceOp.AVG
group.allreduce([torch.full((2,), 8.0)], host)
for line in seen:
    print(json.dumps(line))
try:
    group.allreduce([x.double()], options)
except TypeError as error:
    print(json.dumps(str(error)))
"""
    summed, scattered, maximum, host, refused = run_on("npu", code)
    assert summed == ["allreduce", "RedOpType.SUM", [2.0]]  # 8 / 4 ranks, in place
    assert scattered == ["_reduce_scatter_base", "RedOpType.SUM", [0.0, 0.5]]  # its input is kept
    assert maximum == ["allreduce", "RedOpType.MAX", [2.0]]
    assert host == ["allreduce", "RedOpType.AVG", [8.0]]  # host tensors go to another backend
    assert "npu cannot reduce torch.float64 between chips; use torch.float32" in refused
