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


class ChipFileError(ValueError):
    """A chip file that cannot be used; the message is one sentence naming file and key."""


@dataclass(frozen=True)
class Compute:
    """Peaks in FLOP per second; `efficiency` is the share of them that matrix products reach."""

    launch_s: Seconds
    efficiency: Share
    float32_flops: Positive
    float64_flops: Positive
    float16_flops: Positive
    bfloat16_flops: Positive
    other_flops: Positive
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Memory:
    """The chip's own memory."""

    capacity_bytes: Count
    bandwidth_bytes_per_s: Positive
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Links:
    """What a chip sends over: to its node's other chips, to a NIC, and to host memory."""

    intra_node_bytes_per_s: Positive
    intra_node_latency_s: Seconds
    nics_per_node: Count
    nic_bytes_per_s: Positive
    nic_latency_s: Seconds
    host_bytes_per_s: Positive
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Numerics:
    """How the chip's own kernels compute; `neutral` chips use the host's kernels, bit for bit."""

    neutral: Flag
    accumulate: Literal["float32", "float64", "bfloat16"]
    order: Literal["sequential", "blocked", "pairwise"]
    split_k: Parts
    flush_to_zero: Flag
    fast_exp: Flag
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Kernels:
    """How far a real chip's kernels stay below the roofline, as heteropp-calibrate fits it to runs
    and heteropp-profile --kernels to single operators.

    An emulated chip reaches its roofline and has no such section.
    """

    half_side: Positive  # of a product's shortest side, at which it reaches half its efficiency
    attention_efficiency: Positive  # share of the peak, of fused attention; masked work counts
    attention_backward_efficiency: Positive
    bandwidth_share: Positive  # of the memory's bandwidth, in everything but products
    host_s: Seconds  # from one operator's start to the next one's, where the chip does not wait
    micro_batch_s: Seconds  # each time that a stage begins a micro-batch, beside its operators
    # of products in one dtype, in place of [compute]'s efficiency and of half_side
    float32_efficiency: Share | None = None
    float32_half_side: Positive | None = None
    float16_efficiency: Share | None = None
    float16_half_side: Positive | None = None
    bfloat16_efficiency: Share | None = None
    bfloat16_half_side: Positive | None = None
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG


@dataclass(frozen=True)
class Collectives:
    """What a collective inside a node meets, as measured; groups of 2 and 4 may be joined better.

    Bytes per second are those of one rank, in one direction.
    """

    latency_s: Seconds
    bytes_per_s: Positive
    pair_bytes_per_s: Positive | None = None
    four_bytes_per_s: Positive | None = None
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

    def group_bytes_per_s(self, ranks: int) -> float:
        """Bytes per second of one rank in a group of so many."""
        own = {2: self.pair_bytes_per_s, 4: self.four_bytes_per_s}
        return own.get(ranks) or self.bytes_per_s


@dataclass(frozen=True)
class ChipSpec:
    """One type of chip (H2, Table 5); `tp_limit` is TP_MAX of section 4.3.2."""

    vendor: Name
    chip_type: Name
    chips_per_node: Count
    tp_limit: Count
    compute: Compute
    memory: Memory
    links: Links
    path: Path = field(compare=False)  # the same file may lie in several places
    numerics: Numerics | None = None  # of an emulated chip alone
    kernels: Kernels | None = None
    collectives: Collectives | None = None
    __pydantic_config__: ClassVar[ConfigDict] = _CONFIG

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
    try:
        return TypeAdapter(ChipSpec).validate_python({**values, "path": path})
    except ValidationError as error:
        raise ChipFileError(f"{path}: {problems(error, values)}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(decoded(path.read_bytes()))
    except OSError as error:
        raise ChipFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ChipFileError(f"{path}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise ChipFileError(f"{path}: not TOML: {error}") from None
