"""The machines of a Slurm cluster, as `scontrol show node` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from heteropp.inventory.machines import InventoryError, Machine
from heteropp.inventory.product_names import chip_of

RECORD = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
GRES = re.compile(r"^ *Gres=(\S+)", re.MULTILINE)
MEMORY = re.compile(r"^ *RealMemory=(\d+)", re.MULTILINE)  # in MiB
# "gpu:a100:8(S:0-1)", "npu:8"; of a resource that is shared, such as "shard:8", no chip
RESOURCE = re.compile(r"(gpu|npu|mlu|hpu|xpu)(?::([^:,()]+))??:(\d+)(?:\([^)]*\))?(?![^,])")


def machines_of(text: str, chip: str | None = None) -> list[Machine]:
    """Returns the machines that have chips.

    text: what `scontrol show node` printed. chip: what chips are whose type Slurm was not told.
    Raises InventoryError.
    """
    starts = [match.start() for match in RECORD.finditer(text)]
    if not starts:
        raise InventoryError(
            "no line begins with NodeName=; expected what scontrol show node prints"
        )
    records = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    return [machine for record in records for machine in _machines(record, chip)]


def _machines(record: str, chip: str | None) -> Iterator[Machine]:
    name = RECORD.match(record)[1]  # type: ignore[index]
    gres = GRES.search(record)
    found = RESOURCE.findall(gres[1]) if gres else []
    memory = MEMORY.search(record)
    if len(found) > 1:
        raise InventoryError(f"node {name} has chips of several types, {gres[1]}; expected of one")  # type: ignore[index]
    for _, product, count in found:
        known = (chip_of(product) if product else None) or chip
        if known is None:
            what = f"chips of type {product!r}" if product else "chips of no named type"
            raise InventoryError(
                f"node {name} has {what}; name the chip file that describes them with --chip"
            )
        known_mib = int(memory[1]) if memory else 0
        memory_bytes = known_mib << 20 if known_mib > 1 else None  # 1: Slurm was not told
        yield Machine(known, int(count), name, memory_bytes=memory_bytes)
