"""Where a node's chips and NICs sit, and which NICs each chip uses (paper, section 5, Table 3).

    topology = discover()
    for chip in topology.chips:
        print(chip, [nic.name for nic in nics_for(topology, chip)])

Errors are `dicomm.Error`, one sentence each.

- `discover(sys_root="/sys", chips=[])` reads a sysfs tree; `chips` names PCI addresses that are
  accelerators although their PCI class does not say so.
- `distance(topology, chip, nic)` is what lies between the two.
- `nics_for(topology, chip, limit=8)` are the chip's rails: all equally near active NICs of the
  nearest class, its own first. `nics_named(topology, "mlx5_0:1,mlx5_1")` is the job's own choice.
- `choose(topology, nics="")` does that for every chip, and says why.
"""

from dicomm._dicomm import (
    Distance,
    Nic,
    NumaNode,
    PciDevice,
    Topology,
    discover,
    distance,
    nics_for,
    nics_named,
)
from dicomm.topology.choice import Choice, choose

__all__ = [
    "Choice",
    "Distance",
    "Nic",
    "NumaNode",
    "PciDevice",
    "Topology",
    "choose",
    "discover",
    "distance",
    "nics_for",
    "nics_named",
]
