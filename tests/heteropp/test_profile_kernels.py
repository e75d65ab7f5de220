"""heteropp-profile --kernels: figures of a chip that is not as its data sheet says."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import forks
import pytest
from clusters import tiny_model, write_cluster, write_model

from ditorch.chips import ChipSpec, load_chip
from heteropp.cost.stage_time import StageShape, stage_time
from heteropp.description.chips import Kernels
from heteropp.description.cluster import Link, read_cluster
from heteropp.description.profile import read_profile
from heteropp.profiling.operators import MeasuredOperator, fit_kernels, operators_of

MODEL = tiny_model(
    4, hidden=80, heads=4, kv_heads=2, intermediate=144, vocab=96, sequence_length=56
)
NONE = Link(latency_s=0.0, bytes_per_s=1e18)
TRUTH = {"launch_s": 8e-5, "efficiency": 0.4, "bandwidth_bytes_per_s": 2.5e8}


def profile(folder: Path, environment: dict[str, str], *more: str) -> str:
    arguments = ("--cluster", "cluster.toml", "--model", "model.toml", *more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = ["-m", "heteropp.cli.profile", *arguments]
    done = forks.run(command, environment, folder, timeout_s=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def made(folder: Path) -> Path:
    """A cluster file that names a data sheet, and a chip's file that is the truth."""
    lines = load_chip("c-mini").path.read_text().splitlines()
    (folder / "sheet.toml").write_text("\n".join(lines) + "\n")
    for at, line in enumerate(lines):
        key = line.split("=")[0].strip()
        if key in TRUTH:
            lines[at] = f"{key} = {TRUTH[key]}"
    (folder / "truth.toml").write_text("\n".join(lines) + "\n")
    write_cluster(folder / "cluster.toml", ("sheet.toml", 2))
    write_model(folder / "model.toml", MODEL)
    return folder / "truth.toml"


@pytest.mark.long
def test_what_is_measured_predicts_a_model_that_was_not(tmp_path: Path) -> None:
    truth = {"DITORCH_VENDOR": "emuchip", "DITORCH_CHIP": str(made(tmp_path))}
    said = profile(tmp_path, truth, "--kernels", "chips")
    assert "Median error of others: product" in said
    found = load_chip(tmp_path / "chips" / "sheet.toml")
    assert found.kernels is not None
    assert found.compute.launch_s == pytest.approx(TRUTH["launch_s"], rel=0.03)
    assert found.kernels.float32_efficiency == pytest.approx(TRUTH["efficiency"], rel=0.01)
    assert found.kernels.bandwidth_share == pytest.approx(0.5, rel=0.01)
    sheet = load_chip(tmp_path / "sheet.toml")
    assert (found.memory, found.links) == (sheet.memory, sheet.links)
    assert found.compute.efficiency == sheet.compute.efficiency  # an emulated chip is paced by it

    # the model's own blocks, as the true chip runs them
    profile(tmp_path, truth, "--tp", "1", "--most-layers", "2", "--no-links", "-o", "blocks.json")
    blocks = read_profile(tmp_path / "blocks.json")
    measured = blocks.of("sheet.toml")

    model = blocks.model  # which attends as such chips do

    def seconds(chip: ChipSpec) -> list[float]:
        shape = StageShape(
            layers=2,
            first=False,
            last=False,
            tp=1,
            dp=1,
            sequences=1,
            zero_stage=0,
            recompute=False,
        )
        time = stage_time(model, shape, chip, NONE, NONE)
        return [time.forward_s, time.backward_s, time.update_s]

    terms = ("forward_s",), ("backward_input_s", "backward_weight_s"), ("update_s",)
    kind = (False, False, 1, 1)
    expected = [sum(measured.seconds(term, 2, kind) for term in parts) for parts in terms]
    assert seconds(found) == pytest.approx(expected, rel=0.03)
    assert seconds(sheet) != pytest.approx(expected, rel=0.3)


