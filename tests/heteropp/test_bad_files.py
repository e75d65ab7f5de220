"""Malformed cluster, model and plan files: one sentence that names the file, and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster, write_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from heteropp.cli import search as search_command
from heteropp.cli import simulate as simulate_command
from heteropp.description.plan import Pipeline, Plan, Replica, Stage, write_plan


def run(app, arguments: list[str], capsys) -> str:
    """Runs a command as its console script would; gives its one sentence on standard error."""
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    printed = capsys.readouterr()
    assert ended.value.code == 2, printed.err
    assert "Traceback" not in printed.err
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err
    return lines[0]


def search_with(folder: Path, capsys) -> str:
    arguments = ["--cluster", str(folder / "cluster.toml"), "--model", str(folder / "model.toml")]
    return run(search_command.app, [*arguments, "--global-batch", "4"], capsys)


def simulate_with(folder: Path, capsys) -> str:
    arguments = ["--plan", str(folder / "plan.json"), "--cluster", str(folder / "cluster.toml")]
    return run(simulate_command.app, arguments, capsys)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good cluster, model and plan."""
    write_cluster(tmp_path / "cluster.toml", ("a-mini", 1), ("b-mini", 2))
    write_model(tmp_path / "model.toml", tiny_model(4))
    stages = (
        Stage(
            layers=(0, 1),
            recompute=False,
            replicas=(Replica(ranks=(0,), chip="a-mini", batch_share=2),),
        ),
        Stage(
            layers=(1, 4),
            recompute=True,
            replicas=(
                Replica(ranks=(1,), chip="b-mini", batch_share=1),
                Replica(ranks=(2,), chip="b-mini", batch_share=1),
            ),
        ),
    )
    plan = Plan(
        model=tiny_model(4),
        global_batch=8,
        micro_batch=2,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=4, stages=stages),),
    )
    write_plan(plan, tmp_path / "plan.json")
    return tmp_path


CLUSTERS = {
    "empty": "",
    "not TOML": "name = = 3",
    "no name": '[[nodes]]\nchip = "a-mini"',
    "no nodes": 'name = "x"\nnodes = []',
    "nodes missing": 'name = "x"',
    "unknown key": 'name = "x"\ncolour = "red"\n[[nodes]]\nchip = "a-mini"',
    "unknown key in a node": 'name = "x"\n[[nodes]]\nchip = "a-mini"\nchip_count = 2',
    "unknown chip": 'name = "x"\n[[nodes]]\nchip = "e-mini"',
    "chip file missing": 'name = "x"\n[[nodes]]\nchip = "mine.toml"',
    "chip is a number": 'name = "x"\n[[nodes]]\nchip = 3',
    "no chips": 'name = "x"\n[[nodes]]\nchip = "a-mini"\nchips = 0',
    "negative nodes": 'name = "x"\n[[nodes]]\nchip = "a-mini"\ncount = -1',
    "more chips than a node has": 'name = "x"\n[[nodes]]\nchip = "b-mini"\nchips = 9',
    "half a chip": 'name = "x"\n[[nodes]]\nchip = "a-mini"\nchips = 1.5',
    "too many chips": 'name = "x"\n[[nodes]]\nchip = "a-mini"\ncount = 1000000',
    "a number too long to read": "name = " + "1" * 5000,
    "a hexadecimal number too long to write": "name = 0x" + "f" * 5000,
    "nested too deeply": "name = " + "[" * 5000,
    "a key nested too deeply": "a" + ".a" * 1200 + " = 1",
    "nodes is a table": 'name = "x"\n[nodes]\nchip = "a-mini"',
}

MODEL_LINES = {
    "no layers": ("layers", None),
    "zero layers": ("layers", "0"),
    "layers is text": ("layers", '"four"'),
    "layers is a fraction": ("layers", "4.5"),
    "huge layers": ("layers", "10000000000000000000000"),
    "negative hidden": ("hidden", "-16"),
    "odd head size": ("hidden", "20"),
    "heads do not divide": ("heads", "3"),
    "kv heads do not divide": ("kv_heads", "3"),
    "boolean vocabulary": ("vocab", "true"),
    "not a number for the norm": ("norm_eps", "nan"),
    "infinite rotary base": ("rope_theta", "inf"),
    "unknown dtype": ("dtype", '"float8"'),
    "unknown key": ("colour", '"red"'),
}


