"""Chip files: what one type of chip can do, as plans, transports and the emulated chip read it.

The presets in `ditorch/chips` are the four chips of the H2 paper (Table 5), a scaled-down twin of
each, and chips that are sold, by their makers' figures. A chip is what one process gets as its
device: of a module that shows two devices, one. This module needs no torch, but importing it
imports `ditorch`, which opens the device.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, Strict, TypeAdapter, ValidationError

from hyperhetero.input import decoded, problems

if TYPE_CHECKING:
    import torch

_PRESETS = Path(__file__).parent
_OWN_KERNELS = ("float32", "float16", "bfloat16")  # dtypes
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False)

Name = Annotated[str, Strict(), Field(min_length=1, max_length=63)]
Count = Annotated[int, Strict(), Field(ge=1)]
Parts = Annotated[int, Strict(), Field(ge=1, le=4096)]
Positive = Annotated[float, Strict(), Field(gt=0)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=1)]
Share = Annotated[float, Strict(), Field(gt=0, le=1)]
Flag = Annotated[bool, Strict()]
Order = Literal["sequential", "blocked", "pairwise"]


class ChipFileError(ValueError):
    """A chip file that cannot be used; the message is one sentence naming file and key."""


@dataclass(frozen=True)
class Compute:
    """Peaks in FLOP per second; `efficiency` is the share of them that matrix products reach."""

    launch_s: Seconds  # seconds that launching an operator or a copy adds to its time
    efficiency: Share  # share of the peak that products of matrices reach
    float32_flops: Positive  # peak in float32, in FLOP per second
    float64_flops: Positive  # peak in float64, in FLOP per second
    float16_flops: Positive  # peak in float16, in FLOP per second
    bfloat16_flops: Positive  # peak in bfloat16, in FLOP per second
    other_flops: Positive  # peak in every other dtype, such as integers, in operations per second
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Memory:
    """The chip's own memory."""

    capacity_bytes: Count  # size of the memory
    bandwidth_bytes_per_s: Positive  # bytes per second, those read and those written together
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Links:
    """What a chip sends over: to its node's other chips, to a NIC, and to host memory.

    Bytes per second are those of one direction.
    """

    intra_node_bytes_per_s: Positive  # bandwidth of a chip to the other chips of its node
    intra_node_latency_s: Seconds  # latency of a message between chips of a node, in seconds
    nics_per_node: Count  # number of network cards in a node, which its chips share
    nic_bytes_per_s: Positive  # bandwidth of one network card
    nic_latency_s: Seconds  # latency of a message from node to node, in seconds
    host_bytes_per_s: Positive  # bandwidth between the chip's memory and the host's
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Numerics:
    """How the chip's own kernels compute; `neutral` chips use the host's kernels, bit for bit."""

    neutral: Flag  # whether the host's kernels compute; the other keys then change nothing
    accumulate: Literal["float32", "float64", "bfloat16"]  # dtype of sums (of float64: float64)
    order: Order  # how a sum adds its terms: one by one, or blocks of 32 in turn or pairwise
    split_k: Parts  # number of equal parts of a sum, each added up alone before they are added
    flush_to_zero: Flag  # whether subnormal numbers count as zero
    fast_exp: Flag  # whether softmax and norms use a less exact exp and 1/sqrt (not in float64)
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Kernels:
    """How far a real chip's kernels stay below the roofline, as heteropp-calibrate fits it to runs
    and heteropp-profile --kernels to single operators.

    A product whose shortest side is n reaches efficiency x n / (n + half_side) of the peak.

    An emulated chip reaches its roofline and has no such section.
    """

    half_side: Positive  # length of a product's shortest side that halves its efficiency
    causal_attention_efficiency: Positive  # share of the peak, masked FLOPs not counted
    causal_attention_backward_efficiency: Positive  # the same in its backward
    bandwidth_share: Positive  # share of the memory's bandwidth that other operators reach
    host_s: Seconds  # seconds that the host takes to issue one operator or collective
    micro_batch_s: Seconds  # seconds that beginning a micro-batch adds to a stage's forward
    float32_efficiency: Share | None = None  # replaces compute.efficiency for float32 products
    float32_half_side: Positive | None = None  # replaces half_side for float32 products
    float16_efficiency: Share | None = None  # replaces compute.efficiency for float16 products
    float16_half_side: Positive | None = None  # replaces half_side for float16 products
    bfloat16_efficiency: Share | None = None  # replaces compute.efficiency for bfloat16 products
    bfloat16_half_side: Positive | None = None  # replaces half_side for bfloat16 products
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Collectives:
    """What a collective inside a node meets, as measured; groups of 2 and 4 may be joined better.

    Bytes per second are those of one rank, in one direction.
    """

    latency_s: Seconds  # latency of each round of its messages, in seconds
    bytes_per_s: Positive  # bandwidth in a group of any size that has no key of its own
    pair_bytes_per_s: Positive | None = None  # bandwidth in a group of 2 ranks
    four_bytes_per_s: Positive | None = None  # bandwidth in a group of 4 ranks
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    def group_bytes_per_s(self, ranks: int) -> float:
        """Bytes per second of one rank in a group of so many."""
        own = {2: self.pair_bytes_per_s, 4: self.four_bytes_per_s}
        return own.get(ranks) or self.bytes_per_s


