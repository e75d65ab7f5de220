"""Chip files: both readers, the library's and ditorch's, take and refuse the same ones."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
from emuchip_vendor import CHIPS, ERROR, INVALID, OK, Properties, Vendor, chip_text

from ditorch.chips import ChipFileError, chip_names, load_chip

PRESETS = sorted(path.stem for path in CHIPS.glob("*.toml"))

KERNELS = {
    f"kernels__{name}": 0.5
    for name in (
        *("half_side", "causal_attention_efficiency", "causal_attention_backward_efficiency"),
        *("bandwidth_share", "host_s", "micro_batch_s"),
    )
}
COLLECTIVES = {"collectives__latency_s": 1e-5, "collectives__bytes_per_s": 1e9}

# what is wrong, the change to a good file, the key that the sentence must name
MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("missing", {"vendor": None}, "vendor"),
    ("missing in a table", {"compute__launch_s": None}, "compute.launch_s"),
    ("missing, used by plans only", {"links__nic_latency_s": None}, "links.nic_latency_s"),
    ("unknown", {"colour": "red"}, "colour"),
    ("unknown in a table", {"memory__latency_s": 1e-6}, "memory.latency_s"),
    ("unknown table", {"cooling__fans": 4}, "cooling"),
    ("the reader's own name", {"path": "a.toml"}, "path"),
    ("a number for a string", {"vendor": 7}, "vendor"),
    ("an empty string", {"chip_type": ""}, "chip_type"),
    ("a long string", {"vendor": "v" * 64}, "vendor"),
    ("a string for a number", {"compute__float32_flops": "1e12"}, "compute.float32_flops"),
    ("a boolean for a number", {"memory__bandwidth_bytes_per_s": True}, "memory.bandwidth"),
    ("a number for a boolean", {"numerics__fast_exp": 1}, "numerics.fast_exp"),
    ("a fraction of a chip", {"chips_per_node": 1.5}, "chips_per_node"),
    ("a float for a count", {"memory__capacity_bytes": 1e8}, "memory.capacity_bytes"),
    ("no chips", {"chips_per_node": 0}, "chips_per_node"),
    ("negative", {"tp_limit": -1}, "tp_limit"),
    ("zero speed", {"compute__bfloat16_flops": 0}, "compute.bfloat16_flops"),
    ("infinite speed", {"links__host_bytes_per_s": math.inf}, "links.host_bytes_per_s"),
    ("not a number", {"memory__bandwidth_bytes_per_s": math.nan}, "memory.bandwidth"),
    ("efficiency above 1", {"compute__efficiency": 1.01}, "compute.efficiency"),
    ("efficiency 0", {"compute__efficiency": 0}, "compute.efficiency"),
    ("negative launch", {"compute__launch_s": -1e-6}, "compute.launch_s"),
    ("launch in the wrong unit", {"compute__launch_s": 5}, "compute.launch_s"),
    ("no such dtype", {"numerics__accumulate": "float8"}, "numerics.accumulate"),
    ("no such order", {"numerics__order": "random"}, "numerics.order"),
    ("split by 0", {"numerics__split_k": 0}, "numerics.split_k"),
    ("a part of [kernels]", {"kernels__host_s": 1e-5}, "kernels.half_side"),
    ("with masked FLOPs", {"kernels__attention_efficiency": 0.5}, "causal_attention_efficiency"),
    ("too good", {**KERNELS, "kernels__float16_efficiency": 1.5}, "kernels.float16_efficiency"),
    ("no dtype", {**KERNELS, "kernels__float8_half_side": 2}, "kernels.float8_half_side"),
    ("a part of [collectives]", {"collectives__latency_s": 1e-5}, "collectives.bytes_per_s"),
    ("no bandwidth", {**COLLECTIVES, "collectives__pair_bytes_per_s": 0}, "collectives.pair"),
    ("unknown in [collectives]", {**COLLECTIVES, "collectives__ring": 2}, "collectives.ring"),
]


def write(directory: Path, text: str) -> Path:
    chip_file = directory / "broken.toml"
    chip_file.write_text(text)
    return chip_file


def both_errors(directory: Path, chip_file: Path) -> tuple[str, str]:
    vendor = Vendor(directory, chip_file)
    assert vendor.count_status == ERROR
    assert vendor.devices == 0
    with pytest.raises(ChipFileError) as raised:
        load_chip(chip_file)
    return vendor.error(), str(raised.value)


@pytest.mark.parametrize(
    "change, key", [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED]
)
def test_malformed_value_is_one_sentence_naming_file_and_key(
    tmp_path: Path, change: dict[str, Any], key: str
) -> None:
    for message in both_errors(tmp_path, write(tmp_path, chip_text(**change))):
        assert "broken.toml" in message
        assert key in message
        assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        "vendor",
        "vendor = ",
        'vendor = "A',
        "[compute\n",
        "[a]\n[a]\n",
        "= 3",
        "x = 1\nx = 2",
        "x = 1__0",
    ],
)
def test_text_that_is_not_toml_names_the_place(tmp_path: Path, text: str) -> None:
    for message in both_errors(tmp_path, write(tmp_path, text)):
        assert "broken.toml" in message
        assert "line" in message or "end of document" in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for message in both_errors(tmp_path, tmp_path / "absent.toml"):
        assert "absent.toml" in message


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ChipFileError, match=r"'e'.*a, a-mini, .*b, b-mini"):
        load_chip("e")


def test_no_chip_file_names_the_variable(tmp_path: Path) -> None:
    vendor = Vendor(tmp_path, None)
    assert vendor.count_status == ERROR
    assert "EMUCHIP_CHIP" in vendor.error()


@pytest.mark.parametrize("devices", ["0", "-1", "two", "1.5", ""])
def test_malformed_device_count_names_the_variable(tmp_path: Path, devices: str) -> None:
    vendor = Vendor(tmp_path, CHIPS / "a.toml", devices)
    assert vendor.count_status == ERROR
    assert "EMUCHIP_DEVICES" in vendor.error()


@pytest.mark.parametrize("preset", PRESETS)
def test_both_readers_agree_on_every_preset(tmp_path: Path, preset: str) -> None:
    spec = load_chip(preset)
    assert spec == load_chip(CHIPS / f"{preset}.toml")
    vendor = Vendor(tmp_path, spec.path, "2")
    assert (vendor.count_status, vendor.devices) == (OK, 2)
    properties = Properties(struct_size=ctypes.sizeof(Properties))
    assert vendor.runtime.device_properties(1, ctypes.byref(properties)) == OK
    assert properties.vendor.decode() == spec.vendor
    assert properties.chip_type.decode() == spec.chip_type
    assert properties.library == b"emuchip"
    assert properties.memory_bytes == spec.memory.capacity_bytes


def test_the_papers_chips_are_all_there() -> None:
    # H2, Table 5: memory, chips a node, and the range of the FP16 peak relative to an A100's.
    table_5 = {
        "a": (96, 16, 0.5, 1),
        "b": (64, 8, 0.5, 1),
        "c": (32, 16, 0, 0.5),
        "d": (32, 8, 1.5, 2),
    }
    assert {*table_5, *(f"{name}-mini" for name in table_5)} <= set(chip_names())
    for name, (memory_gib, chips_per_node, low, high) in table_5.items():
        chip, twin = load_chip(name), load_chip(f"{name}-mini")
        assert chip.memory.capacity_bytes == memory_gib << 30
        assert chip.chips_per_node == twin.chips_per_node == chips_per_node
        assert low < chip.peak_flops("float16") / 312e12 < high
        assert twin.memory.capacity_bytes == memory_gib << 20
        relative = chip.peak_flops("float16") / load_chip("a").peak_flops("float16")
        twin_relative = twin.peak_flops("float16") / load_chip("a-mini").peak_flops("float16")
        assert twin_relative == pytest.approx(relative, rel=1e-3)


def test_peaks_are_by_dtype_name_or_torch_dtype() -> None:
    import torch

    chip = load_chip("b")
    assert chip.peak_flops("bfloat16") == chip.peak_flops(torch.bfloat16) == 256e12
    assert chip.peak_flops(torch.float64) == chip.compute.float64_flops
    assert chip.peak_flops(torch.int32) == chip.compute.other_flops


def test_tables_are_for_one_version_of_the_abi(emulate: Any) -> None:
    vendor = emulate()
    assert vendor.runtime.abi_version == vendor.operators.abi_version == 1
    assert not vendor.library.ditorch_vendor_runtime(2)
    assert not vendor.library.ditorch_vendor_operators(2)


def test_a_device_that_does_not_exist_is_invalid(emulate: Any) -> None:
    vendor = emulate(devices="2")
    for device in (-1, 2):
        assert vendor.runtime.device_synchronize(device) == INVALID
        assert f"device {device} " in vendor.error()
        assert "0 to 1" in vendor.error()


def test_a_struct_of_an_older_reader_is_refused(emulate: Any) -> None:
    vendor = emulate()
    properties = Properties(struct_size=8)
    assert vendor.runtime.device_properties(0, ctypes.byref(properties)) == INVALID
    assert "struct_size" in vendor.error()
