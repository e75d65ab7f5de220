"""One run over machines of tools/machines, each of which torchrun starts an agent on.

When some machine is lost, the others train on to the last step, on the undisturbed curve. Without
the store's machine they end, and each names it before anything else.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from chaos_runs.events import Happened
from chaos_runs.job import environment, read, train
from chaos_runs.strikes import STORE, MachinesScene, Strike
from chaos_runs.verdict import (
    Verdict,
    check_losses,
    metrics,
    places,
    read_changes,
)
from machines import Machine, MachinesError

PORT = 29400
POLL_S = 0.02
ENDS_S = 60.0  # besides the deadline: torchrun, too, has to find out
TIMING = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=5"
LOST_STORE = re.compile(
    r"^node \S+ stopped: machine-0, the machine of the job's store, has (not answered|hung up)"
)
BEFALL: dict[str, tuple[Callable[[Machine], None], Callable[[Machine], None]]] = {
    "cut off": (Machine.cut_off, Machine.come_back),
    "stop": (Machine.stop, Machine.go_on),
}


@dataclass
class MachinesJob:
    scene: MachinesScene
    folder: Path
    machines: Sequence[Machine]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    happened: list[Happened] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return self.folder / "run"

    @property
    def step(self) -> int:
        return read(self.output / "metrics.jsonl").count("\n")

    @property
    def is_done(self) -> bool:
        said = (read(self.said(number)) for number in range(len(self.machines)))
        return any("written to" in text for text in said)

    def said(self, machine: int) -> Path:
        return self.folder / f"machine-{machine}.txt"

    def start(self, nodes: Sequence[str], text: Path) -> None:
        """nodes: the name of each machine's."""
        whole = train(self.scene.job.curve, self.scene.job.steps, text)
        command = [str(word) for word in whole[whole.index("--plan") :]]
        for number, (machine, node) in enumerate(zip(self.machines, nodes, strict=True)):
            torchrun = [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"),
                *("--nnodes", f"2:{len(nodes)}", "--max-restarts", "9", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"machine-{STORE}:{PORT}", "--rdzv-id", "run"),
                *("--rdzv-conf", TIMING, "-m", "heteropp.cli.train", *command),
                *("--elastic", "--cluster", "cluster.toml", "--node-name", node),
                *("--deadline", str(self.scene.deadline_s), "--device", "cpu"),
                *map(str, self.scene.job.keeping(self.folder)),
            ]
            own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
            shell = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *torchrun]
            with self.said(number).open("w") as file:
                self.processes.append(machine.start(shell, environment(text) | own, file))

    def strike(self, one: Strike) -> threading.Timer | None:
        """Returns the timer of what ends it, if anything does."""
        machine = self.machines[one.machine]
        whom, at_s = (machine.name,), time.time()
        self.happened.append(Happened(one.deed, at_s, whom, self.step, False, False, False))
        if one.deed == "kill machine":
            machine.kill()
            return None
        begin, end = BEFALL[one.deed]
        begin(machine)
        if one.lasts_s is None:
            return None

        def mend() -> None:
            with suppress(MachinesError):  # the run is over
                end(machine)

        timer = threading.Timer(one.lasts_s, mend)
        timer.daemon = True
        timer.start()
        return timer

    def wait(self, comes: Callable[[], bool], within_s: float) -> bool:
        """Whether something came in time."""
        limit_s = time.monotonic() + within_s
        while not comes():
            if time.monotonic() > limit_s:
                return False
            time.sleep(POLL_S)
        return True


def run(
    scene: MachinesScene,
    job: MachinesJob,
    nodes: Sequence[str],
    text: Path,
    curves: Mapping[str, Sequence[float]],
    limit_s: float,
) -> Verdict:
    """limit_s: for the job to start, and again for each strike."""
    begin_s, timers = time.monotonic(), []
    job.start(nodes, text)
    if not job.wait(lambda: job.step >= scene.step, limit_s):
        return Verdict(scene.job.seed, limit_s, "wrong", [f"no step {scene.step} in {limit_s:g} s"])
    for one in scene.strikes:
        job.wait(lambda: job.is_done, one.after_s)
        if job.is_done or job.processes[one.machine].poll() is not None:
            break
        timers.append(job.strike(one))
    struck = {one.whom[0] for one in job.happened}
    is_store_lost = scene.loses(STORE) and f"machine-{STORE}" in struck
    verdict = Verdict(scene.job.seed, 0.0, "wrong", changes=read_changes(job.output))
    if is_store_lost and not job.is_done:
        verdict.outcome = "ended"
        verdict.faults += _unlike_ends(job, struck)
        verdict.outcome = "reached" if job.is_done else "ended"
    elif job.wait(lambda: job.is_done, limit_s * (1 + len(scene.strikes))):
        verdict.outcome = "reached"
    else:
        verdict.faults.append(f"it did not come to its end after {job.step} steps")
    for timer in timers:
        if timer:
            timer.cancel()
    verdict.seconds = time.monotonic() - begin_s
    verdict.changes = read_changes(job.output)
    verdict.happened = list(zip(job.happened, places(job.happened, verdict.changes), strict=True))
    lines, curve = metrics(job.output), scene.job.curve
    steps = scene.job.steps if verdict.outcome == "reached" else len(lines)
    check_losses(verdict, lines, range(1, steps + 1), curve, curves[curve.model.name])
    return verdict


def _unlike_ends(job: MachinesJob, struck: set[str]) -> list[str]:
    """What speaks against an end of all whom nothing befell, with the store's machine as cause."""
    within_s, found = job.scene.deadline_s + ENDS_S, []
    for number, machine in enumerate(job.machines):
        if machine.name in struck:
            continue
        if not job.wait(lambda number=number: job.processes[number].poll() is not None, within_s):
            found.append(f"{machine.name} did not end within {within_s:g} s")
        said = [line for line in read(job.said(number)).splitlines() if " stopped" in line]
        if not job.is_done and not (said and LOST_STORE.match(said[0])):
            found.append(f"{machine.name} does not name machine-{STORE}: {said[:1]}")
    return found
