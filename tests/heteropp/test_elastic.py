"""heteropp-train --elastic: chips go and come, with notice or without, and training goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import forks
import pytest
from layouts import plan_of
from training_run import (
    CHIP,
    NEUTRAL_CHIP,
    Training,
    command,
    refusal,
    session,
    tiny_model,
    wait_until_nothing_is_left,
    write_text,
)

from heteropp.cluster import read_cluster
from heteropp.elastic.job import node_of
from heteropp.plan import Plan, read_plan, write_plan
from heteropp.planned import rank_memory

MODEL = tiny_model()
SIX = plan_of(MODEL, (2, 1, 1), (1, 2, 1), (2, 1, 2))
FIVE = plan_of(MODEL, (2, 1, 1), (1, 1, 1), (2, 1, 2))
STEPS = 600  # more than a test needs
SETTINGS = ("--steps", str(STEPS), "--decay-steps", str(STEPS), "--warmup-steps", "2")
SLOW = "slow.toml"
NODE = CHIP.removesuffix(".toml")  # of which there are three of up to two chips


class Elastic(Training):
    """A run on nodes of two chips each, the last one of what is left."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        *arguments: str,
        device: str = "cpu",
        capacity_bytes: int = 1 << 30,
        last: str = CHIP,
    ) -> None:
        """last: the last node's chip."""
        write_nodes(folder, plan.world_size, capacity_bytes, last)
        super().__init__(folder, plan, "--elastic", *SETTINGS, *arguments, device=device)

    @property
    def members(self) -> dict[str, int]:
        """Processes of living members."""
        named = session(self.process.pid)
        return {name: process for process, name in named.items() if name.startswith(NODE)}

    def until(self, step: int, within_s: float = 200) -> None:
        """Waits for a step's metrics."""
        self.wait_for(lambda: steps_of(self.output) >= step, within_s)

    def until_generation(self, number: int, within_s: float = 200) -> None:
        """Waits until it trains."""
        self.wait_for(lambda: len(self.changes) >= number, within_s)

    def until_members(self, number: int, within_s: float = 200) -> None:
        """Waits until members of a generation have been started."""
        logs = self.output / "logs" / f"{number:04d}"
        self.wait_for(lambda: logs.exists() and any(logs.iterdir()), within_s)

    def wait_for(self, comes: Callable[[], bool], within_s: float) -> None:
        def or_ended() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return comes()

        wait_for(or_ended, within_s)

    def send(self, number: int, *members: str) -> None:
        processes = [self.members[member] for member in members]
        for process in processes:
            os.kill(process, number)

    @property
    def changes(self) -> list[dict]:
        return changes_of(self.output)

    @property
    def memory(self) -> Path:
        """Where nodes keep copies in host memory."""
        name = json.loads((self.output / "job.json").read_text())["name"]
        return Path("/dev/shm", f"heteropp-{name}")


def wait_for(comes: Callable[[], bool], within_s: float = 200) -> None:
    deadline = time.monotonic() + within_s
    while not comes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def changes_of(output: Path) -> list[dict]:
    """What each generation left, oldest first."""
    files = sorted((output / "generations").glob("*/change.json"))
    return [json.loads(file.read_text()) for file in files]


def steps_of(output: Path) -> int:
    """The newest one's."""
    metrics = whole_lines(output / "metrics.jsonl")
    return metrics[-1]["step"] if metrics else 0


def whole_lines(file: Path) -> list[dict]:
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_nodes(folder: Path, chips: int, capacity_bytes: int = 1 << 30, last: str = CHIP) -> None:
    chip = NEUTRAL_CHIP.format(chips_per_node=2, capacity_bytes=capacity_bytes)
    (folder / CHIP).write_text(chip)
    (folder / SLOW).write_text(chip.replace("_flops = 1e15", "_flops = 1e3"))
    text = 'name = "test"\n'
    for first in range(0, chips, 2):
        name = last if first + 2 >= chips else CHIP
        text += f'[[nodes]]\nchip = "{name}"\nchips = {min(2, chips - first)}\n'
    (folder / "cluster.toml").write_text(text)


