"""Chips fitted to several measurements: planted figures are found, and public runs predicted."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from clusters import tiny_model
from sampled import sampled

from heteropp.cli import calibrate as command
from heteropp.cost.kernels import host_s, kernels_s
from heteropp.cost.tracing.traces import TracedPiece, TracedProduct
from heteropp.description.chips import ChipSpec, Collectives, Kernels, load_chip
from heteropp.description.files import FileError
from heteropp.description.measured import (
    MeasuredBlock,
    MeasuredRuns,
    MeasuredStep,
    read_chips,
    read_measured,
)
from heteropp.description.presets import measured_names
from heteropp.profiling.fitting import begun, fit, write_fitted
from heteropp.profiling.measured import block_s, most_bytes, planned, predict_times, step_s

KERNELS = Kernels(
    half_side=150.0,
    causal_attention_efficiency=0.4,
    causal_attention_backward_efficiency=0.3,
    bandwidth_share=0.6,
    host_s=3e-5,
    micro_batch_s=2e-3,
)
PLANTED = Collectives(latency_s=4e-5, bytes_per_s=6e10, pair_bytes_per_s=1.2e11)
MODEL = tiny_model(8, hidden=2048, intermediate=8192, heads=16, kv_heads=16, sequence_length=1024)


def planted_chip() -> ChipSpec:
    chip = load_chip("a100")
    compute = replace(chip.compute, efficiency=0.45, launch_s=8e-6)
    return replace(chip, compute=compute, kernels=KERNELS, collectives=PLANTED)


def planted_runs() -> MeasuredRuns:
    """Measurements that are what is predicted of the planted chip."""
    blocks = [
        MeasuredBlock(
            name=f"tp {tp}, {n} sequences",
            model=MODEL.name,
            chip="a100",
            tp=tp,
            sequences=n,
            forward_s=1.0,
            backward_s=1.0,
            fit=True,
        )
        for tp in (1, 2, 8)
        for n in (1, 8)
    ]
    runs = [
        MeasuredStep(
            name=f"pp {pp} dp {dp} tp {tp}",
            model=MODEL.name,
            layers=(8 // pp,) * pp,
            chip="a100",
            dp=dp,
            tp=tp,
            micro_batch=4,
            global_batch=64,
            step_s=1.0,
            fit=(pp, dp, tp) == (2, 1, 2),
        )
        for pp, dp, tp in ((2, 1, 2), (4, 1, 2), (1, 2, 8), (2, 2, 1))
    ]
    empty = MeasuredRuns(name="planted", split="", models=(MODEL,))
    chips = {"a100": planted_chip()}
    return replace(
        empty,
        blocks=tuple(
            replace(block, forward_s=seconds[0], backward_s=seconds[1])
            for block in blocks
            for seconds in [block_s(empty, block, chips)]
        ),
        runs=tuple(replace(run, step_s=step_s(empty, run, chips)) for run in runs),
    )


def test_planted_figures_are_found_and_predict_what_was_not_shown() -> None:
    file = planted_runs()
    found = fit(file, {"a100": load_chip("a100")})

    def worst(chips: dict[str, ChipSpec]) -> float:
        return max(abs(p.error) for p in predict_times(file, chips) if not p.fit)

    assert worst({"a100": load_chip("a100")}) > 0.2
    assert worst(found.chips) < 0.04
    assert found.cross_validated < 0.1
    assert found.parameters["a100"]["efficiency"] == pytest.approx(0.45, rel=0.15)
    assert found.parameters["a100"]["bytes_per_s"] == pytest.approx(6e10, rel=0.3)


def piece(*products: TracedProduct, other: tuple[int, int] = (0, 0)) -> TracedPiece:
    operators = [(p.number, True, p.flops, p.bytes) for p in products]
    return TracedPiece((*operators, (other[0], False, 1, other[1])), products, ((1, 8),), ())


def test_kernels_take_what_their_chip_says() -> None:
    """The seconds are those computed by hand."""
    chip = planted_chip()
    peak, bandwidth = 3.12e14, chip.memory.bandwidth_bytes_per_s
    square = TracedProduct(2, "product", 2 * 4096**3, 10, (1, 4096, 4096, 4096))
    flat = TracedProduct(1, "product", 2 * 4096**2 * 150, 10, (1, 4096, 4096, 150))
    moved = TracedProduct(1, "product", 8, 10**10, (1, 4096, 4096, 4096))
    fused = TracedProduct(1, "attention", 10**12, 10, (16, 1024, 1024, 128))
    expected_s = (
        5 * 8e-6
        + 2 * square.flops / (peak * 0.45 * 4096 / (4096 + 150))
        + flat.flops / (peak * 0.45 / 2)
        + 10**10 / bandwidth
        + 10**12 / (peak * 0.4)
    )
    assert kernels_s(piece(square, flat, moved, fused), "float16", chip) == pytest.approx(
        expected_s
    )
    others_s = 3 * (8e-6 + 10**9 / (bandwidth * 0.6))
    assert kernels_s(piece(other=(3, 10**9)), "float16", chip) == pytest.approx(others_s)
    assert host_s(piece(square, other=(3, 10**9)), chip) == pytest.approx(6 * 3e-5)


def test_a_slow_host_shows_where_the_chip_is_quick_alone() -> None:
    file, chip = planted_runs(), planted_chip()
    slow = replace(chip, kernels=replace(KERNELS, host_s=2e-4))
    few = next(block for block in file.blocks if block.tp == 8 and block.sequences == 1)
    many = next(block for block in file.blocks if block.tp == 1 and block.sequences == 8)
    assert block_s(file, few, {"a100": slow})[0] > 1.3 * block_s(file, few, {"a100": chip})[0]
    assert block_s(file, many, {"a100": slow}) == block_s(file, many, {"a100": chip})


@pytest.mark.parametrize("name", measured_names())
def test_public_measurements_are_plans_that_can_be(name: str) -> None:
    file = read_measured(name)
    chips = read_chips(name, file)
    for run in file.runs:
        plan, cluster = planned(file, run, chips)
        assert plan.world_size == cluster.world_size
    assert file.split and file.bars and any(run.fit for run in file.runs)
    assert sum(run.fit for run in file.runs) <= 0.4 * len(file.runs)  # the rest is predicted
    assert re.search(r"# Source: ", (Path(chips_folder()) / f"{name}.toml").read_text())


def chips_folder() -> Path:
    import heteropp.description.presets as presets

    return Path(presets.__file__).parent / "measured"


def test_peak_memory_of_public_runs() -> None:
    file = read_measured("b200")
    chips = read_chips("b200", file)
    for run in file.runs:
        if run.memory_bytes and run.global_batch == 4 * run.dp:
            assert most_bytes(file, run, chips) == pytest.approx(run.memory_bytes, rel=0.06)


@pytest.mark.parametrize("name", sampled(["b200", "mixed"], 2))
def test_public_runs_that_were_not_fitted_are_predicted(name: str) -> None:
    from accuracy_real import real

    rows = real([name])["rows"]
    assert {row["name"].split(":")[0] for row in rows} == {name}
    for row in rows:
        if row["bar"] and "memory" not in row["name"]:
            assert row["ours"] <= row["bar"], row["name"]


RUNS = """
name = "mine"
split = "all"
[[models]]
name = "tiny"
layers = 2
hidden = 64
heads = 4
kv_heads = 4
intermediate = 128
vocab = 256
sequence_length = 64
[[runs]]
name = "one"
model = "tiny"
chip = "a-mini"
layers = [2]
tp = 2
micro_batch = 1
global_batch = 4
step_s = 0.5
fit = true
"""


def written_chip(folder: Path, text: str) -> Path:
    """Fits figures to a chip file with that text; returns the file that is written."""
    (folder / "mine.toml").write_text(text)
    chip = load_chip(folder / "mine.toml")
    fitted = replace(
        begun(chip),
        compute=replace(chip.compute, efficiency=0.25, launch_s=3e-5),
        links=replace(chip.links, nic_bytes_per_s=7e7),
    )
    write_fitted(fitted, folder / "fitted.toml", "Fitted by a test.")
    return folder / "fitted.toml"


def test_figures_are_written_below_headers_with_comments(tmp_path) -> None:
    text = load_chip("a-mini").path.read_text()
    text = text.replace("[compute]", "  [ compute ]  # peaks").replace("[links]", "[links] # cable")
    written = load_chip(written_chip(tmp_path, text))
    assert (written.compute.efficiency, written.compute.launch_s) == (0.25, 3e-5)
    assert written.links.nic_bytes_per_s == 7e7


def test_what_is_said_of_other_sections_stays(tmp_path) -> None:
    sections = load_chip("a-mini").path.read_text().split("[links]")
    kernels = "# of the kernels\n[kernels]\n"
    kernels += "".join(f"{k} = {v}\n" for k, v in asdict(KERNELS).items() if v is not None)
    text = f"{sections[0]}{kernels}\n# of the cables\n[links]{sections[1]}"
    written = written_chip(tmp_path, text).read_text()
    assert "\n\n# of the cables\n[links]\n" in written
    assert "of the kernels" not in written


def test_a_figure_that_cannot_be_written_is_refused(tmp_path) -> None:
    text = load_chip("a-mini").path.read_text()
    links = re.search(r"\[links\]\n((?:\w+ *= .*\n)+)", text)
    assert links
    pairs = ", ".join(line.partition("#")[0].strip() for line in links[1].splitlines())
    text = f"links = {{ {pairs} }}\n" + text.replace(links[0], "")
    with pytest.raises(FileError, match=r"mine.toml: expected nic_bytes_per_s on a line of its"):
        written_chip(tmp_path, text)
    assert not (tmp_path / "fitted.toml").exists()


BLOCK = """
[[blocks]]
name = "alone"
model = "tiny"
chip = "a-mini"
tp = 3
sequences = 1
forward_s = 0.1
backward_s = 0.2
fit = true
"""


def run(arguments: list[str], capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        command.app(arguments)
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_the_command_fits_and_writes_a_chip_file(tmp_path, capsys) -> None:
    (tmp_path / "runs.toml").write_text(RUNS)
    arguments = ["--runs", str(tmp_path / "runs.toml"), "--output", str(tmp_path / "chips")]
    code, out, err = run([*arguments, "--json"], capsys)
    assert code == 0, err
    found = json.loads(out)
    assert found["points"][0]["predicted"] == pytest.approx(0.5, rel=0.1)
    written = load_chip(tmp_path / "chips" / "a-mini.toml")
    assert written.compute.efficiency == pytest.approx(
        found["parameters"]["a-mini"]["efficiency"], rel=1e-3
    )
    assert written.kernels and written.collectives
    assert written.memory == load_chip("a-mini").memory
    # and what it says is what is predicted
    (tmp_path / "again.toml").write_text(RUNS.replace('"a-mini"', '"chips/a-mini.toml"'))
    again = read_measured(tmp_path / "again.toml")
    predicted = predict_times(again, read_chips(tmp_path / "again.toml", again))[0].predicted
    assert predicted == pytest.approx(found["points"][0]["predicted"], rel=2e-3)


BAD = {
    "an unknown model": (RUNS.replace('model = "tiny"', 'model = "big"'), "'big' is unknown"),
    "layers that do not add up": (RUNS.replace("[2]", "[3]"), "layers add up to 3"),
    "a batch that does not divide": (RUNS.replace("= 4\nstep", "= 4\ndp = 3\nstep"), "no multiple"),
    "no chip": (RUNS.replace('chip = "a-mini"', ""), "has chip and chips, or none"),
    "a stage of no replicas": (
        RUNS.replace('chip = "a-mini"\nlayers = [2]', "chips = [[], []]\nlayers = [1, 1]"),
        "runs[0].chips[0]",
    ),
    "two models of one name": (
        RUNS[: RUNS.index("[[runs]]")] + RUNS[RUNS.index("[[models]]") :],
        "two models have the same name",
    ),
    "an unknown chip": (RUNS.replace("a-mini", "z-mini"), "'z-mini'"),
    "nothing to fit": (RUNS.replace("fit = true", ""), "marks nothing with fit"),
    "no seconds": (RUNS.replace("step_s = 0.5", "step_s = 0.0"), "step_s"),
    "a degree that does not divide": (
        RUNS.replace("tp = 2", "tp = 3"),
        "runs 'one': pipelines[0].stages[0]: tensor-parallel degree 3 does not divide",
    ),
    "a block's degree that does not divide": (
        RUNS[: RUNS.index("[[runs]]")] + BLOCK,
        "blocks 'alone': tensor-parallel degree 3 does not divide",
    ),
    "a group that is larger than a node": (
        RUNS.replace("heads = 4", "heads = 32").replace("tp = 2", "tp = 32"),
        "runs 'one': tp is 32; a node of chip a-mini has 16 chips",
    ),
    "a block's group that is larger than a node": (
        RUNS[: RUNS.index("[[runs]]")].replace("heads = 4", "heads = 32")
        + BLOCK.replace("tp = 3", "tp = 32"),
        "blocks 'alone': tp is 32; a node of chip a-mini has 16 chips",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_runs_are_one_sentence(tmp_path, capsys, kind: str) -> None:
    text, expected = BAD[kind]
    (tmp_path / "runs.toml").write_text(text)
    code, _, err = run(["--runs", str(tmp_path / "runs.toml")], capsys)
    assert code == 2
    assert expected in err and len(err.strip().splitlines()) == 1


def test_a_run_given_twice_is_refused(tmp_path) -> None:
    twice = RUNS + RUNS[RUNS.index("[[runs]]") :]
    (tmp_path / "runs.toml").write_text(twice)
    with pytest.raises(FileError, match="'one' is there twice"):
        read_measured(tmp_path / "runs.toml")


def test_one_run_and_several_are_not_asked_for_together(capsys) -> None:
    code, _, err = run(["--runs", "b200", "--pp", "2"], capsys)
    assert code == 2 and "--pp was given, too" in err
    code, _, err = run(["--pp", "2"], capsys)
    assert code == 2 and "--cluster is missing" in err
