"""heteropp-board: what the page shows is what the run's files say, while it trains and after."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from chromium import Tab, chromium
from commands import run_command
from large_run import write_large_run
from training_run import CHIP, Training, make_plan, tiny_model, write_cluster

from heteropp.board.board import Known, RunBoard
from heteropp.board.server import BoardServer
from heteropp.board.steps import StepTable
from heteropp.cli.board import app

STEPS = 5
BACK = {"B": "B", "I": "B"}  # a backward, or its first half
PLAN = make_plan(tiny_model(), [2, 2], [1, 1], [2, 1], [False, True])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A run of two stages, one of two chips, that has come to its end."""
    training = Training(tmp_path_factory.mktemp("finished"), PLAN, "--steps", str(STEPS))
    return training.finish()


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(finished: Training, tab: Tab) -> Path:
    file = finished.output.parent / "board.html"
    shown = run_command(app, [finished.output, "--output", file])
    assert shown.exit_code == 0, shown.output
    return file


def test_a_file_opens_from_disk_without_network(finished: Training, page: Path, tab: Tab) -> None:
    tab.offline(True)
    tab.problems(), tab.requests()
    tab.open(page.as_uri())
    assert [url for url in tab.requests() if not url.startswith("data:")] == [page.as_uri()]
    tab.offline(False)
    metrics = finished.metrics
    figures = tab.run("return board.runs[0].figures")
    for name in ("loss", "gradient_norm", "tokens_per_s", "step_s", "bubble", "learning_rate"):
        assert figures[name] == [line[name] for line in metrics]
    for rank in range(PLAN.world_size):
        peaks = [line["peak_memory_bytes"][rank] for line in metrics]
        assert figures[f"memory/rank {rank}"] == peaks
        assert tab.run(f"return board.runs[0].peaks[{rank}]") == max(peaks)
    sent = [line["sent_bytes"]["inside neutral-0"] for line in metrics]
    assert figures["link/inside neutral-0"] == sent and min(sent) > 0
    assert tab.text("#now-step .value") == f"{STEPS} of {STEPS}"
    assert tab.text("#now-loss .value") == f"{metrics[-1]['loss']:.4f}"
    shown = tab.run("return [...document.querySelectorAll('.chart:not([hidden])')].map(c => c.id)")
    assert {"chart-loss", "chart-gradient", "chart-memory", "chart-links"} <= set(shown)
    assert tab.text("#cluster-facts") == "test · 1 node · 3 chips"
    stages = tab.run("return [...document.querySelectorAll('.stage')].map(s => s.innerText)")
    assert "layers 0 to 1" in stages[0] and "dp 1 · tp 2" in stages[0]
    assert "layers 2 to 3" in stages[1] and "recompute" in stages[1]
    assert tab.problems() == []


def test_a_micro_batch_is_followed_through_all_stages(page: Path, tab: Tab) -> None:
    tab.open(page.as_uri())
    timelines = tab.run("return timeline.content.timelines.map((t) => t.name)")
    assert timelines == ["predicted", "measured"]
    # the middle of the longest forward that was measured
    where = tab.run("""
        const spans = timeline.content.timelines[1].rows[0];
        const forward = timeline.content.kinds.findIndex((kind) => kind.name === "F");
        const longest = spans.filter((s) => s[0] === forward).sort((a, b) => b[4] - a[4])[0];
        const l = timeline.layout();
        return [timeline.toX(longest[3] + longest[4] / 2, l), 1.5 * l.lane, longest[1]];
    """)
    tab.click_canvas(*where[:2])
    assert tab.run("return timeline.followed.microBatch") == where[2]
    assert tab.run("return document.querySelector('#follow').value") == f"0/{where[2]}"
    said = tab.text("#followed")
    assert said.startswith(f"Micro-batch {where[2]}: predicted ")
    assert said.count("through 2 stages") == 2
    # forward, forward, backward, backward: three arrows in each timeline
    arrows = tab.run("""
        const { arrows, timelines } = timeline.content;
        return arrows.filter(([t, row, i]) => timeline.isFollowed(row, timelines[t].rows[row][i]))
          .map(([t, ...ends]) => ends);
    """)
    kinds = tab.run("return timeline.content.kinds.map((kind) => kind.name)")
    rows = tab.run("return timeline.content.timelines.map((t) => t.rows)")
    assert len(arrows) == 6
    for t in (0, 1):
        way = {
            (BACK.get(kinds[rows[t][a][i][0]], "F"), a, BACK.get(kinds[rows[t][b][j][0]], "F"), b)
            for a, i, b, j in arrows[3 * t : 3 * t + 3]
        }
        assert way == {("F", 0, "F", 1), ("F", 1, "B", 1), ("B", 1, "B", 0)}
    tab.run("document.querySelector('#zoom-out').click(); timeline.follow(null)")
    assert tab.text("#followed").startswith("Drag or scroll")
    assert tab.problems() == []


