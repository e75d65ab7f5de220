"""The machines of a list of hosts, each asked by ssh what its vendor's tool sees."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from heteropp.inventory.machines import InventoryError, Machine
from heteropp.inventory.product_names import chip_of

AT_ONCE = 16
DEADLINE_S = 60
# Every vendor's tool that is there prints its devices; then the rates of RDMA devices, and the
# host's memory.
QUESTION = """
command -v nvidia-smi >/dev/null && nvidia-smi -L
command -v rocm-smi >/dev/null && rocm-smi --showproductname
command -v npu-smi >/dev/null && npu-smi info
command -v cnmon >/dev/null && cnmon -l
command -v mthreads-gmi >/dev/null && mthreads-gmi -L
command -v mx-smi >/dev/null && mx-smi -L
command -v hl-smi >/dev/null && hl-smi -L
for rate in /sys/class/infiniband/*/ports/1/rate; do
  [ -e "$rate" ] && echo "NIC $(cat "$rate")"
done
grep MemTotal /proc/meminfo
true
"""
RATE = re.compile(r"^NIC (\d+(?:\.\d+)?) Gb/sec", re.MULTILINE)
MEMORY = re.compile(r"^MemTotal: +(\d+) kB", re.MULTILINE)
# a line of a device: nvidia-smi, mthreads-gmi and hl-smi; rocm-smi; npu-smi; cnmon and mx-smi
DEVICE = re.compile(
    r"^(?:(?:GPU|AIP|Card|MLU|card)[ #]?\d+\s*:?|GPU\[\d+\].*[Cc]ard [Ss]eries[^:]*:|"
    r"\|\s*\d+\s+(?=\S*9\d\d))\s*(.*)$",
    re.MULTILINE,
)


def machines_at(
    hosts: Sequence[str], chip: str | None = None, done: Callable[[], None] = lambda: None
) -> list[Machine]:
    """Returns the machines that have chips, in the order of the hosts.

    chip: what chips are whose product is not known. done: called after each host. Raises
    InventoryError where a host does not answer or says what no chip file describes.
    """

    def ask(host: str) -> Machine | None:
        found = _machine(host, _answer(host), chip)
        done()
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [machine for machine in pool.map(ask, hosts) if machine]


def _answer(host: str) -> str:
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, "sh", "-s"]
    try:
        asked = subprocess.run(
            command,
            input=QUESTION,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # a host may print bytes that are no text
            timeout=DEADLINE_S,
        )
    except FileNotFoundError:
        raise InventoryError("ssh is not installed; expected it, to ask the hosts") from None
    except subprocess.TimeoutExpired:
        raise InventoryError(f"host {host} did not answer within {DEADLINE_S} s") from None
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or ["nothing"]
        raise InventoryError(f"host {host} cannot be asked by ssh: {said[-1]}")
    return asked.stdout


def _machine(host: str, answer: str, chip: str | None) -> Machine | None:
    products = [product.partition("(UUID")[0].strip() for product in DEVICE.findall(answer)]
    if not products:
        return None
    known = Counter(chip_of(product) or chip for product in products)
    if None in known:
        unknown = next(product for product in products if chip_of(product) is None)
        raise InventoryError(
            f"host {host} has a device {unknown!r}; name the chip file that describes it, --chip"
        )
    if len(known) > 1:
        listed = ", ".join(f"{count} of {name}" for name, count in known.items())
        raise InventoryError(f"host {host} has {listed}; expected chips of one type")
    [(name, count)] = known.items()
    rates = [float(rate) * 1e9 / 8 for rate in RATE.findall(answer)]
    best = [rate for rate in rates if rate == max(rates)]  # the others are for management
    memory = MEMORY.search(answer)
    return Machine(
        chip=name or "",
        chips=count,
        name=host,
        nics=len(best) or None,
        nic_bytes_per_s=best[0] if best else None,
        memory_bytes=int(memory[1]) * 1024 if memory else None,
    )
