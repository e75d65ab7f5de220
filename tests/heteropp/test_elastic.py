"""heteropp-train --elastic: chips go and come, with notice or without, and training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import forks
import psutil
import pytest
from elastic_run import (
    FIVE,
    MODEL,
    NODE,
    SETTINGS,
    SIX,
    SLOW,
    Elastic,
    Undisturbed,
    assert_as_undisturbed,
    assert_nothing_is_left,
    changes_of,
    said,
    steps_of,
    wait_for,
    whole_lines,
    write_chips,
    write_nodes,
)
from layouts import plan_of
from sampled import sampled
from test_context_parallel import cut
from test_expert_parallel import decoder, spread
from training_run import CHIP, command, make_plan, refusal, session, tiny_model, write_text

from heteropp.cost.planned import rank_memory
from heteropp.description.cluster import read_cluster
from heteropp.description.plan import Plan, read_plan, write_plan
from heteropp.elastic.messages import node_of

Launch = Callable[..., Elastic]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched: list[Elastic] = []

    def launch(*arguments: str, plan: Plan | None = FIVE, **settings) -> Elastic:
        launched.append(Elastic(tmp_path, plan, *arguments, **settings))
        return launched[-1]

    yield launch
    for training in launched:
        for process in (training.process.pid, *session(training.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        training.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.long
def test_a_killed_member_costs_its_chip_and_few_steps(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    remote = tmp_path / "remote"
    training = launch("--steps", "24", "--remote", str(remote), "--keep-remote-every", "3")
    training.until(8)
    lost = f"{NODE}-1/0"
    training.send(signal.SIGKILL, lost)
    assert_as_undisturbed(training, undisturbed, 24)
    first, recovery = training.changes
    assert first["start"] == "initial" and len(first["members"]) == 5
    assert recovery["start"] == "recover"
    assert recovery["cause"] == f"{lost} was killed by SIGKILL"
    assert recovery["left"] == [lost]
    assert set(recovery["members"]) <= set(first["members"]) - {lost}
    assert recovery["steps_again"] <= 2
    held = (training.output / "generations" / "0002" / "copies.txt").read_text()
    assert [line.split()[0] for line in held.splitlines()] == [
        "embedding",
        *(f"layers.{layer}" for layer in range(MODEL.layers)),
        "norm",
        "head",
    ]
    assert f": memory {NODE}-0" in held
    assert {moved["source"] for moved in recovery["moved"]} <= {"memory", "peer"}
    assert not (training.output / "copies").exists()  # of a job that is done
    assert remote.exists() and not list(remote.iterdir())


@pytest.mark.exhaustive
def test_attention_stays_within_documents_under_the_next_plan(
    launch: Launch, tmp_path: Path
) -> None:
    asked = ("--attention-within", "document")
    (tmp_path / "alone").mkdir()
    alone = Undisturbed(tmp_path / "alone", MODEL, *asked)
    training = launch("--steps", "16", *asked)
    training.until(6)
    training.send(signal.SIGKILL, f"{NODE}-1/0")
    assert_as_undisturbed(training, alone, 16)
    assert [change["start"] for change in training.changes] == ["initial", "recover"]


@pytest.mark.exhaustive
def test_a_noticed_member_leaves_after_a_step_and_costs_none(
    launch: Launch, undisturbed: Undisturbed
) -> None:
    training = launch("--notice", "250")
    left = f"{NODE}-0/1"
    training.wait_for(lambda: left in training.members, 60)
    training.send(signal.SIGTERM, left)  # before there is a step
    training.until_generation(2)
    assert_as_undisturbed(training, undisturbed)
    _, switch = training.changes
    assert (switch["start"], switch["cause"]) == ("switch", f"{left} will go")
    assert left in switch["left"] and switch["steps_again"] == 0


@pytest.mark.long
def test_chips_come(launch: Launch, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """Four to six, by a file that is bad in between."""
    write_chips(tmp_path, n0=2, n1=2)
    training = launch("--availability", str(tmp_path / "chips.json"), plan=SIX)
    training.until(4)
    (tmp_path / "chips.json").write_text('{"neutral-0": 7}')
    training.wait_for(lambda: "expected 0 to 2 chips" in said(training), 60)
    write_chips(tmp_path, n0=2, n1=2, n2=2)
    training.until_generation(2)
    assert_as_undisturbed(training, undisturbed)
    first, switch = training.changes
    assert {node_of(member) for member in first["members"]} == {f"{NODE}-0", f"{NODE}-1"}
    assert switch["start"] == "switch" and switch["steps_again"] == 0
    assert set(switch["joined"]) == {f"{NODE}-2/0", f"{NODE}-2/1"}


@pytest.mark.long
def test_chips_go_by_the_file_and_come_back(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    chips = tmp_path / "chips.json"
    write_chips(tmp_path, n0=2, n1=2, n2=1)
    training = launch("--availability", str(chips), "--notice", "250")
    training.until(3)
    write_chips(tmp_path, n0=2, n1=2)
    training.until_generation(2)
    training.until(training.changes[-1]["step"] + 4)
    write_chips(tmp_path, n0=2, n1=2, n2=1)
    training.until_generation(3)
    assert_as_undisturbed(training, undisturbed)
    members = [set(change["members"]) for change in training.changes]
    assert members[1] == members[0] - {f"{NODE}-2/0"}
    assert members[2] == members[0]
    assert [change["start"] for change in training.changes] == ["initial", "switch", "switch"]


@pytest.mark.long
def test_a_silent_member_is_lost_past_the_deadline(
    launch: Launch, undisturbed: Undisturbed
) -> None:
    training = launch("--deadline", "20")
    training.until(6)
    silent = f"{NODE}-1/1"
    training.send(signal.SIGSTOP, silent)
    training.until_generation(2)
    assert_as_undisturbed(training, undisturbed)
    assert training.changes[-1]["left"] == [silent]
    assert training.changes[-1]["cause"] == f"{silent} did not answer in time"


@pytest.mark.long
def test_a_lost_node_takes_its_memory_along(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """What it alone held comes from the remote store, of an older step."""
    training = launch("--remote", str(tmp_path / "remote"), "--keep-remote-every", "4")
    training.until(14)
    training.process.send_signal(signal.SIGSTOP)  # it sees both deaths at once, as a node's
    training.send(signal.SIGKILL, f"{NODE}-0/0", f"{NODE}-0/1")
    training.process.send_signal(signal.SIGCONT)
    training.until_generation(2)
    assert_as_undisturbed(training, undisturbed)
    recovery = training.changes[-1]
    assert {node_of(member) for member in recovery["left"]} == {f"{NODE}-0"}
    assert "remote" in {moved["source"] for moved in recovery["moved"]}


@pytest.mark.long
def test_a_layer_without_a_copy_stops_the_job(launch: Launch) -> None:
    training = launch("--keep-disk-every", "0")
    training.until(8)
    training.send(signal.SIGKILL, f"{NODE}-0/0", f"{NODE}-0/1")
    code, _, stderr = training.wait(250)
    assert code == 1
    last = stderr.splitlines()[-1]
    assert last.startswith("training stopped: "), stderr
    assert "no snapshot left: the last were of step" in last
    assert f"{NODE}-0" in last
    assert "Traceback" not in stderr
    assert_nothing_is_left(training)


@pytest.mark.long
def test_a_node_that_the_best_plan_leaves_out_gives_what_it_keeps(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """A chip of next to no speed is in a person's plan, and in none that is searched."""
    plan = plan_of(MODEL, (2, 2), (1, 1), (2, 1))
    (pipeline,) = plan.pipelines
    first, last = pipeline.stages
    last = replace(last, replicas=(replace(last.replicas[0], chip=SLOW),))
    plan = replace(plan, pipelines=(replace(pipeline, stages=(first, last)),))
    training = launch("--keep-disk-every", "0", plan=plan, last=SLOW)
    training.until(8)
    training.send(signal.SIGKILL, f"{NODE}-0/0")
    training.until_generation(3)
    assert_as_undisturbed(training, undisturbed)
    _, recovery, switch = training.changes
    assert recovery["start"] == "recover" and recovery["steps_again"] <= 1
    assert set(recovery["members"]) == {f"{NODE}-0/1", "slow-0/0"}
    assert switch["start"] == "switch" and switch["left"] == ["slow-0/0"]
    assert switch["cause"] == "the best plan is without slow-0/0"