@dataclass(frozen=True)
class ChipSpec:
    """One type of chip (H2, Table 5); `tp_limit` is TP_MAX of section 4.3.2."""

    vendor: Name  # name of its maker
    chip_type: Name  # name of the chip type
    chips_per_node: Count  # number of chips in a node
    tp_limit: Count  # largest tensor-parallel degree that planners choose for the chip
    compute: Compute  # how fast it computes
    memory: Memory  # its own memory
    links: Links  # what it sends over
    path: Path = field(compare=False)  # the same file may lie in several places
    numerics: Numerics | None = None  # how it rounds and adds; an emulated chip needs it
    kernels: Kernels | None = None  # measured: how far its kernels stay below the peaks
    collectives: Collectives | None = None  # measured: latency and bandwidth inside a node
    driver: Name | None = None  # vendor of ditorch that drives the real chip; absent: emulated
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    @property
    def fuses_attention(self) -> bool:
        """Whether the chip is known to have attention in one kernel: an emulated one, whose kernels
        are its own. Of a real one only its vendor's library can say.
        """
        return self.driver is None and self.numerics is not None and not self.numerics.neutral

    def with_efficiency(self, efficiency: float) -> ChipSpec:
        """The chip with another share of its peaks, which products in every dtype then reach."""
        kernels = self.kernels
        if kernels is not None:
            names = (
                f"{dtype}_{of}" for dtype in _OWN_KERNELS for of in ("efficiency", "half_side")
            )
            own: dict[str, Any] = dict.fromkeys(names)
            kernels = replace(kernels, **own)
        return replace(self, compute=replace(self.compute, efficiency=efficiency), kernels=kernels)

    def product_efficiency(self, dtype: torch.dtype | str, shortest: int) -> float:
        """The share of a dtype's peak that a product of matrices reaches by its shortest side."""
        name, kernels = str(dtype).removeprefix("torch."), self.kernels
        if kernels is None:
            return self.compute.efficiency
        efficiency = half_side = None
        if name in _OWN_KERNELS:
            efficiency = getattr(kernels, f"{name}_efficiency")
            half_side = getattr(kernels, f"{name}_half_side")
        half_side = half_side or kernels.half_side
        return (efficiency or self.compute.efficiency) * shortest / (shortest + half_side)

    def peak_flops(self, dtype: torch.dtype | str) -> float:
        """FLOP per second for a compute dtype, given as `torch.bfloat16` or `"bfloat16"`."""
        compute = self.compute
        peaks = {
            "float32": compute.float32_flops,
            "float64": compute.float64_flops,
            "float16": compute.float16_flops,
            "bfloat16": compute.bfloat16_flops,
        }
        return peaks.get(str(dtype).removeprefix("torch."), compute.other_flops)


def chip_names() -> list[str]:
    """The presets' names, sorted: "a", "a-mini", "b", ..."""
    return sorted(path.stem for path in _PRESETS.glob("*.toml"))


def load_chip(name_or_path: str | Path) -> ChipSpec:
    """A preset by name, or any chip file by path. Raises ChipFileError."""
    if name_or_path in chip_names():
        path = _PRESETS / f"{name_or_path}.toml"
    else:
        path = Path(name_or_path).absolute()
    if not path.is_file():
        raise ChipFileError(
            f"chip {str(name_or_path)!r}: expected one of {', '.join(chip_names())}, "
            "or the path of a chip file"
        )
    values = _read(path)
    if "path" in values:
        raise ChipFileError(f"{path}: path: unknown key")
    _check_attention(path, values)
    try:
        return TypeAdapter(ChipSpec).validate_python({**values, "path": path})
    except ValidationError as error:
        raise ChipFileError(f"{path}: {problems(error, values)}") from None


def _check_attention(path: Path, values: dict[str, Any]) -> None:
    """Refuses shares of the peak that were measured when masked FLOPs counted, by their names."""
    kernels = values.get("kernels")
    for name in ("attention_efficiency", "attention_backward_efficiency"):
        if isinstance(kernels, dict) and name in kernels:
            raise ChipFileError(
                f"{path}: kernels.{name} counts masked FLOPs, which is no longer done; expected "
                f"kernels.causal_{name}: remove [kernels] and measure it anew with "
                "heteropp-profile --kernels or heteropp-calibrate"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(decoded(path.read_bytes()))
    except OSError as error:
        raise ChipFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ChipFileError(f"{path}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ChipFileError(f"{path}: not TOML: {error}") from None
