"""What a rank runs on: its chip through ditorch and dicomm, or the bare host."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from heteropp.description.plan import Plan
from heteropp.models.spec import ModelError, ModelSpec
from heteropp.runtime.measuring.metrics import Clock, EmulatedClock, HostClock, clock_of
from heteropp.runtime.ranks.host_memory import keep_freed_memory
from heteropp.runtime.ranks.transport import Groups


@dataclass(frozen=True)
class Device:
    """The bare host; it accounts for neither time nor memory."""

    device: torch.device
    backend: str  # of torch.distributed
    clock: Clock

    def begin_step(self) -> None:
        """Starts the step's accounts afresh."""

    def end_step(self) -> None:
        """Tells the precision tools, where there are any, that the step is over."""

    def pacing_fidelity(self) -> float | None:
        """Returns this rank's pacing fidelity since begin_step; None where time is not emulated."""
        return None

    def peak_memory_bytes(self) -> int:
        """Returns this rank's peak of allocated memory since begin_step.

        0 on the bare host, and on a chip whose plugin does not account for it.
        """
        return 0


@dataclass(frozen=True)
class Chip(Device):
    """A chip that ditorch drives."""

    accounts_memory: bool = True  # some plugins do not

    def begin_step(self) -> None:
        import ditorch

        if self.accounts_memory:
            torch.accelerator.reset_peak_memory_stats()
        ditorch.pacing_reset()

    def end_step(self) -> None:
        import ditorch

        ditorch.end_step()

    def pacing_fidelity(self) -> float | None:
        import ditorch

        account = ditorch.pacing()
        return None if account is None else account.fidelity

    def peak_memory_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated() if self.accounts_memory else 0


def open_device(kind: Literal["chip", "cpu"], chip: str, chip_type: str) -> Device:
    """Opens this process's device; the first import of ditorch must be here.

    chip: a chip file's name or path. It is real where DITORCH_VENDOR is set or its file has a
    driver, and else emulated.
    """
    if kind == "cpu":
        keep_freed_memory()
        return Device(torch.device("cpu"), "gloo", HostClock())
    if "DITORCH_VENDOR" not in os.environ:
        os.environ["DITORCH_CHIP"] = chip
    os.environ["DICOMM_RANK_LABEL"] = f"chip {chip_type}"
    import dicomm.distributed
    import ditorch

    if ditorch.device.type == "cpu":
        keep_freed_memory()
        return Device(ditorch.device, "dicomm", HostClock())
    if not ditorch.host_reaches_memory():
        os.environ.setdefault("DICOMM_STRATEGY", "cpu-mediated")
    ditorch.watch_memory(*dicomm.distributed.device_memory_functions())
    dicomm.distributed.share_chip_memory(ditorch.device.type, ditorch.vendor_library())
    clock = ditorch.device_clock()
    if clock is None:
        device = _real_chip(ditorch.device.type)
        return Chip(device, "dicomm", clock_of(device), _accounts_memory())
    dicomm.distributed.set_device_clock(*clock)
    _, ready_at_ns, _ = clock
    return Chip(ditorch.device, "dicomm", EmulatedClock(ready_at_ns, ditorch.device.index))


def check_attention(model: ModelSpec, device: Device, apart: bool, cut: bool = False) -> None:
    """Raises ModelError where a model's attention is fused and the chip would keep its scores.

    apart: whether some attention is through a window, or within documents of a sequence. cut:
    whether sequences are, over the ranks of the stage's replicas or into slices.
    """
    if getattr(model, "attention", "explicit") == "explicit" or device.device.type == "cpu":
        return
    if cut and (apart or model.caps_fused_scores):
        raise ModelError(
            "the model's attention is fused, through a window, within documents or with a soft "
            "cap, and the plan has token_shares or token_slices, for which chips have no kernel "
            "yet; expected explicit attention, or a plan of whole sequences "
            "(heteropp-search --context-parallel 1 --token-slices 1 finds one)"
        )
    import ditorch

    dtype = getattr(torch, model.dtype)
    within, capped = ", through a window or within documents", " with a soft cap"
    of_a_part = " of a sequence that is cut"
    or_whole = ", or a plan that cuts none (heteropp-search --context-parallel 1 finds one)"
    kinds = ("", True), (within, apart), (capped, model.caps_fused_scores), (of_a_part, cut)
    for size, value_size in sorted(model.fused_head_sizes):
        of_values = "" if value_size == size else f", and values of {value_size}"
        for kind, asked in kinds:
            if asked and not ditorch.has_fused_attention(
                kind in (within, of_a_part), dtype, size, value_size, capped=kind == capped
            ):
                raise ModelError(
                    f"the model's attention is fused{kind}, for which chip "
                    f"{ditorch.chip().chip_type} has no kernel of {model.dtype} heads of "
                    f"{size}{of_values}; expected explicit, or chips that have one"
                    f"{or_whole if kind == of_a_part else ''}"
                )


def _real_chip(device_type: str) -> torch.device:
    """Makes the chip of this process's LOCAL_RANK its own, where it sees several.

    Raises ValueError where there are not so many.
    """
    chips, local_rank = torch.accelerator.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    index = local_rank if chips > 1 else 0
    if index >= chips:
        raise ValueError(
            f"LOCAL_RANK is {local_rank} and this process sees {chips} chips; expected one for "
            "each process of the node, or a process that sees its own alone"
        )
    torch.accelerator.set_device_index(index)
    return torch.device(device_type, index)


def _accounts_memory() -> bool:
    try:
        torch.accelerator.reset_peak_memory_stats()
        torch.accelerator.max_memory_allocated()
    except RuntimeError:  # torch has no other answer where a plugin lacks them
        return False
    return True


def set_links(plan: Plan, cluster: Path, groups: Groups) -> None:
    """Paces this rank's links, in each of its groups, as the cluster's are."""
    import dicomm.distributed

    # imports ditorch, so not before open_device
    from heteropp.description.cluster import read_cluster
    from heteropp.description.used_chips import used_cluster

    machines = used_cluster(plan, read_cluster(cluster))
    rank = dist.get_rank()
    for group in groups.every():
        peers = [peer for peer in dist.get_process_group_ranks(group) if peer != rank]
        links = {peer: machines.link(rank, peer) for peer in peers}
        dicomm.distributed.set_links(
            group, {peer: (link.latency_s, link.bytes_per_s) for peer, link in links.items()}
        )