def edit(change: Callable[[dict], object]) -> Callable[[dict], dict]:
    def apply(plan: dict) -> dict:
        change(plan)
        return plan

    return apply


def stage(plan: dict, index: int) -> dict:
    return plan["pipelines"][0]["stages"][index]


PLANS: dict[str, Callable[[dict], object]] = {
    "a later version": edit(lambda p: p.update(version=99)),
    "no pipelines": edit(lambda p: p.update(pipelines=[])),
    "pipelines missing": edit(lambda p: p.pop("pipelines")),
    "a list": lambda p: [p],
    "slack without end": edit(lambda p: stage(p, 0).update(slack=10**12)),
    "a lost layer": edit(lambda p: stage(p, 1).update(layers=[2, 4])),
    "a layer held twice": edit(lambda p: stage(p, 1).update(layers=[0, 4])),
    "the last layer missing": edit(lambda p: stage(p, 1).update(layers=[1, 3])),
    "an empty stage": edit(lambda p: stage(p, 0).update(layers=[0, 0])),
    "three layer bounds": edit(lambda p: stage(p, 0).update(layers=[0, 1, 2])),
    "no stages": edit(lambda p: p["pipelines"][0].update(stages=[])),
    "a rank used twice": edit(lambda p: stage(p, 1)["replicas"][0].update(ranks=[0])),
    "a rank missing": edit(lambda p: stage(p, 1)["replicas"][1].update(ranks=[7])),
    "a negative rank": edit(lambda p: stage(p, 0)["replicas"][0].update(ranks=[-1])),
    "ranks in another order": edit(
        lambda p: stage(p, 1).update(
            replicas=[{"ranks": [2, 1], "chip": "b-mini", "batch_share": 2}]
        )
    ),
    "no ranks": edit(lambda p: stage(p, 0)["replicas"][0].update(ranks=[])),
    "no replicas": edit(lambda p: stage(p, 0).update(replicas=[])),
    "unlike tp in a stage": edit(lambda p: stage(p, 1)["replicas"][1].update(ranks=[2, 3])),
    "batch shares that do not sum up": edit(
        lambda p: stage(p, 1)["replicas"][0].update(batch_share=2)
    ),
    "a batch share of none": edit(lambda p: stage(p, 1)["replicas"][0].update(batch_share=0)),
    "micro-batches that do not fill the batch": edit(
        lambda p: p["pipelines"][0].update(micro_batches=3)
    ),
    "no micro-batches": edit(lambda p: p["pipelines"][0].update(micro_batches=0)),
    "an unknown schedule": edit(lambda p: p.update(schedule="zigzag")),
    "an unknown ZeRO stage": edit(lambda p: p.update(zero_stage=3)),
    "a model that cannot be": edit(lambda p: p["model"].update(heads=3)),
    "another cluster's chip": edit(lambda p: stage(p, 0)["replicas"][0].update(chip="d-mini")),
    "rows cut over one rank": edit(lambda p: stage(p, 0).update(sequence_parallel=True)),
    "attention recomputed twice": edit(lambda p: stage(p, 1).update(selective_recompute=True)),
    "recompute is a number": edit(lambda p: stage(p, 0).update(recompute=1)),
    "an unknown key": edit(lambda p: p.update(colour="red")),
}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_bad_cluster(folder: Path, capsys, kind: str) -> None:
    (folder / "cluster.toml").write_text(CLUSTERS[kind])
    assert "cluster.toml" in search_with(folder, capsys)