def test_several_runs_lie_over_each_other(finished: Training, tab: Tab, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(finished.output, other)
    lines = [line | {"loss": line["loss"] / 2} for line in finished.metrics[:3]]
    write_lines(other, lines)
    file = tmp_path / "board.html"
    runs = [str(finished.output), str(other)]
    assert run_command(app, [*runs, "-o", file]).exit_code == 0
    tab.open(file.as_uri())
    legend = tab.text("#chart-loss .u-legend")
    assert "run" in legend and "other" in legend
    drawn = tab.run("return charts[0].plot.data")
    assert drawn[0] == list(range(1, STEPS + 1))
    assert drawn[1] == finished.losses
    assert drawn[2] == [*(line["loss"] for line in lines), None, None]
    tab.run("document.querySelectorAll('#runs button')[1].click()")
    assert tab.text("#now-loss .value") == f"{lines[-1]['loss']:.4f}"
    assert tab.problems() == []


def test_a_run_is_shown_while_it_trains(tab: Tab, tmp_path: Path) -> None:
    write_cluster(tmp_path, PLAN.world_size)
    chip = tmp_path / CHIP
    chip.write_text(chip.read_text().replace("launch_s = 0", "launch_s = 1e-4"))  # and little work
    training = Training(tmp_path, PLAN, "--steps", "100000")
    wait_for_file(training.output / "metrics.jsonl")
    with served(training.output) as address:
        tab.open(address)
        newest = "return board.runs[0].steps.at(-1) ?? 0"
        seen = tab.wait_for(newest, lambda step: step > 0)
        tab.wait_for(newest, lambda step: step > seen + 2)
        tab.wait_for("return document.querySelector('#status').className === 'live'")
        tab.wait_for("return timeline.content?.timelines.length === 2")  # of one of its first steps
        tab.run("window.stays = true")  # the page is not loaded again
        training.process.send_signal(signal.SIGTERM)
        training.wait()
        tab.wait_for("return document.querySelector('#status').innerText === 'not running'")
        metrics = training.metrics
        tab.wait_for(newest, lambda step: step == metrics[-1]["step"])
        assert tab.run("return board.runs[0].figures.loss") == [line["loss"] for line in metrics]
        kinds = "return [...document.querySelectorAll('#events .kind')].map(k => k.innerText)"
        tab.wait_for(kinds, lambda found: found == ["stop", "start"])
        assert tab.run("return window.stays")
        assert tab.problems() == []
    tab.wait_for("return document.querySelector('#status').className === 'lost'")


def test_only_whole_lines_and_only_new_ones_are_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_lines(run, [{"step": 1, "loss": 3.0}], '{"step": 2, "lo')
    board = RunBoard([run])
    (told,) = board.news([Known()])["runs"]
    assert told["all"]["figures"]["loss"] == [3.0]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('ss": 2.5}\n{"step": 3, "loss": null}\n')
    (more,) = board.news([Known(**told["known"])])["runs"]
    assert more["all"] is None
    assert more["added"]["steps"] == [2, 3] and more["added"]["figures"]["loss"] == [2.5, None]
    assert "details" not in more
    # a resumed run leaves out what it does again, in a new file
    (run / "new").write_text('{"step": 1, "loss": 3.0}\n')
    (run / "new").replace(run / "metrics.jsonl")
    (again,) = board.news([Known(**more["known"])])["runs"]
    assert again["all"]["steps"] == [1]


def test_a_broken_line_is_said_and_the_other_run_goes_on(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name, [{"step": 1, "loss": 3.0}])
    board = RunBoard([tmp_path / "good", tmp_path / "bad"])
    board.news([Known(), Known()])
    write_lines(tmp_path / "good", [{"step": 2, "loss": 2.0}], mode="a")
    with (tmp_path / "bad" / "metrics.jsonl").open("a") as file:
        file.write("{{{\n")
    good, bad = board.news([Known(), Known()])["runs"]
    assert good["problem"] is None and good["all"]["steps"] == [1, 2]
    assert bad["problem"] == f"{tmp_path}/bad/metrics.jsonl:2 is not a JSON object"
    assert refusal(tmp_path / "bad", "-o", tmp_path / "page.html") == bad["problem"] + "\n"


def test_what_cannot_be_shown_is_refused_in_a_sentence(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert "is not the folder of a run: it has no metrics.jsonl" in refusal(run)
    write_lines(run, [{"step": 1, "loss": 3.0}])
    assert "is not there; expected the folder that" in refusal(tmp_path / "none")
    assert "is a file; expected the folder" in refusal(run / "metrics.jsonl")
    assert "is a folder; expected the name of a file" in refusal(run, "-o", tmp_path)
    assert "RUN" in refusal()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(run, "--port", port)
    assert said.startswith(f"port {port} of 127.0.0.1 cannot be served on: Address already in use")
    (run / "trace.json").write_text("[]")
    assert "trace.json is no trace of heteropp-train" in refusal(run, "-o", tmp_path / "page.html")


FOREIGN = {
    "threads by name": {"ph": "X", "cat": "op", "pid": 1, "tid": "stream 7", "ts": 1, "dur": 2},
    "no phase": {"cat": "op", "pid": 1, "tid": 0, "ts": 1, "dur": 2},
    "no category": {"ph": "X", "name": "mm", "pid": 1, "tid": 0, "ts": 1, "dur": 2},
    "an arrow from nowhere": {"ph": "s", "cat": "op", "pid": 9, "tid": 0, "ts": 1, "id": 1},
    "no event": 7,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_trace_of_another_program_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    name = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}
    span = {"ph": "X", "name": "mm", "cat": "op", "pid": 1, "tid": 0, "ts": 1, "dur": 2}
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [name, span, FOREIGN[kind]]}))
    said = refusal(tmp_path, "-o", tmp_path / "page.html")
    assert "trace.json is no trace of heteropp-train; expected its events" in said
    (told,) = RunBoard([tmp_path]).news([Known()])["runs"]
    assert told["problem"] == said.strip()


