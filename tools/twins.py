"""Emulated twins of the H2 paper's clusters: its chips' ratios, in fewer chips and more time.

The figures of chips A to D (the chip files a to d) are divided by one number for each kind of
figure, the same for all four, so that the chips keep their ratios. They all compute alike:
only time and memory matter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heteropp.description.chips import ChipSpec, load_chip


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The divisors that turn the figures of the paper's chips into those of their twins."""

    computing: float  # FP16 peak, which the twin has in FP32
    memory: float
    memory_bandwidth: float
    links: float  # inside a node, and to the host
    nics: float

    def slower(self, factor: float) -> Scale:
        """The same ratios, but that every step takes `factor` times as long."""
        return replace(
            self,
            computing=self.computing * factor,
            memory_bandwidth=self.memory_bandwidth * factor,
            links=self.links * factor,
            nics=self.nics * factor,
        )


# launches and latencies are next to nothing beside the work at full size, and so they are here
LAUNCH_S = 1e-5
LATENCY_S = 2e-5

CHIP = """\
vendor         = "{vendor}"
chip_type      = "{vendor}-TWIN"
chips_per_node = 16
tp_limit       = 8
[compute]
launch_s       = {launch_s}
efficiency     = {efficiency}
float32_flops  = {flops}
float64_flops  = {flops}
float16_flops  = {flops}
bfloat16_flops = {flops}
other_flops    = {flops}
[memory]
capacity_bytes        = {capacity_bytes}
bandwidth_bytes_per_s = {bandwidth_bytes_per_s}
[links]
intra_node_bytes_per_s = {intra_node_bytes_per_s}
intra_node_latency_s   = {latency_s}
nics_per_node          = 16
nic_bytes_per_s        = {nic_bytes_per_s}
nic_latency_s          = {nic_latency_s}
host_bytes_per_s       = {host_bytes_per_s}
[numerics]
neutral       = {neutral}
accumulate    = "float32"
order         = "sequential"
split_k       = 1
flush_to_zero = false
fast_exp      = false
"""


def write_twin(
    folder: Path, chips: dict[str, list[int]], scale: Scale, message_factor: float = 1.0
) -> Path:
    """Makes a folder with a cluster file and its chip files; gives the cluster file.

    chips: the paper's name of a chip, and how many each of its nodes has. message_factor: how many
    times as long a message between nodes takes that is copied through the memory of both hosts.
    """
    folder.mkdir()
    text = f'name = "{folder.name}"\n'
    for name, nodes in chips.items():
        _write_chip(folder / f"{name}.toml", load_chip(name), scale, message_factor)
        text += "".join(f'[[nodes]]\nchip = "{name}.toml"\nchips = {count}\n' for count in nodes)
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def write_speeds(folder: Path, speeds: Sequence[float], scale: Scale) -> Path:
    """Makes a folder with a cluster file of as many nodes, each of one chip; gives that file.

    The chips are twins of chip A, but that they compute and read memory at these speeds of its,
    and each of another vendor; memory and links are alike.
    """
    folder.mkdir()
    text = f'name = "{folder.name}"\n'
    for vendor, speed in zip("abcdefgh", speeds, strict=False):
        own = replace(
            scale,
            computing=scale.computing / speed,
            memory_bandwidth=scale.memory_bandwidth / speed,
        )
        _write_chip(folder / f"{vendor}.toml", load_chip("a"), own)
        text += f'[[nodes]]\nchip = "{vendor}.toml"\nchips = 1\n'
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def _write_chip(path: Path, chip: ChipSpec, scale: Scale, message_factor: float = 1.0) -> None:
    host, nic = chip.links.host_bytes_per_s / scale.links, chip.links.nic_bytes_per_s / scale.nics
    if message_factor > 1:  # the two copies have their part in it, the network the rest
        nic = 1 / (message_factor / nic - 2 / host)
    path.write_text(
        CHIP.format(
            vendor=path.stem.upper(),
            launch_s=LAUNCH_S,
            efficiency=1.0,
            flops=chip.compute.efficiency * chip.compute.float16_flops / scale.computing,
            capacity_bytes=round(chip.memory.capacity_bytes / scale.memory),
            bandwidth_bytes_per_s=chip.memory.bandwidth_bytes_per_s / scale.memory_bandwidth,
            intra_node_bytes_per_s=chip.links.intra_node_bytes_per_s / scale.links,
            latency_s=LATENCY_S,
            nic_bytes_per_s=nic,
            nic_latency_s=LATENCY_S * message_factor,
            host_bytes_per_s=host,
            neutral="false",
        )
    )