@pytest.mark.parametrize("kind", MODEL_LINES)
def test_bad_model(folder: Path, capsys, kind: str) -> None:
    key, value = MODEL_LINES[kind]
    lines = (folder / "model.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(f"{key} ")]
    (folder / "model.toml").write_text("\n".join([*kept, f"{key} = {value}" if value else ""]))
    assert "model.toml" in search_with(folder, capsys)


@pytest.mark.parametrize("kind", PLANS)
def test_bad_plan(folder: Path, capsys, kind: str) -> None:
    path = folder / "plan.json"
    path.write_text(json.dumps(PLANS[kind](json.loads(path.read_text()))))
    assert simulate_with(folder, capsys)


@pytest.mark.parametrize("name", ["cluster.toml", "model.toml"])
def test_files_that_are_no_text(folder: Path, capsys, name: str) -> None:
    path = folder / name
    path.write_bytes(b"name = \xff\xfe")
    assert "UTF-8" in search_with(folder, capsys)
    path.unlink()
    assert "cannot be read" in search_with(folder, capsys)
    path.mkdir()
    assert "cannot be read" in search_with(folder, capsys)


@pytest.mark.parametrize("name", ["cluster.toml", "model.toml"])
def test_a_device_without_an_end_is_no_file(folder: Path, capsys, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert f"{folder / name} has more than 256 MiB" in search_with(folder, capsys)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_damage_to_a_plan_is_one_sentence_or_harmless(folder: Path, capsys, data) -> None:
    """Replaces one value anywhere in a good plan by something else."""
    path = folder / "plan.json"
    good = path.read_text()
    plan = json.loads(good)
    places = list(_places(plan))
    parent, key = data.draw(st.sampled_from(places))
    junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    parent[key] = data.draw(junk | st.lists(st.integers(-3, 3), max_size=3) | st.just({}))
    damaged = folder / "damaged.json"
    damaged.write_text(json.dumps(plan))
    arguments = ["--plan", str(damaged), "--cluster", str(folder / "cluster.toml"), "--json"]
    with pytest.raises(SystemExit) as ended:
        simulate_command.app(arguments)
    printed = capsys.readouterr()
    assert ended.value.code in (0, 2)
    if ended.value.code == 2:
        assert len(printed.err.strip().splitlines()) == 1


def test_a_chip_s_name_may_be_printed(folder: Path, capsys) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    plan["pipelines"][0]["stages"][0]["replicas"][0]["chip"] = "\r"
    (folder / "damaged.json").write_text(json.dumps(plan))
    files = folder / "damaged.json", folder / "cluster.toml"
    with pytest.raises(SystemExit) as ended:
        simulate_command.app(["--plan", str(files[0]), "--cluster", str(files[1])])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.endswith('stages[0].replicas[0] has chip "\\r"; expected the name of one\n')


def _places(value):
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


@pytest.mark.parametrize("option", ["--trace", "--picture"])
def test_a_timeline_that_cannot_be_written(folder: Path, capsys, option: str) -> None:
    arguments = ["--plan", str(folder / "plan.json"), "--cluster", str(folder / "cluster.toml")]
    for place in (folder / "plan.json" / "beneath a file", folder):
        sentence = run(simulate_command.app, [*arguments, option, str(place)], capsys)
        assert str(place) in sentence or f"{place.parent} cannot be made" in sentence


def test_a_plan_that_cannot_be_written(folder: Path, capsys) -> None:
    arguments = ["--cluster", str(folder / "cluster.toml"), "--model", str(folder / "model.toml")]
    arguments += ["--global-batch", "4", "--output", str(folder)]
    assert f"{folder} is a folder; expected the name of a file to write" in run(
        search_command.app, arguments, capsys
    )


def test_all_that_is_wrong_with_the_nodes_is_one_sentence(folder: Path, capsys) -> None:
    nodes = ['chip = "e-mini"', 'chip = "f-mini"', 'chip = "a-mini"\nchips = 99']
    (folder / "cluster.toml").write_text("name = 'x'\n[[nodes]]\n" + "\n[[nodes]]\n".join(nodes))
    sentence = search_with(folder, capsys)
    for wrong in (
        "nodes[0].chip: chip 'e-mini'",
        "nodes[1].chip: chip 'f-mini': expected the same",
        "nodes[2].chips is 99",
    ):
        assert wrong in sentence


def test_a_file_without_an_end_is_not_read(folder: Path, capsys) -> None:
    for name in ("cluster.toml", "model.toml"):
        kept = (folder / name).read_text()
        os.truncate(folder / name, 1 << 40)  # a hole, which takes no room on the disk
        assert "has more than 256 MiB" in search_with(folder, capsys)
        (folder / name).write_text(kept)


def test_the_real_command_exits_with_2(folder: Path) -> None:
    (folder / "cluster.toml").write_text(CLUSTERS["unknown chip"])
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "heteropp.cli.search", "--global-batch", "4"),
            *("--cluster", folder / "cluster.toml", "--model", folder / "model.toml"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "'e-mini'" in ended.stderr and "nodes[0]" in ended.stderr
