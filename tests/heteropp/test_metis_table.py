"""Table 1 of the improved-Metis paper: its instances, and that nothing beats the proven plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from invented import invented_traces_alone

from heteropp.description.files import FileError
from heteropp.search.metis_exact import solve
from heteropp.search.metis_table import SHAPES, problem, table


def write_cluster(folder: Path, *types: str) -> None:
    figures = {"inter_bandwidth": 10, "intra_bandwidth": 50, "memory": 16}
    cluster = {f"10.0.0.{i}": {"instance_type": t, **figures} for i, t in enumerate(types)}
    (folder / "clusterfile.json").write_text(json.dumps(cluster))


@pytest.fixture
def invented_traces() -> Iterator[None]:
    with invented_traces_alone():
        yield


def write_checkout(folder: Path) -> Path:
    """Figures of our own in the form of the public tool's samples, ten layers of an A100."""
    samples = folder / "profile_data_samples"
    samples.mkdir()
    for tp in (1, 2, 4):
        for batch in (1, 2, 4):
            layer_ms, memory_mb = 30 * batch / tp, (4000 + 600 * batch) / tp
            profile = {
                "model": {"parameters": {"parameters_per_layer_bytes": [4e8, *[2e8] * 8, 4e8]}},
                "execution_time": {
                    "forward_backward_time_ms": 300 * batch / tp,
                    "batch_generator_time_ms": 1.0,
                    "optimizer_time_ms": 40.0 / tp,
                    "layer_compute_total_ms": [1.0, *[layer_ms] * 8, 1.0],
                },
                "execution_memory": {"layer_memory_total_mb": [8e3, *[memory_mb] * 8, 1.2e4]},
            }
            path = samples / f"DeviceType.A100_tp{tp}_bs{batch}.json"
            path.write_text(json.dumps(profile))
    return folder


def test_nothing_beats_the_proven_plan(tmp_path: Path) -> None:
    folder = write_checkout(tmp_path)
    write_cluster(folder, "A100", "V100")
    small = replace(SHAPES[0], layers=5, chips=8)
    ((shape, searched),) = table(60.0, folder, (small,))
    assert shape.published["metis"].steps == 612
    assert searched["metis"].complete and searched["metis-oom"].complete
    assert 0 < searched["metis-oom"].steps <= searched["metis"].steps
    exact = searched["exact"]
    assert exact.lower_bound_s == exact.cost_s > 0
    for name in ("metis", "metis-oom"):
        assert searched[name].cost_s >= exact.cost_s * (1 - 1e-9)


def test_profiles_of_our_own_need_no_checkout(invented_traces: None) -> None:
    for shape in SHAPES[:3]:
        made = problem(shape)
        assert (made.chips, made.profiles.layers) == (2 * shape.chips, shape.layers)
        assert made.pooled and made.degrees == (1, 2, 4)
        found = solve(made)
        assert found.gap == 0 and found.cost_s > 0


def test_a_checkout_is_made_up_to_the_instance(invented_traces: None, tmp_path: Path) -> None:
    folder = write_checkout(tmp_path)
    made = problem(SHAPES[3], folder)
    a100, v100 = made.profiles.by_type["A100"], made.profiles.by_type["V100"]
    assert made.chips == 256 and {node.chips for node in made.nodes} == {4}
    assert made.profiles.layers == len(a100[4, 128].seconds) == 40
    assert a100[2, 16].seconds[1] == pytest.approx(0.030 * 4 / 2 * 4)
    assert v100[2, 16].seconds[1] == pytest.approx(3.5 * a100[2, 16].seconds[1])
    assert made.profiles.update_s["V100"] == pytest.approx(3.5 * 2 * 0.040 * 4)
    assert v100[4, 64].memory_bytes == a100[4, 4].memory_bytes

    write_cluster(folder, "A100", "V100")
    assert {node.capacity_bytes for node in problem(SHAPES[0], folder).nodes} == {16 * 2**30}
    write_cluster(folder, "V100")
    with pytest.raises(FileError, match="no node of instance_type A100"):
        problem(SHAPES[0], folder)


def test_a_checkout_without_samples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="profile_data_samples cannot be read"):
        problem(SHAPES[0], tmp_path)
