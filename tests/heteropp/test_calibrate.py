"""heteropp-calibrate: what the chip files hold is what it gives, and it finds what was planted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster, write_model
from sampled import sampled

from heteropp.cli import calibrate as command
from heteropp.description.chips import load_chip
from heteropp.description.cluster import read_cluster
from heteropp.profiling.calibrate import (
    CalibrationError,
    MeasuredRun,
    calibrate,
    uniform_plan,
    with_efficiency,
    write_efficiency,
)
from heteropp.simulator.simulate import simulate


def run(arguments: list[str], capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        command.app(arguments)
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.mark.parametrize("chip", sampled("bacd", 3, everyday=1))
def test_the_papers_chips_hold_what_the_command_in_their_file_gives(chip: str, capsys) -> None:
    """H2, Table 6."""
    text = load_chip(chip).path.read_text()
    words = re.search(r"heteropp-calibrate ([^\\]+)\\\n# +(.+)", text)
    assert words
    code, out, err = run([*words[1].split(), *words[2].split(), "--json"], capsys)
    assert code == 0, err
    found = json.loads(out)
    assert found["efficiency"] == load_chip(chip).compute.efficiency
    measured = {"a": 136.9, "b": 143.7, "c": 46.2, "d": 99.5}[chip]
    assert found["tokens_per_chip_per_s"] == pytest.approx(measured, rel=1e-3)
    assert found["memory_bytes"] <= found["capacity_bytes"]


def test_table_6_needs_recompute_and_offload_where_it_says_so() -> None:
    """Chip A fits its memory without recompute and offload; B, C and D do not (H2, Table 6)."""
    from heteropp.cost.planned import rank_memory
    from heteropp.description.model import read_model

    model = read_model("h2-100b")
    for chip, (pp, dp, tp), fits in (
        ("a", (16, 4, 4), True),
        ("b", (16, 4, 4), False),
        ("c", (32, 2, 4), False),
        ("d", (8, 4, 8), False),
    ):
        cluster = read_cluster(f"h2-256-{chip}")
        plan = uniform_plan(
            MeasuredRun(
                cluster=cluster,
                model=model,
                global_batch=512,
                pp=pp,
                dp=dp,
                tp=tp,
                zero_stage=1,
                tokens_per_chip_per_s=1,
            )
        )
        need = max(memory.total for memory in rank_memory(plan, cluster))
        assert (need <= load_chip(chip).memory.capacity_bytes) == fits, chip


# products of matrices take most of the time
MODEL = tiny_model(4, hidden=256, intermediate=1024, sequence_length=256)


def small_run(folder: Path, **changes) -> MeasuredRun:
    cluster = read_cluster(write_cluster(folder / "cluster.toml", ("a-mini", 4), ("a-mini", 4)))
    shape = dict(pp=2, dp=2, tp=2, global_batch=8, tokens_per_chip_per_s=1.0)
    return MeasuredRun(**{"cluster": cluster, "model": MODEL, **shape, **changes})


def test_a_planted_efficiency_is_found(tmp_path) -> None:
    for efficiency, recompute in ((0.31, False), (0.7, True)):
        planned = small_run(tmp_path, recompute=recompute)
        cluster = with_efficiency(planned.cluster, efficiency)
        step_s = simulate(uniform_plan(planned), cluster, whole_backwards=True).step_s
        measured = planned.global_batch * planned.model.sequence_length / step_s / 8
        found = calibrate(small_run(tmp_path, recompute=recompute, tokens_per_chip_per_s=measured))
        assert found.efficiency == pytest.approx(efficiency, abs=2e-3)


def test_more_than_the_peak_gives_cannot_be(tmp_path) -> None:
    with pytest.raises(CalibrationError, match="no efficiency explains"):
        calibrate(small_run(tmp_path, tokens_per_chip_per_s=1e9))


def test_the_chip_file_is_written_with_nothing_else_changed(tmp_path, capsys) -> None:
    write_cluster(tmp_path / "c.toml", ("a-mini", 4))
    write_model(tmp_path / "m.toml", MODEL)
    arguments = ["--cluster", str(tmp_path / "c.toml"), "--model", str(tmp_path / "m.toml")]
    arguments += ["--global-batch", "8", "--pp", "2", "--dp", "2", "--tp", "1"]
    arguments += ["--tokens-per-chip-per-s", "100", "--output", str(tmp_path / "chip.toml")]
    code, out, err = run(arguments, capsys)
    assert code == 0, err
    assert "assumed:" in out and "explicit attention" in out
    found = float(re.search(r"reaches ([\d.]+)", out)[1])  # type: ignore[index]
    before = load_chip("a-mini").path.read_text().splitlines()
    after = (tmp_path / "chip.toml").read_text().splitlines()
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert [old.split()[0] for old, _ in changed] == ["efficiency"]
    assert load_chip(tmp_path / "chip.toml").compute.efficiency == pytest.approx(found)


def test_efficiencies_of_single_dtypes_do_not_stand_in_its_place(tmp_path) -> None:
    """A chip file that heteropp-profile --kernels wrote has an efficiency for each dtype."""
    lines = (
        *("[kernels]", "half_side = 100.0", "causal_attention_efficiency = 0.5"),
        *("causal_attention_backward_efficiency = 0.5", "bandwidth_share = 0.8", "host_s = 1e-5"),
        *("micro_batch_s = 1e-3", "float16_efficiency = 0.9", "float16_half_side = 10.0"),
    )
    measured, output = tmp_path / "measured.toml", tmp_path / "chip.toml"
    measured.write_text("\n".join([load_chip("a100").path.read_text(), *lines, ""]))
    write_efficiency(measured, 0.4, output)
    assert load_chip(output) == load_chip(measured).with_efficiency(0.4)


BAD = {
    "degrees that do not fill the cluster": (["--dp", "3"], "pp 2 x dp 3 x tp 1 is 6"),
    "layers that do not divide": (["--pp", "3", "--dp", "1"], "pp 3 x dp 1"),
    "no throughput": (["--tokens-per-chip-per-s", "0"], "expected more than 0"),
    "no number": (["--tokens-per-chip-per-s", "nan"], "expected a finite number"),
    "two chip types": (["--cluster", "quickstart"], "expected one type"),
    "a batch that does not divide": (["--global-batch", "7"], "does not divide the global batch"),
    "an unknown cluster": (["--cluster", "nowhere"], "expected the path of a cluster file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_sentence(tmp_path, capsys, kind: str) -> None:
    extra, expected = BAD[kind]
    write_cluster(tmp_path / "c.toml", ("a-mini", 4))
    write_model(tmp_path / "m.toml", tiny_model(4))
    arguments = ["--cluster", str(tmp_path / "c.toml"), "--model", str(tmp_path / "m.toml")]
    arguments += ["--global-batch", "8", "--pp", "2", "--dp", "2", "--tp", "1"]
    code, _, err = run([*arguments, "--tokens-per-chip-per-s", "1", *extra], capsys)
    assert code == 2
    assert expected in err and len(err.strip().splitlines()) == 1
