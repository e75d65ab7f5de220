"""ditorch on a chip that works behind the host's back, in memory that the host cannot touch."""

from __future__ import annotations

import signal

import async_chip
import pytest
from on_chip import run_checks, run_python
from test_new_vendor import conformance

LONG = pytest.mark.long

IS_WHAT_IT_SAYS = """
import ctypes, os, torch, ditorch
library = ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"])
x = torch.ones(8, 8, device="device")
torch.accelerator.synchronize()
library.async_chip_hold(60_000)
y = x @ x
done = torch.Event(device="device")
done.record()
with torch.Stream(device="device"):
    assert (x @ x).sum().item() == 512  # nothing orders it after what is held
assert not done.query() and not torch.accelerator.current_stream().query()
library.async_chip_release()
assert y.sum().item() == 512 and done.query()
print("late", flush=True)
ctypes.c_float.from_address(y.data_ptr()).value
"""


def test_the_chip_is_late_and_its_memory_far() -> None:
    done = run_python(IS_WHAT_IT_SAYS, None, **async_chip.environment(delay_us=0))
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "late\n"), done.stderr[-3000:]


def test_a_late_chip_trains_to_the_cpus_bits() -> None:
    run_checks(
        None, "check_training.py", "check_random.py", **async_chip.environment(kernels=False)
    )


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=LONG) for seed in (2, 3))])
def test_a_late_chip_conforms(seed: int) -> None:
    wanted = ("copy", "stream", "event", "memory") if seed == 1 else ()
    done = run_python(conformance(*wanted), None, **async_chip.environment(seed))
    assert done.returncode == 0, done.stderr[-3000:]


@LONG
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_checks_on_a_late_chip(seed: int) -> None:
    """Runs the checks that want neither more memory nor more kernels than this chip has."""
    files = ["check_random.py", "check_files.py", "check_autocast.py", "check_training.py"]
    run_checks(None, *files, **async_chip.environment(seed, kernels=False))


@LONG
@pytest.mark.parametrize("seed", [1, 2])
def test_operators_on_a_late_chip(seed: int) -> None:
    chip = async_chip.environment(seed, kernels=False)
    run_checks(None, "check_against_cpu.py", ONE_OPERATOR_IN="3", **chip)
