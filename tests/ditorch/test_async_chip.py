"""ditorch on a chip that works behind the host's back, in memory that the host cannot touch."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import async_chip
import pytest
from on_chip import ROOT, run_checks, run_python
from sampled import sampled
from test_new_vendor import conformance
from training_step import STEPS, losses

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


FOR_A_NIC = """
import mmap, os, torch, ditorch
x = torch.arange(8.0, device="device")
torch.accelerator.synchronize()
handles = [ditorch.peer_handle(x[2:6]) for _ in range(2)]
assert handles[0].fd != handles[1].fd  # each the caller's own
for handle in handles:
    assert (handle.kind, handle.size_bytes, handle.address) == ("dmabuf", 16, x[2:].data_ptr())
    with mmap.mmap(handle.fd, 0, prot=mmap.PROT_READ) as whole:
        seen = bytearray(whole[handle.offset_bytes : handle.offset_bytes + handle.size_bytes])
    assert torch.frombuffer(seen, dtype=torch.float32).tolist() == [2, 3, 4, 5]
    os.close(handle.fd)
"""


def test_a_nic_is_given_a_descriptor_of_the_chips_memory() -> None:
    done = run_python(FOR_A_NIC, None, **async_chip.environment())
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_late_chip_trains_to_the_cpus_bits() -> None:
    run_checks(
        None, "check_training.py", "check_random.py", **async_chip.environment(kernels=False)
    )


@pytest.mark.parametrize("seed", sampled([1, 2, 3], 2, everyday=1))
def test_a_late_chip_conforms(seed: int) -> None:
    wanted = ("copy", "stream", "event", "memory") if seed == 1 else ()
    done = run_python(conformance(*wanted), None, **async_chip.environment(seed))
    assert done.returncode == 0, done.stderr[-3000:]


FILES = ["check_files.py", "check_autocast.py"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_checks_on_a_late_chip(seed: int) -> None:
    """Runs the checks that want neither more memory nor more kernels than this chip has."""
    files = [*FILES, "check_random.py", "check_training.py"]
    run_checks(None, *files, **async_chip.environment(seed, kernels=False))


@pytest.mark.exhaustive
def test_attention_on_a_late_chip() -> None:
    files = ["check_attention.py", "check_flash_attention.py", "check_dropped_attention.py"]
    run_checks(None, *files, "check_capped_attention.py", **async_chip.environment())


def test_optimizers_on_a_late_chip() -> None:
    run_checks(None, "check_fused_adam.py", **async_chip.environment())


@pytest.mark.parametrize("seed", sampled([1, 2], 2))
def test_operators_on_a_late_chip(seed: int) -> None:
    chip = async_chip.environment(seed, kernels=False)
    run_checks(None, "check_against_cpu.py", ONE_OPERATOR_IN="3", **chip)


READS = """
import async_chip
print(*async_chip.copies_to_host())
"""


@pytest.mark.parametrize("family", ["Llama", pytest.param("Qwen3Moe", marks=pytest.mark.long)])
def test_the_host_computes_nothing_of_a_training_step_and_reads_two_numbers(family: str) -> None:
    """The host reads the loss, and whether the scaled gradients are finite."""
    said: list[str] = []

    def run(code: str) -> subprocess.CompletedProcess[str]:
        chip = async_chip.environment(delay_us=20)
        support = str(Path(async_chip.__file__).parent)
        paths = os.pathsep.join([str(ROOT), support])
        done = run_python(code + READS, None, **chip, DITORCH_STRICT="1", PYTHONPATH=paths)
        done.stdout, _, counts = done.stdout.strip().rpartition("\n")
        said.append(counts)
        return done

    expected = losses(partial(run_python, chip=None), family, "eager")
    assert losses(run, family, "eager") == pytest.approx(expected, rel=1e-4)
    reads, largest = map(int, said[0].split())
    assert reads == 2 * STEPS and largest <= 4