def test_a_real_chip_is_timed(tmp_path: Path) -> None:
    """The CPU, which nothing emulates, beside a sheet of far higher peaks."""
    made(tmp_path)
    sheet = (tmp_path / "sheet.toml").read_text()
    quick = {"float32_flops": "1e12", "bandwidth_bytes_per_s": "1e11", "capacity_bytes": "8000000"}
    for key, value in quick.items():
        sheet = re.sub(rf"(?m)^{key}( *)=.*", f"{key} = {value}", sheet)
    (tmp_path / "sheet.toml").write_text(sheet)
    said = profile(tmp_path, {"DITORCH_VENDOR": "cpu"}, "--kernels", "chips", "--json")
    found = load_chip(tmp_path / "chips" / "sheet.toml")
    told = json.loads(said)["sheet.toml"]
    assert found.kernels is not None and found.kernels.host_s == 0  # it is its own host
    assert 1e-8 < found.compute.launch_s == pytest.approx(told["launch_s"], rel=1e-3)
    assert {each["kind"] for each in told["operators"]} == {
        "product",
        "attention",
        "attention_backward",
        "move",
    }
    assert all(each["seconds"] > 0 for each in told["operators"])


PLANTED = Kernels(
    half_side=1.0,
    causal_attention_efficiency=0.4,
    causal_attention_backward_efficiency=0.3,
    bandwidth_share=0.6,
    host_s=3e-5,
    micro_batch_s=2e-3,
    float16_efficiency=0.7,
    float16_half_side=150.0,
    bfloat16_efficiency=0.5,
    bfloat16_half_side=40.0,
)


def test_planted_figures_are_found_dtype_by_dtype() -> None:
    sheet = load_chip("a100")
    chip = replace(sheet, compute=replace(sheet.compute, launch_s=8e-6), kernels=PLANTED)
    found = sheet
    for dtype in ("float16", "bfloat16"):
        measured = [
            MeasuredOperator(operator=operator, seconds=operator.predicted_s(chip))
            for operator in operators_of(sheet, dtype)
        ]
        found = fit_kernels(found, measured, 3e-5)
        assert all(abs(each.error(found)) < 1e-3 for each in measured)
    assert found.kernels is not None
    for name in ("causal_attention_efficiency", "bandwidth_share", "float16_half_side", "host_s"):
        assert getattr(found.kernels, name) == pytest.approx(getattr(PLANTED, name), rel=0.01)
    assert found.kernels.bfloat16_efficiency == pytest.approx(0.5, rel=0.01)


def test_an_efficiency_of_the_cluster_file_goes_before_the_chip_file_s(tmp_path: Path) -> None:
    chip = replace(load_chip("a100"), kernels=PLANTED)
    assert chip.product_efficiency("float16", 150) == pytest.approx(0.35)
    assert chip.product_efficiency("float32", 1) == pytest.approx(chip.compute.efficiency / 2)
    other = chip.with_efficiency(0.2)
    for dtype in ("float16", "float32"):
        assert other.product_efficiency(dtype, 1) == pytest.approx(0.1)
    text = 'name = "x"\n[[nodes]]\nchip = "b200"\nefficiency = 0.2\n'
    (tmp_path / "cluster.toml").write_text(text)
    assert read_cluster(tmp_path / "cluster.toml").chip(0).compute.efficiency == 0.2


def test_a_chip_that_is_faster_than_its_file_says_is_refused(tmp_path: Path) -> None:
    truth = made(tmp_path)
    truth.write_text(re.sub(r"float32_flops .*", "float32_flops = 4e10", truth.read_text()))
    environment = {"DITORCH_VENDOR": "emuchip", "DITORCH_CHIP": str(truth)}
    with pytest.raises(AssertionError, match=r"compute.float32_flops is 4.505e\+09, and products"):
        profile(tmp_path, environment, "--kernels", "chips")
    assert not (tmp_path / "chips" / "sheet.toml").exists()


def test_a_dtype_that_is_not_measured_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    write_model(tmp_path / "model.toml", replace(MODEL, dtype="float64"))
    with pytest.raises(AssertionError, match="--kernels measures float32, float16, bfloat16"):
        profile(tmp_path, {}, "--kernels", "chips")
