"""What follows a run: the services' own stores read back, and Prometheus's endpoint asked."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from training_run import (
    Training,
    make_plan,
    refusal,
    start,
    tiny_model,
    wait,
    write_cluster,
    write_text,
)

from heteropp.description.plan import write_plan
from heteropp.runtime.measuring.metrics import StepMetrics
from heteropp.runtime.measuring.report import Reporter
from heteropp.runtime.measuring.trackers.tracking import Tracking, TrackingError

PLAN = make_plan(tiny_model(), (2, 2), (1, 1), (1, 1), (False, False))


def records(path: Path) -> Iterator[bytes]:
    """The records of a file of Weights & Biases, which is a log of LevelDB's after its header."""
    content, whole = path.read_bytes(), b""
    at = 7
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:  # no record begins in what is left of a block
            at += left
            continue
        _, length, part = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def wandb_losses(folder: Path) -> dict[int, float]:
    """What an offline run of Weights & Biases would hand to the server."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for content in records(next(folder.glob("wandb/offline-run-*/run-*.wandb"))):
        record = Record()
        record.ParseFromString(content)
        items = {item.key or ".".join(item.nested_key): item for item in record.history.item}
        if "loss" in items:
            found[record.history.step.num] = json.loads(items["loss"].value_json)
    return found


def mlflow_losses(folder: Path) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((folder / "mlflow").absolute().as_uri())
    experiment = client.get_experiment_by_name("hyperhetero")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return {one.step: one.value for one in client.get_metric_history(run.info.run_id, "loss")}


@pytest.mark.long
def test_stores_hold_every_step_of_a_run_and_of_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    training = Training(
        tmp_path, PLAN, "--steps", "3", "--track", "wandb,mlflow", device="cpu"
    ).finish()
    expected = {m["step"]: m["loss"] for m in training.metrics}
    assert list(expected) == [1, 2, 3]
    assert wandb_losses(training.output) == pytest.approx(expected)
    assert mlflow_losses(training.output) == pytest.approx(expected)
    again = ("--resume", str(training.output), "--steps", "5", "--track", "mlflow")
    process = start(tmp_path, "--device", "cpu", *again)
    code, _, stderr = wait(process, 150)
    assert code == 0, stderr
    expected = {m["step"]: m["loss"] for m in training.metrics}
    assert list(expected) == [1, 2, 3, 4, 5]
    assert mlflow_losses(training.output) == pytest.approx(expected)


def test_prometheus_sees_the_newest_step_while_the_run_goes_on(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    options = ("--steps", "2000", "--metrics-port", str(port))
    training = Training(tmp_path, PLAN, *options, device="cpu")
    found: dict[tuple[str, str], float] = {}
    try:
        deadline_s = time.monotonic() + 120
        while not found.get(("heteropp_step", "")):
            assert time.monotonic() < deadline_s and training.process.poll() is None
            time.sleep(0.1)
            try:
                text = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
            except (URLError, ConnectionError):
                continue
            found = {
                (sample.name, sample.labels.get("rank", "")): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
    finally:
        os.kill(training.process.pid, signal.SIGTERM)
    code, _, stderr = training.wait()
    assert code != 1, stderr
    line = training.metrics[int(found["heteropp_step", ""]) - 1]
    for name in ("loss", "tokens_per_s", "step_s"):
        assert found[f"heteropp_{name}", ""] == pytest.approx(line[name])
    for rank, memory_bytes in enumerate(line["peak_memory_bytes"]):
        assert found["heteropp_peak_memory_bytes", str(rank)] == memory_bytes
    assert found["heteropp_restarts", ""] == 0


def refused(folder: Path, *options: str) -> str:
    write_plan(PLAN, folder / "plan.json")
    write_text(folder / "text")
    write_cluster(folder, PLAN.world_size)
    return refusal(folder, "--device", "cpu", *options)


def test_a_service_that_is_unknown_is_one_sentence(tmp_path: Path) -> None:
    said = refused(tmp_path, "--track", "tensorboard,comet")
    assert "--track is comet; expected tensorboard, wandb, mlflow" in said


@pytest.mark.parametrize(
    ("options", "extra"),
    [(("--track", "wandb"), "wandb"), (("--metrics-port", "0"), "prometheus")],
)
def test_a_library_that_is_missing_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], extra: str
) -> None:
    from heteropp.runtime.measuring.trackers import tracking

    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert f"pip install 'hyperhetero[{extra}]'" in refused(tmp_path, *options)


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, "--metrics-port", str(port))
    assert f"--metrics-port {port} on 127.0.0.1 cannot be opened: Address already in use" in said


def test_a_port_out_of_range_is_one_sentence(tmp_path: Path) -> None:
    said = refused(tmp_path, "--metrics-port", "70000")
    assert "--metrics-port is 70000; expected 0 to 65535" in said


class Gone:
    """A service that went away."""

    def step(self, metrics: StepMetrics) -> None:
        raise AssertionError("no step comes")

    def close(self) -> None:
        raise ConnectionError("no route\nto host")


def test_a_service_that_cannot_be_closed_leaves_the_run_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, 0, 1, quiet=False)
    reporter.trackers = {"wandb": Gone(), "mlflow": Gone()}
    reporter.close()
    assert capsys.readouterr().out.splitlines() == [
        f"warning: {name} cannot be closed: no route to host" for name in ("wandb", "mlflow")
    ]


def test_after_a_restart_training_goes_on_without_a_service_that_went_away(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        tracking = Tracking(("tensorboard",), metrics_port=taken.getsockname()[1])
        with pytest.raises(TrackingError, match="cannot be opened: Address already in use"):
            tracking.open(tmp_path, 0, 0, said.append)
        assert said == []
        trackers = tracking.open(tmp_path, 0, 1, said.append)
    assert list(trackers) == ["tensorboard"]
    (line,) = said
    assert line.startswith("warning: --metrics-port ")
    assert line.endswith("Address already in use; the training goes on without it")
