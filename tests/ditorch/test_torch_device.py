"""The device as a user meets it, on every emulated chip and on a machine without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from on_chip import run_checks, run_new_python, run_python
from sampled import sampled


@pytest.mark.parametrize(
    "chip", sampled(["a-mini", None, "b-mini", "c-mini", "d-mini"], 3, everyday=2)
)
def test_the_unified_name_is_the_honest_device(chip: str | None) -> None:
    run_checks(chip, "check_unified_name.py")


def test_memory_streams_random_numbers_and_files() -> None:
    run_checks("b-mini", "check_memory.py", "check_streams.py", "check_random.py", "check_files.py")


def test_memory_is_cut_and_joined_as_on_cuda() -> None:
    run_checks("b", "check_fragmentation.py")


def test_a_module_moved_to_a_chip_keeps_its_parameters() -> None:
    run_checks("b-mini", "check_module_to.py")


def test_a_chip_has_the_dtypes_that_cuda_has() -> None:
    run_checks("c-mini", "check_dtypes.py", "check_batch_norm.py")


@pytest.mark.exhaustive
def test_a_chip_has_every_dtype_that_cuda_has() -> None:
    run_checks("c-mini", "check_dtypes.py", EVERY_PAIR="1")


def test_operators_write_where_torch_says() -> None:
    run_checks("c-mini", "check_operators.py", "check_autocast.py")


def test_a_neutral_chip_computes_what_the_cpu_computes(make_chip: Callable[..., Path]) -> None:
    chip = make_chip("a", neutral="true")
    run_checks(chip, "check_against_cpu.py", "check_training.py", ONE_OPERATOR_IN="6")


def test_a_chip_with_its_own_kernels_agrees_with_the_cpu() -> None:
    run_checks("d", "check_against_cpu.py")


def test_elementwise_operators_are_the_chips_own() -> None:
    run_checks("b", "check_elementwise.py", "check_composed.py", "check_indexed.py")


FIRST_IN_A_GRAPH = """
import torch, ditorch
from torch.nn.functional import scaled_dot_product_attention as attend
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    fake = torch.empty(1, 2, 8, 4, device="device")
    assert attend(fake, fake, fake).shape == (1, 2, 8, 4)
step = torch.compile(lambda x: attend(x, x, x, is_causal=True), backend="aot_eager")
values = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))
ours, theirs = values.to("device").requires_grad_(), values.requires_grad_()
step(ours).square().sum().backward()
attend(theirs, theirs, theirs, is_causal=True).square().sum().backward()
torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-4)
"""


def test_attention_and_grouped_products_are_one_kernel_of_the_chip() -> None:
    files = ["check_attention.py", "check_flash_attention.py", "check_attention_charge.py"]
    run_checks("c-mini", *files, "check_grouped.py")


@pytest.mark.long
def test_attention_drops_weights_and_caps_scores_in_one_kernel_of_the_chip() -> None:
    run_checks("d-mini", "check_dropped_attention.py", "check_capped_attention.py")


def test_a_step_of_an_optimizer_is_one_kernel_of_the_chip() -> None:
    run_checks("c-mini", "check_fused_adam.py")


def test_the_first_attention_may_be_a_compilers() -> None:
    done = run_python(FIRST_IN_A_GRAPH, "c-mini")
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_launched_operator_is_charged_once(make_chip: Callable[..., Path]) -> None:
    run_checks(make_chip("a", launch_s="1.0", bandwidth_bytes_per_s="1e30"), "check_launches.py")
    run_checks(make_chip("a", launch_s="0.0", bandwidth_bytes_per_s="1e6"), "check_bytes.py")
    slow = {"launch_s": "0.0", "bandwidth_bytes_per_s": "1e30", "efficiency": "1.0"}
    run_checks(make_chip("a", float32_flops="1e6", **slow), "check_flops.py")


def test_a_file_of_one_chip_is_read_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    save = (
        "import torch, ditorch\n"
        "x = torch.arange(3.0, device='device')\n"
        f"torch.save({{'x': x, 'low': x.bfloat16()}}, {str(file)!r})\n"
    )
    done = run_python(save, "a-mini")
    assert done.returncode == 0, done.stderr

    def load(imports: str, chip: str | None, location: str | None) -> str:
        code = (
            f"import {imports}\n"
            f"saved = torch.load({str(file)!r}, map_location={location!r}, weights_only=True)\n"
            "print(*((v.device, v.tolist()) for v in saved.values()))\n"
        )
        done = run_python(code, chip)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def both(device: str) -> str:
        return " ".join([f"({device}, [0.0, 1.0, 2.0])"] * 2)

    on_chip, on_cpu = both("device(type='emuchip', index=0)"), both("device(type='cpu')")
    assert load("torch, ditorch", "b-mini", None) == on_chip
    assert load("torch, ditorch", "b-mini", "cpu") == on_cpu
    assert load("torch, ditorch", None, "device") == on_cpu
    assert load("torch", None, "cpu") == on_cpu  # the reader need not know ditorch


@pytest.mark.parametrize(
    "ending",
    sampled(["pass", "raise SystemExit(3)", "raise ValueError('mine')"], 2, everyday=1),
)
def test_a_process_that_ends_right_after_backward_ends_as_it_says(ending: str) -> None:
    code = (
        "import torch, ditorch\n"
        "x = torch.randn(64, 64, device='device', requires_grad=True)\n"
        "(x @ x).sum().backward()\n"
        f"{ending}\n"
    )
    for _ in range(2):  # Python's exit raced with autograd's threads, so once proves little
        done = run_new_python(code, "b-mini")
        expected = {"pass": 0, "raise SystemExit(3)": 3}.get(ending, 1)
        assert done.returncode == expected, done.stderr
        assert "terminate called" not in done.stderr


def test_a_process_may_have_two_chips() -> None:
    code = (
        "import torch, ditorch\n"
        "x = torch.arange(6.0, device='device:0').view(2, 3)\n"
        "y = x.mT.to('device:1')\n"
        "assert y.device.index == 1 and y.tolist() == [[0, 3], [1, 4], [2, 5]]\n"
        "y.mT[0].copy_(x[1].double())\n"
        "assert y.tolist() == [[3, 3], [4, 4], [5, 5]]\n"
        "for mixed in (lambda: x + y.mT, lambda: x @ y, lambda: x.add_(y.mT)):\n"
        "    try:\n"
        "        print(mixed())\n"
        "    except RuntimeError as error:\n"
        "        assert 'emuchip:0 and emuchip:1' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError('two chips compute together')\n"
    )
    done = run_python(code, "b-mini", EMUCHIP_DEVICES="2")
    assert done.returncode == 0, done.stderr


def test_two_vendors_differ_in_the_last_bits_only() -> None:
    code = (
        "import torch, ditorch\n"
        "torch.manual_seed(0)\n"
        "x = torch.randn(64, 512, device='device')\n"
        "y = torch.softmax(x @ x.T / 20, -1)\n"
        "print(y.cpu().numpy().tobytes().hex())\n"
    )
    outputs = []
    for chip in ("a-mini", "b-mini", "d-mini"):
        done = run_python(code, chip)
        assert done.returncode == 0, done.stderr
        outputs.append(bytes.fromhex(done.stdout.strip()))
    assert len(set(outputs)) == len(outputs)

    import numpy

    first, *others = (numpy.frombuffer(output, dtype=numpy.float32) for output in outputs)
    for other in others:
        numpy.testing.assert_allclose(other, first, rtol=2e-2, atol=1e-4)
