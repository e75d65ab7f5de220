"""What is chosen on a node: the NICs of each chip, and why."""

from __future__ import annotations

from dataclasses import dataclass

from dicomm._dicomm import Distance, Nic, Topology, distance, nics_for, nics_named


@dataclass(frozen=True)
class Choice:
    """nics: the chip's own first. distances: one for each, as they need not be alike if named."""

    chip: str
    nics: tuple[Nic, ...]
    distances: tuple[Distance, ...]
    named: bool  # by the job, not by affinity

    @property
    def why(self) -> str:
        if not self.nics:
            return "no NIC is active"
        near = ", ".join(dict.fromkeys(its.nearness for its in self.distances))
        return f"named by the job ({near})" if self.named else near


def choose(topology: Topology, nics: str = "") -> list[Choice]:
    """One choice a chip, in order. nics: the job's own list, as DICOMM_NICS; empty: by affinity."""
    choices = []
    for chip in topology.chips:
        chosen = nics_named(topology, nics) if nics else nics_for(topology, chip)
        distances = tuple(distance(topology, chip, nic) for nic in chosen)
        choices.append(Choice(chip, tuple(chosen), distances, named=bool(nics)))
    return choices
