"""These tests move data over RDMA devices: they run in the RDMA machine only (tools/test-verbs)."""

import subprocess
import time
from pathlib import Path

import forkserver
import jobs
import pytest
import ranks

jobs.DEADLINE_S = ranks.DEADLINE_S = 240  # the guest has one processor, of a host that may be busy

# The guest maps a process's memory in small pieces, of which its host allows a process 65,530: the
# ranks begin with no more than they use.
forkserver.IMPORTED = ["numpy", "dicomm.distributed"]

INFINIBAND = Path("/sys/class/infiniband")
DEVICES = ("rxe0", "rxe1", "rxe2", "rxe3")


def pytest_collection_modifyitems(items):
    """What needs the most memory first: the guest maps what it reuses in ever smaller pieces."""
    items.sort(key=lambda item: item.path.name != "test_verbs_p2p.py")


@pytest.fixture(autouse=True, scope="session")
def rdma_machine():
    """A missing machine is a failure: these tests have no second way to pass."""
    absent = [device for device in DEVICES if not (INFINIBAND / device).exists()]
    if absent:
        pytest.fail(
            f"there is no RDMA device {', '.join(absent)} here; run `bash tools/test-verbs`, or "
            "`tools/rdma-machine --guest .venv/bin/python -m pytest tests/verbs`",
            pytrace=False,
        )


@pytest.fixture
def unplug():
    """unplug("eth0") takes that cable away; afterwards it is plugged in again."""
    unplugged = []

    def down(interface):
        subprocess.run(["ip", "link", "set", interface, "down"], check=True)
        unplugged.append(interface)

    yield down
    for interface in unplugged:
        subprocess.run(["ip", "link", "set", interface, "up"], check=True)
    if unplugged:
        make_devices_again()


def make_devices_again():
    """Deletes and adds the devices.

    If rdma_cm sends while a cable is unplugged, rxe never sends its packets again.
    """
    for device in DEVICES:
        interface = device.replace("rxe", "eth")
        subprocess.run(["rdma", "link", "delete", device], check=True)
        subprocess.run(
            ["rdma", "link", "add", device, "type", "rxe", "netdev", interface], check=True
        )
    deadline = time.monotonic() + 30
    while any(
        "ACTIVE" not in (INFINIBAND / device / "ports/1/state").read_text() for device in DEVICES
    ):
        assert time.monotonic() < deadline, "a port stays down"
        time.sleep(0.01)
