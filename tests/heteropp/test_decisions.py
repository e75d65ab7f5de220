"""What the leader of an elastic job decides, one course of events after another."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from elastic_world import MEMBERS, NODES, World

from heteropp.elastic import decisions
from heteropp.elastic.decisions.commands import RemoveGeneration
from heteropp.elastic.decisions.phases import (
    Awaiting,
    Dropping,
    Fencing,
    Joining,
    Planning,
    Running,
    Starting,
    Switching,
)
from heteropp.elastic.messages import Failure, JobOutcome, node_of

LACK = Failure(kind="lost", what="stopped: layers.1 has no snapshot left", nodes=("c",))
PURE = {"__future__", "collections.abc", "dataclasses", "signal", "typing"}
OWN = ("heteropp.elastic.decisions", "heteropp.elastic.messages")


def trains(chips: Mapping[str, int] = NODES) -> World:
    """Returns a world whose first generation has trained a few steps."""
    world = World(chips=chips)
    for _ in range(8):
        world.help()
        world.tick()
    assert isinstance(world.state.phase, Running) and world.number == 1
    return world


def joins() -> World:
    """Returns a world in which members are joining, as more chips came."""
    world = trains({"a": 2})
    world.offer(a=2, b=1)
    world.tick()
    world.find_plan(MEMBERS)
    world.tick()
    assert isinstance(world.state.phase, Joining)
    assert set(world.alive) == {"a/0", "a/1", "b/0"}
    return world


def switches() -> World:
    world = joins()
    world.joiners_open_chips()
    world.tick()
    world.begin_switch()
    assert isinstance(world.state.phase, Switching)
    return world


def test_chips_that_come_are_switched_to_without_a_loss() -> None:
    world = switches()
    world.get_state()
    world.tick()
    assert world.state.current and world.state.current.members == ("a/0", "a/1", "b/0")
    assert world.state.current.cause == "b/0 came"
    assert not world.told_to_end


def test_a_switch_is_cancelled_when_the_chips_change_again() -> None:
    world = joins()
    world.offer(a=2)
    world.tick()
    assert isinstance(world.state.phase, Dropping)
    assert world.told_to_end == {("b/0", 2)}
    world.agents_kill()
    world.tick()
    world.tick()
    assert world.state.current and world.state.current.number == 1
    assert RemoveGeneration(number=2) in world.asked


def test_a_joiner_that_does_not_come_up_costs_its_chip_alone() -> None:
    world = joins()
    world.tick(91)
    assert world.told[-1] == "b/0 did not come up in 90 s"
    world.tick()
    assert isinstance(world.state.phase, Dropping)
    world.tick(63)
    assert isinstance(world.state.phase, Fencing)  # what was killed does not end
    world.tick(33)
    assert isinstance(world.state.phase, Fencing)
    world.tick(31)
    assert world.outcome and world.outcome.sentence == "a/0, a/1, b/0 cannot be ended"


def test_a_switch_that_hangs_is_fenced_and_recovered_from() -> None:
    world = switches()
    world.tick(33)
    assert isinstance(world.state.phase, Fencing)
    assert world.told[-1] == "the switch was not done in time"
    world.agents_kill()
    world.tick()
    assert isinstance(world.state.phase, Planning) and world.state.current is None
    assert world.search and set(world.search.members) == {"a/0", "a/1", "b/0"}


def test_a_lost_chip_is_recovered_from_with_the_nodes_that_hold_state() -> None:
    world = trains()
    world.die("a/0")
    world.agents_kill()
    world.tick()
    assert world.search and world.search.nodes == ("a", "b", "c")
    assert world.search.members == ("a/1", "b/0", "b/1", "c/0")
    for _ in range(4):
        world.help()
        world.tick()
    assert world.state.current and world.state.current.start == "recover"
    assert world.state.current.cause == "a/0 was killed by SIGKILL"


def test_who_was_silent_is_left_out_when_all_have_ended() -> None:
    world = trains()
    world.silent = ("b/1",)
    for member in sorted(world.alive.keys() - {"b/1"}):
        world.die(member, code=1)
    world.agents_kill()
    world.tick()
    assert world.search and "b/1" not in world.search.members
    assert world.told[-1] == "b/1 did not answer in time"


def test_a_fence_waits_for_the_lease_of_a_node_that_cannot_be_reached() -> None:
    world = trains()
    world.die("a/0", code=1)
    for member in [m for m in world.alive if node_of(m) != "c"]:
        world.die(member)
    world.tick(1)
    assert isinstance(world.state.phase, Fencing)
    world.tick(32)
    assert isinstance(world.state.phase, Fencing)
    assert world.told[-1] == "not ended yet: c/0; the lease is awaited, at most 30 s"
    world.tick(20)
    assert isinstance(world.state.phase, Fencing)
    world.lose_node("c")
    world.tick()
    assert isinstance(world.state.phase, Planning)
    lost = "c/0 is lost: its node has not answered for 31 s, and its lease is over"
    assert world.told[-1] == lost


def test_members_of_a_lost_node_are_told_to_end() -> None:
    """An agent that stood still and goes on may start them only then."""
    world = joins()
    number = world.alive["b/0"]
    world.lose_node("b")
    assert ("b/0", number) in world.told_to_end


def test_a_chip_that_is_offered_of_a_node_without_power_is_lost_again() -> None:
    """Members that nobody could start are not waited for."""
    world = trains()
    world.lose_node("c")
    world.agents_kill()
    world.tick()
    world.find_plan(MEMBERS)
    world.tick()
    world.get_state()
    world.tick()
    assert world.state.current and "c/0" not in world.state.current.members
    world.offer(a=2, b=2)
    world.offer(**NODES)
    world.tick()
    world.find_plan(MEMBERS)
    world.tick()
    assert isinstance(world.state.phase, Joining)
    world.lose_node("c")
    world.tick()
    world.tick()
    assert isinstance(world.state.phase, Running) and "c/0" not in world.alive


def test_a_recovery_without_snapshots_waits_for_a_node_and_not_for_ever() -> None:
    for comes_back in (True, False):
        world = trains()
        world.die("c/0")
        world.agents_kill()
        world.tick()
        world.find_plan(MEMBERS)
        world.tick()
        assert isinstance(world.state.phase, Starting)
        world.die("a/0", code=1, failure=LACK)
        world.agents_kill()
        world.tick()
        assert isinstance(world.state.phase, Awaiting)
        if comes_back:
            world.offer(a=2, b=2)
            world.offer(**NODES)
            world.tick()
            assert isinstance(world.state.phase, Planning)
            assert world.search and world.search.nodes == ("a", "b", "c")
        else:
            world.tick(121)
            assert world.outcome and world.outcome.sentence
            assert world.outcome.sentence.endswith("; c did not come back in 120 s")


def test_members_that_end_without_a_word_are_tried_three_times() -> None:
    world = World()
    starts_fail(world, 3)
    assert world.number == 3
    assert world.outcome and world.outcome.exit_code == 1
    assert world.outcome.sentence == "members ended without a word; 3 times in a row without a step"


@pytest.mark.parametrize("failed_before", [0, 1, 2])
def test_a_lost_chip_excuses_the_starts_before_it_and_none_after_it(failed_before: int) -> None:
    world = World()
    starts_fail(world, failed_before)
    world.lose_node("a")
    starts_fail(world, 3)
    assert world.number == failed_before + 3
    assert world.outcome and world.outcome.sentence
    assert world.outcome.sentence.endswith("; 3 times in a row without a step")


def starts_fail(world: World, times: int) -> None:
    """Starts all members again and again, which end without a word."""
    for _ in range(times):
        assert world.outcome is None
        while not world.alive:  # a plan that was sought before a chip was lost is of no use
            world.tick()
            world.find_plan(MEMBERS)
            world.tick()
        for member in list(world.alive):
            world.die(member, code=1)
        world.tick()


def test_chips_that_no_plan_fits_let_training_go_on_as_it_is() -> None:
    world = trains({"a": 2})
    world.offer(a=2, b=1)
    world.tick()
    world.find_plan(None)
    world.tick()
    assert world.told[-1] == "no plan for the chips; training goes on as it is"
    world.tick()
    assert isinstance(world.state.phase, Running) and world.search is None


def test_a_noticed_chip_that_the_model_needs_ends_the_job_in_order() -> None:
    world = trains({"a": 2})
    world.notice("a/1")
    world.tick()
    world.find_plan(None)
    world.tick()
    assert world.stopped
    world.end_in_order()
    world.tick()
    world.tick()
    assert world.outcome and world.outcome.exit_code == 1
    assert world.outcome.sentence == (
        "no plan for the chips; the last step is saved, --resume goes on from it"
    )


def test_a_chip_that_goes_and_comes_back_waits_for_the_end_of_its_old_process() -> None:
    world = trains({"a": 2, "b": 1})
    world.notice("b/0")
    world.tick()
    world.find_plan(MEMBERS)
    for _ in range(3):
        world.tick()
        world.begin_switch()
        world.get_state()
    assert world.state.current and world.state.current.members == ("a/0", "a/1")
    world.offer(a=2)
    world.offer(a=2, b=1)
    world.tick()
    world.find_plan(MEMBERS)
    world.tick()
    assert isinstance(world.state.phase, Planning) and ("b/0", 1) in world.told_to_end
    world.agents_kill()
    world.tick()
    assert isinstance(world.state.phase, Joining) and world.alive["b/0"] == 3


def test_a_stop_ends_a_start_at_once_and_a_training_after_its_step() -> None:
    starting, training = World(), trains()
    starting.tick()
    starting.find_plan(MEMBERS)
    starting.tick()
    for world in (starting, training):
        world.stop()
        world.tick()
    assert isinstance(starting.state.phase, Fencing)
    assert isinstance(training.state.phase, Running)
    starting.agents_kill()
    training.end_in_order()
    for world in (starting, training):
        world.tick()
        world.tick()
        assert world.outcome == JobOutcome(130)


def test_a_stop_cancels_a_switch_of_which_nobody_was_told() -> None:
    planning, joining = trains({"a": 2}), joins()
    planning.offer(a=2, b=1)
    planning.tick()
    for world in (planning, joining):
        world.stop()
        world.tick()
    assert isinstance(planning.state.phase, Running)
    assert isinstance(joining.state.phase, Dropping)
    joining.agents_kill()
    for world in (planning, joining):
        world.tick()
        world.tick()
        assert isinstance(world.state.phase, Running)
        assert set(world.alive) == {"a/0", "a/1"}


def test_a_job_ends_when_all_members_came_to_the_end() -> None:
    world = trains()
    world.end_in_order()
    world.tick()
    world.tick()
    assert world.outcome == JobOutcome(0)


def test_a_plan_that_is_found_while_members_end_is_not_followed() -> None:
    world = trains({"a": 2})
    world.offer(a=2, b=1)
    world.tick()
    world.end_in_order({"a/0"})
    world.find_plan(MEMBERS)
    world.tick()
    assert world.number == 1
    world.end_in_order()
    world.tick()
    world.tick()
    assert world.outcome == JobOutcome(0)


# ---------------------------------------------------------------- what decisions are made of


def test_decisions_are_made_of_values_alone() -> None:
    """No clock, file, store, thread or device can be reached from what decides."""
    folder = Path(decisions.__file__).parent
    files = [*folder.glob("*.py"), folder.parent / "messages.py"]
    found = {
        (file.name, name)
        for file in files
        for name in imported(file)
        if name not in PURE and not name.startswith(OWN)
    }
    assert len(files) > 10 and found == set()


def imported(file: Path) -> Iterator[str]:
    """Yields the modules that a file imports."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."