def write_chips(folder: Path, **chips: int) -> None:
    """The availability file; a0=2 is two chips of the first node."""
    counts = {f"{NODE}-{name[1:]}": count for name, count in chips.items()}
    (folder / "new.json").write_text(json.dumps(counts))
    (folder / "new.json").replace(folder / "chips.json")


Launch = Callable[..., Elastic]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launched: list[Elastic] = []

    def launch(*arguments: str, plan: Plan = FIVE, **settings) -> Elastic:
        launched.append(Elastic(tmp_path, plan, *arguments, **settings))
        return launched[-1]

    yield launch
    for training in launched:
        for process in (training.process.pid, *session(training.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        training.process.communicate()


class Undisturbed:
    """A run on one chip, which stays; it goes on as far as it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[float] = []

    def losses(self, steps: int) -> list[float]:
        if steps > len(self.found):
            resume = ("--resume",) if self.found else ()
            arguments = (*SETTINGS, "--steps", str(steps + 20), *resume)
            plan = plan_of(MODEL, (4,), (1,), (1,))
            self.found = Training(self.folder, plan, *arguments, device="cpu").finish().losses
        return self.found[:steps]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("undisturbed"))


def assert_as_undisturbed(training: Elastic, undisturbed: Undisturbed, steps: int = 0) -> None:
    """It goes on for some steps, or comes to the end of so many, with the losses it should have.

    Each step is there once, and nothing else is left of it.
    """
    if not steps:
        training.until(training.changes[-1]["step"] + 4)
        training.process.send_signal(signal.SIGTERM)
    code, stdout, stderr = training.wait(250)
    assert code == (0 if steps else 128 + signal.SIGTERM), stdout + stderr
    found = [m["step"] for m in training.metrics]
    assert found == list(range(1, (steps or len(found)) + 1))
    assert training.losses == pytest.approx(undisturbed.losses(len(found)), rel=2e-6)
    assert_nothing_is_left(training)


def assert_nothing_is_left(training: Elastic) -> None:
    wait_until_nothing_is_left(training)
    assert not training.memory.exists()


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


def said(training: Elastic) -> str:
    """On standard output, so far."""
    return os.pread(training.process._out.fileno(), 1 << 20, 0).decode()


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
    training.send(signal.SIGKILL, f"{NODE}-0/0", f"{NODE}-0/1")
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
    assert "no copy left: the last were of step" in last
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


@pytest.mark.long
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
    assert "is of an earlier run; give --resume" in refusal(
        tmp_path, "--elastic", "--device", "cpu"
    )
    again = launch("--resume", plan=FIVE)
    again.until(steps + 1)
    assert_as_undisturbed(again, undisturbed)
    assert again.changes[-1]["step"] == steps


@pytest.mark.long
def test_a_stopped_job_is_resumed(launch: Launch, undisturbed: Undisturbed) -> None:
    training = launch()
    training.until(6)
    os.kill(training.process.pid, signal.SIGTERM)
    code, _, stderr = training.wait(250)
    assert (code, stderr) == (128 + signal.SIGTERM, "")
    steps = len(training.metrics)
    again = launch("--resume")
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


@pytest.mark.long
def test_a_node_dies_and_comes_back_under_torchrun(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    write_nodes(tmp_path, 4)
    write_plan(plan_of(MODEL, (2, 2), (2, 1), (1, 2)), tmp_path / "plan.json")
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
    metrics = whole_lines(output / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, len(metrics) + 1))
    losses = [m["loss"] for m in metrics]
    assert losses == pytest.approx(undisturbed.losses(len(losses)), rel=2e-6)
    name = json.loads((output / "job.json").read_text())["name"]
    shutil.rmtree(f"/dev/shm/heteropp-{name}")  # for torchrun to start again with


def members_of(output: Path) -> int:
    """Of the newest generation that trains."""
    changes = changes_of(output)
    return len(changes[-1]["members"]) if changes else 0


def end(torchrun: forks.Forked) -> None:
    """As a node that loses its power: torchrun, agent and members."""
    for process in (torchrun.pid, *session(torchrun.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    torchrun.wait(60)
