"""Metis's profile and cluster files: what is read, in any order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from heteropp.description.files import FileError
from heteropp.search.metis_files import read_kinds, read_profiles

LAYERS = 4


def profile(scale: float, layers: int = LAYERS) -> dict:
    return {
        "model": {"parameters": {"parameters_per_layer_bytes": [100, *[50] * (layers - 2), 90]}},
        "execution_time": {
            "forward_backward_time_ms": 50 * scale,
            "batch_generator_time_ms": scale,
            "optimizer_time_ms": 3 * scale,
            "layer_compute_total_ms": [2 * scale, *[10 * scale] * (layers - 2), 4 * scale],
        },
        "execution_memory": {"layer_memory_total_mb": [30, *[20] * (layers - 2), 40]},
    }


def write(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for name in names:
        scale = 2.0 if "V100" in name else 1.0
        (folder / name).write_text(json.dumps(profile(scale)))
    return folder


NAMES = [
    f"DeviceType.{chip}_tp{tp}_bs{batch}.json"
    for chip in ("A100", "V100")
    for tp in (1, 2)
    for batch in (1, 2)
]


def test_reads_profiles_in_our_units(tmp_path: Path) -> None:
    found = read_profiles(write(tmp_path / "p", NAMES))
    assert found.layers == LAYERS
    assert found.parameter_bytes == (100, 50, 50, 90)
    assert found.update_s == {"A100": pytest.approx(0.006), "V100": pytest.approx(0.012)}
    assert found.batch_s == pytest.approx(0.002)
    v100 = found.by_type["V100"][2, 1]
    assert v100.seconds == pytest.approx((0.004, 0.02, 0.02, 0.008))
    assert v100.between_s == pytest.approx(0.1 - 0.052)
    assert v100.memory_bytes == tuple(size * 2**20 for size in (30, 20, 20, 40))


def test_order_of_files_does_not_matter(tmp_path: Path) -> None:
    assert read_profiles(write(tmp_path / "a", NAMES)) == read_profiles(
        write(tmp_path / "b", NAMES[::-1])
    )


def test_other_numbers_of_layers_repeat_the_second(tmp_path: Path) -> None:
    folder = write(tmp_path / "p", NAMES)
    short = profile(1.0)
    short["execution_memory"]["layer_memory_total_mb"].pop(1)  # as in the authors' fork
    (folder / NAMES[0]).write_text(json.dumps(short))
    found = read_profiles(folder, layers=6)
    assert found.layers == 6
    assert found.by_type["A100"][1, 1].memory_bytes == tuple(
        size * 2**20 for size in (30, 20, 20, 20, 20, 40)
    )
    assert found.update_s["A100"] == pytest.approx(0.006 * 6 / 4)
    with pytest.raises(FileError, match="unlike numbers of layers: 3, 4"):
        read_profiles(folder)


CLUSTER = {
    "10.0.0.1": {
        "instance_type": "V100",
        "inter_bandwidth": 10,
        "intra_bandwidth": 50,
        "memory": 16,
    },
    "10.0.0.2": {
        "instance_type": "A100",
        "inter_bandwidth": 10,
        "intra_bandwidth": 46,
        "memory": 80,
    },
}


def test_reads_the_nodes_of_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(CLUSTER))
    nodes = read_kinds(tmp_path / "cluster.json")
    assert {address: node.chip for address, node in nodes.items()} == {
        "10.0.0.1": "V100",
        "10.0.0.2": "A100",
    }
    assert nodes["10.0.0.2"].capacity_bytes == 80 * 2**30
    assert nodes["10.0.0.2"].intra_bytes_per_s == 46 * 2**20 * 1000
    assert nodes["10.0.0.1"].inter_bytes_per_s == 10 * 2**20 * 1000


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.pop("model"), "model: missing"),
        (lambda p: p["execution_time"].update(optimizer_time_ms=-1), "optimizer_time_ms"),
        (lambda p: p["execution_time"].update(layer_compute_total_ms=[]), "layer_compute_total_ms"),
        (lambda p: p["execution_time"].update(layer_compute_total_ms=[0, 1, 1, 1]), "than 0"),
        (lambda p: p["execution_memory"].update(layer_memory_total_mb=[1, 2]), "unlike numbers"),
        (lambda p: p.update(profile(1.0, layers=5)), "unlike models"),
    ],
)
def test_refuses_bad_profiles(tmp_path: Path, change, sentence: str) -> None:
    folder = write(tmp_path / "p", NAMES)
    broken = profile(1.0)
    change(broken)
    (folder / NAMES[0]).write_text(json.dumps(broken))
    with pytest.raises(FileError, match=sentence):
        read_profiles(folder)


def test_refuses_folders_that_lack_profiles(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_profiles(tmp_path / "none")
    with pytest.raises(FileError, match="has no profile"):
        read_profiles(write(tmp_path / "empty", []))
    with pytest.raises(FileError, match=r"lacks DeviceType\.V100_tp1_bs1\.json"):
        read_profiles(write(tmp_path / "p", [name for name in NAMES if "V100_tp1_bs1" not in name]))
