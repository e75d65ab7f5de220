"""What a seed draws for a run over machines: the job, and what befalls which of the machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from chaos_runs.scene import CURVES, LONGEST, Scene

StrikeDeed = Literal["cut off", "stop", "kill machine"]

STORE = 0  # the machine of the job's store, of its first leader, and of torchrun's rendezvous


@dataclass(frozen=True)
class Strike:
    deed: StrikeDeed
    machine: int
    after_s: float  # the strike before, or the step that the first one waits for
    lasts_s: float | None  # None: for ever

    def loses(self, deadline_s: float) -> bool:
        """Whether the others cannot wait for the machine."""
        return self.lasts_s is None or self.lasts_s > deadline_s


@dataclass(frozen=True)
class MachinesScene:
    job: Scene
    step: int  # completed before the first strike
    strikes: tuple[Strike, ...]  # of a machine each
    deadline_s: float

    def loses(self, machine: int) -> bool:
        return any(one.machine == machine and one.loses(self.deadline_s) for one in self.strikes)


def draw(seed: int, machines: int, deadline_s: float) -> MachinesScene:
    """One node of one or two chips a machine; all copies that a lost machine does not take along
    are in the remote store.
    """
    random = Random(seed)
    job = Scene(
        seed=seed,
        device="cpu",
        nodes=tuple((random.choice("ab"), random.randint(1, 2)) for _ in range(machines)),
        absent=0,
        curve=random.choice(CURVES),
        steps=random.randint(110, LONGEST),
        zero_stage=random.choice([0, 1]),
        schedule=random.choice(["1f1b", "gpipe", "zb-h1"]),
        keep_every=(1, 0, 2),
        events=(),
    )
    strikes = tuple(_strikes(random, machines, deadline_s))
    return MachinesScene(job, random.randint(5, 30), strikes, deadline_s)


def _strikes(random: Random, machines: int, deadline_s: float) -> Iterator[Strike]:
    """Some machine is always left."""
    count = random.choice([1, 1, 2])
    for number, machine in enumerate(random.sample(range(machines), min(count, machines - 1))):
        deed: StrikeDeed = random.choice(["cut off", "cut off", "stop", "stop", "kill machine"])
        short_s, long_s = random.uniform(0.5, deadline_s / 3), random.uniform(1.3, 2) * deadline_s
        lasts_s = None if deed == "kill machine" else random.choice([short_s, long_s, None])
        after_s = random.uniform(0, 2 * deadline_s) if number else random.uniform(0, 0.3)
        yield Strike(deed, machine, after_s, lasts_s)