def test_what_no_page_knows_is_refused_by_the_server(tmp_path: Path) -> None:
    write_lines(tmp_path, [{"step": 1, "loss": 3.0}])
    with BoardServer(RunBoard([tmp_path]), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for known in ('[{"steps":1e999}]', "[" * 20_000, "[7]"):
            with pytest.raises(HTTPError) as refused:
                urlopen(f"http://127.0.0.1:{server.server_port}/news?known={quote(known)}")
            assert refused.value.code == 400, known
        server.shutdown()


@pytest.mark.parametrize("steps", [1, 7, 100, 1000, 12_345])
def test_many_steps_keep_their_least_and_largest_in_bounded_memory(steps: int) -> None:
    table, figures = StepTable(most_rows=64), random.Random(steps)
    values = [figures.gauss(0, 1) for _ in range(steps)]
    for step, value in enumerate(values, 1):
        table.add(step, {"value": value, "none": None})
    for most_points in (20, 100, 1000):
        found = table.whole(most_points)
        drawn = found["figures"]["value"]
        assert len(drawn) == len(found["steps"]) <= most_points
        assert min(drawn) == min(values) and max(drawn) == max(values)
        assert found["steps"] == sorted(found["steps"])
        assert found["steps"][0] >= 1 and found["steps"][-1] <= steps
    assert "none" not in found["figures"]
    if steps <= 32:
        assert drawn == values


@pytest.mark.long
def test_a_thousand_ranks_and_ten_thousand_steps_open(tab: Tab, tmp_path: Path) -> None:
    """The seconds are in the output (-s); tests hold no time, as machines differ."""
    run = tmp_path / "run"
    run.mkdir()
    write_large_run(run, ranks=1000, steps=10_000)
    begin_s = time.monotonic()
    with served(run) as address:
        tab.open(address)
        print(f"opened after {time.monotonic() - begin_s:.2f} s")
        assert tab.text("#now-step .value").startswith("10,000")
        steps = tab.run("return board.runs[0].steps")
        assert len(steps) <= 2000 and steps[0] == 1
        assert tab.problems() == []


def write_lines(run: Path, lines: list[dict], rest: str = "", mode: str = "w") -> None:
    with (run / "metrics.jsonl").open(mode) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines) + rest)


def refusal(*arguments: object) -> str:
    ended = run_command(app, arguments)
    assert ended.exit_code == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1, ended
    return ended.stderr


def wait_for_file(file: Path) -> None:
    deadline_s = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@contextmanager
def served(run: Path) -> Iterator[str]:
    """heteropp-board, as a process of its own; gives the page's address."""
    command = [sys.executable, "-m", "heteropp.cli.board", str(run), "--port", "0"]
    # A shell starts what it puts into the background with SIGINT ignored; a board's is not.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
