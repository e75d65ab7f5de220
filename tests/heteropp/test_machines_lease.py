"""A machine that cannot be reached: its members end with their lease, and others go on after it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_job import DEADLINE_S, FOREVER, NODE, Job, lab_job

from heteropp.description.files import read_json
from heteropp.elastic.launcher.change import Change

pytestmark = pytest.mark.timeout(900)

LOST = 2  # the machine


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with lab_job(tmp_path) as started:
        yield started


def newest_change(job: Job) -> Change:
    return read_json(sorted(job.output.glob("generations/*/change.json"))[-1], Change)


def goes_on_without(job: Job, number: int) -> None:
    """Waits until the others train on; the members of the machine have ended before."""
    lost = f"{NODE}-{number}/0 is lost: its node has not answered for "
    job.wait_for(lambda: lost in job.said_by(0), 6 * DEADLINE_S)
    job.wait_for((job.output / "generations" / "0002" / "plan.json").exists, 6 * DEADLINE_S)
    assert not job.members_on(number)
    (line,) = re.findall(rf"^{lost}\d+ s.*$", job.said_by(0), re.M)
    assert line.endswith(" s, and its lease is over")
    steps = len(job.metrics)
    job.until_step(steps + 10)
    assert f"{NODE}-{number}/0" not in newest_change(job).members


@pytest.mark.exhaustive
def test_a_machine_that_is_cut_off_ends_its_members_and_may_join_again(job: Job) -> None:
    arguments = ("--steps", FOREVER, *job.remote)
    job.start(*arguments, elastic=True)
    job.until_step(10)
    assert len(job.members_on(LOST)) == 1
    job.machines[LOST].down()
    goes_on_without(job, LOST)
    job.wait_for(lambda: job.ended(LOST), 120)  # torchrun as well
    job.machines[LOST].up()
    job.start_on(LOST, *arguments, elastic=True)
    job.wait_for(lambda: len(newest_change(job).members) == 3, 300)
    job.until_step(newest_change(job).step + 10)
    job.assert_as_alone()


@pytest.mark.exhaustive
def test_a_machine_that_stood_still_for_longer_than_the_lease_disturbs_nothing(job: Job) -> None:
    job.start("--steps", FOREVER, *job.remote, elastic=True)
    job.until_step(10)
    assert len(job.members_on(LOST)) == 1
    job.machines[LOST].stop()
    goes_on_without(job, LOST)
    job.machines[LOST].go_on()
    job.until_step(len(job.metrics) + 50)
    job.assert_as_alone()


@pytest.mark.exhaustive
def test_a_leader_whose_machine_stood_still_is_not_a_second_one(job: Job) -> None:
    """Torchrun has begun another start of the job on the other machines."""
    job.start("--steps", FOREVER, *job.remote, elastic=True, endpoint=1)
    job.until_step(10)
    job.machines[0].stop()
    job.wait_for(lambda: not job.members_on(0), 6 * DEADLINE_S)
    before = newest_change(job).number
    job.wait_for(lambda: newest_change(job).number > before, 300)
    assert f"{NODE}-0/0" not in newest_change(job).members
    job.machines[0].go_on()
    job.until_step(len(job.metrics) + 50)
    job.assert_as_alone()
