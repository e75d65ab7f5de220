"""Libraries of other versions of the ABIs, incomplete ones, and what the ABIs offer besides."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from on_chip import ROOT, run_python
from vendor_bench import cut_library

from ditorch.chips import load_chip

ABI = ROOT / "csrc" / "ditorch" / "abi"
EMUCHIP = ROOT / "ditorch" / "lib" / "libemuchip.so"
WRAPPED = Path(__file__).parent / "vendors_in_c" / "wrapped.c"

Wrap = Callable[..., dict[str, str]]


@pytest.fixture
def wrap(tmp_path: Path) -> Wrap:
    """wrap(runtime="...", operators="...", attention="...", more=0, without="") -> the
    environment to load it by."""

    def make(
        runtime: str = "sizeof(ditorch_runtime)",
        operators: str = "sizeof(ditorch_operators)",
        attention: str = "sizeof(ditorch_attention)",
        more: int = 0,
        without: str = "",
    ) -> dict[str, str]:
        library = tmp_path / "libwrapped.so"
        macros = [
            f'-DINNER="{EMUCHIP}"',
            f"-DRUNTIME_BYTES={runtime}",
            f"-DOPERATORS_BYTES={operators}",
            f"-DATTENTION_BYTES={attention}",
            f"-DVERSION_MORE={more}",
            *([f"-DWITHOUT={without}"] if without else []),
        ]
        subprocess.run(
            ["cc", "-std=gnu11", "-shared", "-fPIC", f"-I{ABI}", *macros, "-o", str(library),
             str(WRAPPED), "-ldl"],
            check=True, timeout=60,
        )  # fmt: skip
        chip = load_chip("b-mini").path
        return {"DITORCH_VENDOR_LIBRARY": str(library), "EMUCHIP_CHIP": str(chip)}

    return make


def test_an_older_library_lacks_only_what_came_later(wrap: Wrap) -> None:
    code = (
        "import torch, ditorch\n"
        "x = torch.ones(4, 4, device='device')\n"
        "assert (x @ x).sum().item() == 64\n"
        "assert ditorch.pacing() is None and ditorch.device_clock() is None\n"
        "assert ditorch.peer_handle(x) is None\n"
        "assert ditorch.kernel_counts() == {'mm': 1}, ditorch.kernel_counts()\n"
        "torch.softmax(x, -1)\n"
        "assert ditorch.fallback_counts()['_softmax'] == 1\n"
    )
    older = wrap(
        runtime="offsetof(ditorch_runtime,work_begin)",
        operators="offsetof(ditorch_operators,softmax)",
    )
    done = run_python(code, None, **older)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("version", "on_host"), [(1, 1), (2, 0)])
def test_the_benchmark_of_both_versions_has_the_host_compute_for_the_first(
    version: int, on_host: int, tmp_path: Path
) -> None:
    code = (
        "import torch, ditorch\n"
        "x = torch.ones(4, device='device')\n"
        "assert (x + x).sum().item() == 8\n"
        "print(sum(name.startswith('add') for name in ditorch.fallback_counts()))\n"
    )
    done = run_python(code, None, **cut_library(tmp_path, version))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == on_host


def test_a_library_without_elementwise_programs_has_the_host_add_a_bias(wrap: Wrap) -> None:
    code = (
        "import torch, ditorch\n"
        "layer, x = torch.nn.Linear(4, 4), torch.randn(3, 4)\n"
        "expected, layer = layer(x), layer.to('device')\n"
        "try:\n"
        "    assert torch.allclose(layer(x.to('device')).cpu(), expected, atol=1e-6)\n"
        "    assert ditorch.kernel_counts() == {'addmm': 1}, ditorch.kernel_counts()\n"
        "except NotImplementedError as error:\n"
        "    print(error)\n"
    )
    older = wrap(operators="offsetof(ditorch_operators,map)")
    done = run_python(code, None, **older)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    done = run_python(code, None, DITORCH_STRICT="1", **older)
    assert done.returncode == 0, done.stderr
    assert "aten::addmm.out of (Float, Float, Float, Float) in module Linear" in done.stdout


def test_a_library_of_whole_sequences_is_not_asked_for_windows(wrap: Wrap) -> None:
    """Its descriptor ends before the window: it would attend to everything, and say nothing."""
    code = (
        "import torch, ditorch\n"
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
        "x = torch.randn(1, 6, 1, 4)\n"
        "flash = torch.ops.aten._flash_attention_forward\n"
        "def near(x):\n"
        "    return flash(x, x, x, None, None, 6, 6, 0.0, True, False, window_size_left=1)[0]\n"
        "found = near(x.to('device')).cpu()\n"
        "assert torch.allclose(found, near(x), atol=1e-6)\n"
        "attend(*[x.to('device').transpose(1, 2)] * 3, is_causal=True)\n"
        "assert list(ditorch.kernel_counts()) == "
        "['_scaled_dot_product_fused_attention_overrideable'], ditorch.kernel_counts()\n"
        "assert ditorch.has_fused_attention() and not ditorch.has_fused_attention(apart=True)\n"
    )
    older = wrap(operators="offsetof(ditorch_operators,attention_struct_size)")
    done = run_python(code, None, **older)
    assert done.returncode == 0, done.stderr


def test_a_library_that_knows_no_soft_cap_and_drops_nothing_is_not_asked_for_it(wrap: Wrap) -> None:
    """Its descriptor ends before them: it would leave them out, and say nothing."""
    code = (
        "import torch, ditorch\n"
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
        "x = torch.randn(1, 6, 1, 4)\n"
        "def near(x, cap, share):\n"
        "    torch.manual_seed(0)\n"
        "    return torch.ops.ditorch._flash_attention_forward(\n"
        "        *(x, x, x, None, None, 6, 6, share, True, False), scale=1.0,\n"
        "        window_size_left=1, window_size_right=0, soft_cap=cap)[0]\n"
        "kept = near(x.to('device'), 0.0, 0.0)\n"
        "assert ditorch.kernel_counts()['_flash_attention_forward'] == 1\n"
        "for cap, share in ((0.5, 0.0), (0.0, 0.5)):\n"
        "    found = near(x.to('device'), cap, share).cpu()\n"
        "    assert torch.allclose(found, near(x, cap, share), atol=1e-6)\n"
        "    assert not torch.allclose(found, kept.cpu(), atol=1e-2)\n"
        "attend(*[x.to('device').transpose(1, 2)] * 3, is_causal=True, dropout_p=0.5)\n"
        "assert ditorch.kernel_counts()['_flash_attention_forward'] == 1\n"
        "assert '_scaled_dot_product_fused_attention_overrideable' not in ditorch.kernel_counts()\n"
        "assert ditorch.has_fused_attention(apart=True)\n"
        "assert not ditorch.has_fused_attention(capped=True)\n"
        "assert not ditorch.has_fused_attention(dropout=True)\n"
    )
    older = wrap(attention="offsetof(ditorch_attention,soft_cap)")
    done = run_python(code, None, **older)
    assert done.returncode == 0, done.stderr


def test_a_later_library_may_know_more(wrap: Wrap) -> None:
    code = (
        "import torch, ditorch\n"
        "x = torch.ones(4, 4, device='device')\n"
        "assert torch.softmax(x @ x, -1).sum().item() == 4\n"
    )
    later = wrap(runtime="sizeof(ditorch_runtime)+64", operators="sizeof(ditorch_operators)+64")
    done = run_python(code, None, **later)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "does not speak ditorch's runtime ABI version 1"),
        ({"runtime": "8"}, "does not speak ditorch's runtime ABI version 1"),
        ({"operators": "8"}, "does not speak ditorch's operator ABI version 1"),
        (
            {"runtime": "offsetof(ditorch_runtime,event_record)"},
            "has no event_record, which ditorch's runtime ABI requires",
        ),
        ({"without": "memory_copy"}, "has no memory_copy, which ditorch's runtime ABI requires"),
    ],
)
def test_what_cannot_be_driven_is_refused(wrap: Wrap, change: dict[str, str], message: str) -> None:
    done = run_python("import ditorch", None, **wrap(**change))
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the vendor library ")
    assert message in last


def test_a_nic_is_told_where_a_tensor_lies() -> None:
    code = (
        "import ctypes, torch, ditorch\n"
        "x = torch.arange(8.0, device='device')\n"
        "handle = ditorch.peer_handle(x[2:6])\n"
        "assert (handle.kind, handle.size_bytes, handle.fd) == ('host_pointer', 16, -1)\n"
        "seen = (ctypes.c_float * 4).from_address(handle.address)\n"
        "assert list(seen) == [2, 3, 4, 5]\n"
        "assert ditorch.peer_handle(x.cpu()).kind == 'host_pointer'\n"
        "for wrong in (x[::2], x[:0]):\n"
        "    try:\n"
        "        ditorch.peer_handle(wrong)\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
    )
    done = run_python(code, "b-mini")
    assert done.returncode == 0, done.stderr
    assert "strides (2,)" in done.stdout
    assert "shape (0,)" in done.stdout


def test_the_profiler_lists_the_chips_kernels_with_their_roofline_time() -> None:
    chip = load_chip("b-mini")
    n = 256
    flops_s = 2 * n**3 / (chip.compute.float32_flops * chip.compute.efficiency)
    bytes_s = 4 * n * n / chip.memory.bandwidth_bytes_per_s
    matmul_s = chip.compute.launch_s + max(flops_s, 3 * bytes_s)
    softmax_s = chip.compute.launch_s + 2 * bytes_s
    code = (
        "import torch, ditorch\n"
        "from torch.profiler import ProfilerActivity, profile\n"
        f"x = torch.ones({n}, {n}, device='device')\n"
        "with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as seen:\n"
        "    y = torch.softmax(x @ x, -1)\n"
        "    y.cumprod(0)\n"
        "    torch.accelerator.synchronize()\n"
        "for event in seen.events():\n"
        "    if str(event.device_type) == 'DeviceType.EMUCHIP':\n"
        "        print('kernel', event.name.replace(' ', '_'), event.self_device_time_total)\n"
        "for row in seen.key_averages():\n"
        "    print('operator', row.key.replace(' ', '_'), row.device_time_total)\n"
        "with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as seen:\n"
        "    pass\n"
        "assert not [e for e in seen.events() if str(e.device_type) == 'DeviceType.EMUCHIP']\n"
    )
    done = run_python(code, "b-mini")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    kernels = {name: float(time_us) for kind, name, time_us in rows if kind == "kernel"}
    operators = {name: float(time_us) for kind, name, time_us in rows if kind == "operator"}
    assert set(kernels) == {"mm", "_softmax", "cumprod_(on_the_host)"}
    assert kernels["mm"] == pytest.approx(matmul_s * 1e6, rel=0.01)
    assert kernels["_softmax"] == pytest.approx(softmax_s * 1e6, rel=0.01)
    assert operators["aten::matmul"] == pytest.approx(matmul_s * 1e6, rel=0.01)
    assert operators["aten::softmax"] == pytest.approx(softmax_s * 1e6, rel=0.01)
    assert operators["aten::cumprod"] >= kernels["cumprod_(on_the_host)"]