@pytest.mark.long
def test_a_loss_in_a_recovery_is_recovered_from(launch: Launch, undisturbed: Undisturbed) -> None:
    training = launch(plan=SIX)
    training.until(8)
    training.send(signal.SIGKILL, f"{NODE}-1/0")
    training.until_members(2)
    training.wait_for(lambda: f"{NODE}-2/1" in training.members, 60)
    training.send(signal.SIGKILL, f"{NODE}-2/1")
    training.wait_for(lambda: len(training.changes[-1]["members"]) <= 4, 200)
    assert_as_undisturbed(training, undisturbed)
    gone = {member for change in training.changes for member in change["left"]}
    assert gone >= {f"{NODE}-1/0", f"{NODE}-2/1"}


@pytest.mark.exhaustive
def test_a_job_without_a_plan_stops_and_is_resumed(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Its chips hold the model together, but not one of them alone."""
    training = launch(plan=plan_of(MODEL, (4,), (1,), (2,)), capacity_bytes=500_000)
    training.until(6)
    training.send(signal.SIGKILL, f"{NODE}-0/0")
    code, _, stderr = training.wait(250)
    assert code == 1
    last = stderr.splitlines()[-1]
    assert last.startswith("training stopped: no plan"), stderr
    assert "--resume goes on from" in last
    assert_nothing_is_left(training)
    steps = len(training.metrics)
    copies = (tmp_path / "run" / "copies").glob("*/*/step-*")
    whole = [folder for folder in copies if len(list(folder.glob("rank-*.json"))) == 2]
    kept = max(int(folder.name[5:11]) for folder in whole)
    assert kept in (steps - 1, steps)  # the chip may die before the newest step is kept
    assert "is of an earlier run; give --resume" in refusal(
        tmp_path, "--elastic", "--device", "cpu"
    )
    again = launch("--resume", plan=FIVE)
    again.until(steps + 1)
    assert_as_undisturbed(again, undisturbed)
    assert again.changes[-1]["step"] == kept


@pytest.mark.long
def test_a_stopped_job_is_resumed(launch: Launch, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The job is resumed by its folder alone, which keeps the files that it was started with."""
    training = launch()
    training.until(6)
    listening = psutil.Process(training.process.pid).net_connections("tcp")
    assert {each.laddr.ip for each in listening if each.status == "LISTEN"} == {"127.0.0.1"}
    os.kill(training.process.pid, signal.SIGTERM)
    code, _, stderr = training.wait(250)
    assert (code, stderr) == (128 + signal.SIGTERM, "")
    steps = len(training.metrics)
    for name in ("plan.json", "cluster.toml", CHIP):
        (tmp_path / name).unlink()
    again = launch(plan=None)
    again.until(steps + 1)
    assert_as_undisturbed(again, undisturbed)
    assert again.changes[-1]["step"] == steps


@pytest.mark.long
def test_emulated_chips_are_lost_and_noticed(launch: Launch, undisturbed: Undisturbed) -> None:
    training = launch("--notice", "250", "--json", device="chip")
    training.until(4)
    training.send(signal.SIGTERM, f"{NODE}-1/1")
    training.until_generation(2)
    training.until(training.changes[-1]["step"] + 4)
    training.send(signal.SIGKILL, f"{NODE}-0/0")
    training.until_generation(3)
    assert_as_undisturbed(training, undisturbed)
    generations = json.loads(training.wait()[1])["generations"]
    assert [g["start"] for g in generations] == ["initial", "switch", "recover"]
    assert generations == training.changes
    folder = training.output / "generations" / "0002"
    cluster = read_cluster(folder / "cluster.toml")
    predicted = rank_memory(read_plan(folder / "plan.json"), cluster)
    after_switch = training.metrics[generations[1]["step"] + 1]
    for peak, expected in zip(after_switch["peak_memory_bytes"], predicted, strict=True):
        assert peak <= 1.05 * expected.total  # the old state is gone


@pytest.mark.parametrize("device", sampled(["cpu", "chip"], 2))
def test_parts_of_sequences_are_dealt_anew(launch: Launch, tmp_path: Path, device: str) -> None:
    """Sequences fit in no other way on four chips, nor on three or two of them."""
    model = tiny_model(layers=2, kv_heads=1, sequence_length=128)
    (tmp_path / "alone").mkdir()
    alone = Undisturbed(tmp_path / "alone", model)
    plan = make_plan(model, (2,), (1,), (4,), (False,), micro_batch=1, micro_batches=16)
    plan = cut(plan, {0: [(32, 32, 32, 32)]})
    training = launch("--notice", "250", plan=plan, device=device, capacity_bytes=1_600_000)
    training.until(2)
    training.send(signal.SIGTERM, f"{NODE}-0/1")
    training.until_generation(2)
    training.until(training.changes[-1]["step"] + 2)
    training.send(signal.SIGKILL, f"{NODE}-1/0")
    training.until_generation(3)
    assert_as_undisturbed(training, alone)
    assert [change["start"] for change in training.changes] == ["initial", "switch", "recover"]
    folders = (training.output / "generations" / f"{number:04d}" for number in (1, 2, 3))
    plans = [read_plan(folder / "plan.json") for folder in folders]
    assert [plan.pipelines[0].stages[0].cp for plan in plans] == [4, 3, 2]


@pytest.mark.exhaustive
def test_experts_over_chips_are_recovered(launch: Launch, tmp_path: Path) -> None:
    """The chip that is killed had experts that no other had."""
    model = decoder()
    (tmp_path / "alone").mkdir()
    alone = Undisturbed(tmp_path / "alone", model)
    plan = spread(plan_of(model, (2, 2), (2, 2), (1, 1)), {0: (1, 3), 1: (2, 2)})
    training = launch("--steps", "24", plan=plan)
    training.until(8)
    training.send(signal.SIGKILL, f"{NODE}-0/1")
    assert_as_undisturbed(training, alone, 24)
    assert [change["start"] for change in training.changes] == ["initial", "recover"]


def test_bad_requests_are_one_sentence(tmp_path: Path) -> None:
    write_nodes(tmp_path, 5)
    write_plan(FIVE, tmp_path / "plan.json")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a" * 1000)
    cpu = ("--device", "cpu")
    assert refusal(tmp_path, *cpu, "--remote", "x") == "--remote is for --elastic\n"
    several = refusal(tmp_path, *cpu, "--keep-disk-every", "10", "--notice", "30")
    assert several == "--notice, --keep-disk-every are for --elastic\n"
    elastic = (*cpu, "--elastic")
    assert "--restarts is not for --elastic" in refusal(tmp_path, *elastic, "--restarts", "1")
    missing = refusal(tmp_path, *elastic, "--availability", str(tmp_path / "none.json"))
    assert missing == f"{tmp_path / 'none.json'} cannot be read: No such file or directory\n"
    (tmp_path / "chips.toml").write_text("neutral-0 = 0\n")
    none = refusal(tmp_path, *elastic, "--availability", str(tmp_path / "chips.toml"))
    assert none == "no chip of cluster test is available\n"
    (tmp_path / "chips.toml").write_text("b-0 = 1\n")
    unknown = refusal(tmp_path, *elastic, "--availability", str(tmp_path / "chips.toml"))
    assert "b-0 is no node of cluster test; expected one of neutral-0, neutral-1" in unknown
    write_nodes(tmp_path, 3)
    assert "the plan has 5 ranks and cluster test 3" in refusal(tmp_path, *elastic)


@pytest.mark.exhaustive
def test_a_node_dies_and_comes_back_under_torchrun(tmp_path: Path) -> None:
    """The job is in float64: plans round unlike, which in float32 grows over hundreds of steps."""
    model = replace(MODEL, dtype="float64")
    write_nodes(tmp_path, 4)
    write_plan(plan_of(model, (2, 2), (2, 1), (1, 2)), tmp_path / "plan.json")
    write_text(tmp_path / "text")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    timing = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=3"
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }

    def torchrun(node: int) -> forks.Forked:
        arguments = [
            *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
            *("--max-restarts", "9", "--local-addr", "localhost", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job"),
            *("--rdzv-conf", f"{timing},is_host={node == 0}"),
            *("-m", "heteropp.cli.train", *command(tmp_path, "--device", "cpu", "--elastic")),
            *("--node-name", f"{NODE}-{node}", *SETTINGS, "--steps", "100000"),
            *("--remote", str(tmp_path / "remote"), "--keep-remote-every", "2"),
        ]
        return forks.start(arguments, environment)

    nodes = [torchrun(0), torchrun(1)]
    try:
        output = tmp_path / "run"
        wait_for(lambda: members_of(output) == 4 and steps_of(output) >= 6)
        end(nodes.pop())
        before = steps_of(output)
        wait_for(lambda: members_of(output) == 2 and steps_of(output) >= before + 4)
        nodes.append(torchrun(1))
        wait_for(lambda: members_of(output) == 4)
        before = steps_of(output)
        wait_for(lambda: steps_of(output) >= before + 4)
    finally:
        for node in nodes:
            end(node)
    wait_for(lambda: not agents_of(output))  # which have sessions of their own
    metrics = whole_lines(output / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, len(metrics) + 1))
    losses = [m["loss"] for m in metrics]
    undisturbed = Undisturbed(tmp_path / "undisturbed", model)
    assert losses == pytest.approx(undisturbed.losses(len(losses)), rel=2e-6)
    name = json.loads((output / "job.json").read_text())["name"]
    assert not Path(f"/dev/shm/heteropp-{name}").exists()


def members_of(output: Path) -> int:
    """Returns how many members the newest generation that trains has."""
    changes = changes_of(output)
    return len(changes[-1]["members"]) if changes else 0


def agents_of(output: Path) -> list[psutil.Process]:
    commands = psutil.process_iter(["cmdline"])
    return [each for each in commands if str(output) in (each.info["cmdline"] or [])]


def end(torchrun: forks.Forked) -> None:
    """Kills torchrun and what is of its session."""
    for process in (torchrun.pid, *session(torchrun.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    torchrun.wait(60)
