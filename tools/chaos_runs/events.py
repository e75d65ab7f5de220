"""Waits for the moments of a scene's events, and brings them about."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from chaos_runs.job import Job, listed, steps_in
from chaos_runs.scene import FEWEST_LEFT, Deed, Event, Moment
from chaos_runs.strikes import StrikeDeed

T = TypeVar("T")
POLL_S = 0.004
CHANGE_S = 8.0  # so long a change is waited for that may not come
AGAIN_S = 3.0  # after which the job has read availability anew


@dataclass(frozen=True)
class Happened:
    deed: Deed | StrikeDeed
    at_s: float  # by the time of day
    whom: tuple[str, ...]  # members, nodes or files; (): there was nobody left for it
    step: int
    saving: bool  # whether a rank was amidst a copy
    changing: bool  # whether a generation was planned that did not train yet
    standing: bool  # likewise, and no step had ended for a while

    def __str__(self) -> str:
        return f"{self.deed} {' '.join(self.whom) or 'of nobody'} after step {self.step}"


class Events:
    def __init__(self, job: Job, chips: dict[str, int], sizes: dict[str, int]) -> None:
        """chips: how many chips each node begins with; sizes: how many it may have at most."""
        self.job, self.chips, self.sizes = job, dict(chips), sizes
        self.gone: set[str] = set()  # members that were killed or paused for ever
        self.leaving: set[str] = set()  # members that had notice
        self.torn = False  # whether copies were damaged
        self.happened: list[Happened] = []
        self.later: list[threading.Timer] = []

    def run(self, until_s: float) -> None:
        """Lets the scene's events happen until the job ends or a (monotonic) time has come."""
        seen = 0  # newest generation at the event before
        for event in self.job.scene.events:
            if not self._wait(event.moment, seen, until_s):
                return
            seen = self.job.generation
            step, saving = self.job.step, self.job.saving()
            changing, standing = self.job.changes, self.job.stands
            deed: Deed = event.deed
            at_s = time.time()
            if not (whom := self._befall(event)):  # too few are left: one may come instead
                deed, whom = "add", self._add(event)
            happened = Happened(deed, at_s, tuple(whom), step, saving, changing, standing)
            self.happened.append(happened)

    def close(self) -> None:
        for timer in self.later:
            timer.cancel()

    def nodes_left(self) -> set[str]:
        """Returns the nodes that must still have a chip that was neither lost nor withdrawn."""
        left = set()
        for node, count in self.chips.items():
            chips = {f"{node}/{i}" for i in range(self.sizes[node])}
            away = len(chips) - count
            if len(chips - self.gone - self.leaving) > away:
                left.add(node)
        return left

    # ------------------------------------------------------------ moments

    def _wait(self, moment: Moment, seen: int, until_s: float) -> bool:
        """Whether the moment came in the job's life; that of a change is not waited for long."""
        change_s = time.monotonic() + CHANGE_S
        while not self._has_come(moment, seen):
            if self.job.over or time.monotonic() > until_s:
                return False
            if moment.phase in ("change", "switch") and time.monotonic() > change_s:
                break
            time.sleep(POLL_S)
        time.sleep(moment.delay_s)
        return not self.job.over

    def _has_come(self, moment: Moment, seen: int) -> bool:
        if moment.phase == "change":
            return self.job.generation > seen
        if moment.phase == "switch":
            return self.job.stands
        if moment.phase == "save":
            return self.job.newest_kept() > moment.step
        return self.job.step >= moment.step

    # ------------------------------------------------------------ deeds

    def _befall(self, event: Event) -> Sequence[str]:
        deeds: dict[Deed, Callable[[Event], Sequence[str]]] = {
            "kill": self._kill,
            "kill node": self._kill_node,
            "pause": self._pause,
            "notice": self._notice,
            "short notice": self._notice,
            "withdraw": self._withdraw,
            "add": self._add,
            "tear": self._tear,
        }
        return deeds[event.deed](event)

    def _living(self) -> dict[str, int]:
        """Members that nothing has befallen, and their processes; none when none may go."""
        whole = {m: p for m, p in self.job.members().items() if m not in self.gone | self.leaving}
        return whole if len(whole) > FEWEST_LEFT else {}

    def _signal(self, member: str, number: int) -> bool:
        process = self.job.members().get(member)
        with contextlib.suppress(ProcessLookupError):
            if process is not None:
                os.kill(process, number)
                return True
        return False

    def _kill(self, event: Event) -> Sequence[str]:
        if not (living := self._living()):
            return ()
        member = picked(event.pick, list(living))
        self.gone.add(member)
        self._signal(member, signal.SIGKILL)
        return (member,)

    def _kill_node(self, event: Event) -> Sequence[str]:
        """A node dies with all its chips, and its memory."""
        living = self._living()
        nodes = sorted({node_of(member) for member in living})
        by_node = {node: [m for m in living if node_of(m) == node] for node in nodes}
        may_go = [node for node in nodes if len(living) - len(by_node[node]) >= FEWEST_LEFT]
        if not may_go:
            return ()
        node = picked(event.pick, may_go)
        for member in self.job.members():
            if node_of(member) == node:
                self.gone.add(member)
                self._signal(member, signal.SIGKILL)
        self.gone |= {f"{node}/{i}" for i in range(self.sizes[node])}
        return (node,)

    def _pause(self, event: Event) -> Sequence[str]:
        if not (living := self._living()):
            return ()
        member = picked(event.pick, list(living))
        self._signal(member, signal.SIGSTOP)
        if event.lasts_s is None:
            self.gone.add(member)
        else:
            self._do_later(event.lasts_s, living[member], signal.SIGCONT)
        return (member,)

    def _notice(self, event: Event) -> Sequence[str]:
        if not (living := self._living()):
            return ()
        member = picked(event.pick, list(living))
        self._signal(member, signal.SIGTERM)
        self.leaving.add(member)
        if event.lasts_s is not None:
            self.gone.add(member)
            self._do_later(event.lasts_s, living[member], signal.SIGKILL)
        return (member,)

    def _do_later(self, after_s: float, process: int, number: int) -> None:
        def act() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

        timer = threading.Timer(after_s, act)
        timer.daemon = True
        self.later.append(timer)
        timer.start()

    def _withdraw(self, event: Event) -> Sequence[str]:
        living = self._living()
        nodes = sorted({node_of(m) for m in living if self.chips[node_of(m)] > 0})
        if not nodes:
            return ()
        node = picked(event.pick, nodes)
        self._offer(node, self.chips[node] - 1)
        return (node,)

    def _add(self, event: Event) -> Sequence[str]:
        """A chip that is away comes; or else one that was lost, as the scheduler replaced it."""
        away = sorted(node for node, size in self.sizes.items() if self.chips[node] < size)
        lost = sorted({node_of(member) for member in self.gone | self.leaving})
        if not away and not lost:
            return ()
        node = picked(event.pick, away or lost)
        if not away:
            self._offer(node, self.chips[node] - 1)
            time.sleep(AGAIN_S)
        back = [m for m in sorted(self.gone | self.leaving) if node_of(m) == node]
        self.gone -= set(back[:1])
        self.leaving -= set(back[:1])
        self._offer(node, self.chips[node] + 1)
        return (node,)

    def _offer(self, node: str, chips: int) -> None:
        self.chips[node] = chips
        offer(self.job.folder, self.chips)

    def _tear(self, event: Event) -> Sequence[str]:
        """Damages the newest copies in a tier, and kills a member."""
        tiers = self.job.tiers()
        if not tiers or not self._living():
            return ()
        tier = picked(event.pick, tiers)
        newest = max(steps_in(tier), default=tier)
        # whose manifest is torn is not read at all
        names = [n for n in listed(newest) if event.pick < 0.25 or n.endswith(".safetensors")]
        torn = [name for name in names if damage(newest / name, event.pick)]
        self.torn |= bool(torn)
        return (f"{len(torn)} files of {tier.name}/{newest.name}", *self._kill(event))


def damage(path: Path, pick: float) -> bool:
    """Tears a file, or changes a byte of it; False where there is no such file any more."""
    try:
        with open(path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            at = Random(f"{path.name} {pick}").randrange(size)
            if pick < 0.5:
                file.truncate(at)
            else:
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 0x40]))
    except (OSError, ValueError):  # it was retired; or it is empty
        return False
    return True


def offer(folder: Path, chips: dict[str, int]) -> None:
    """Says which chips there are, at once for whoever reads it."""
    new = folder / "available.json.new"
    new.write_text(json.dumps(chips))
    new.rename(folder / "available.json")


def picked(pick: float, among: Sequence[T]) -> T:
    return among[int(pick * len(among))]


def node_of(member: str) -> str:
    return member.rpartition("/")[0]
