"""What the user sees of an elastic job: the chips, the progress, and how the plan changed.

On a terminal one screen that is kept up to date; elsewhere lines, as things happen.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from heteropp.api.console import output_console, seconds
from heteropp.cost.planned import human_bytes
from heteropp.elastic.decisions.phases import (
    Awaiting,
    Dropping,
    Fencing,
    Joining,
    Over,
    Phase,
    Planning,
    Running,
    Starting,
    Switching,
)
from heteropp.elastic.launcher.change import Change
from heteropp.elastic.launcher.leader import Leader
from heteropp.elastic.messages import JobOutcome, Progress, node_of

SHOWN_CHANGES = 3
SHOWN_MOVES = 6  # of a change, the largest
DOING: dict[type[Phase], str] = {
    Planning: "searching a plan for the chips that are up",
    Joining: "new members open their chips",
    Switching: "switching to the new plan",
    Starting: "members start",
    Running: "",
    Dropping: "the chips changed again: new members end",
    Fencing: "ending all members",
    Awaiting: "waiting for a node that keeps what the others lack",
    Over: "",
}
STYLES = {"trains": "green", "coming": "cyan", "noticed": "yellow", "lost": "red", "away": "dim"}


class Screen:
    """Shows an elastic job while it runs: a live table on a terminal, or else lines."""

    def __init__(self, steps: int, quiet: bool) -> None:
        """quiet: standard output is kept for JSON."""
        self.steps, self.quiet = steps, quiet
        self.console = output_console(sys.stderr if quiet else sys.stdout)
        self.live: Live | None = None
        self.shown_changes = 0
        self.shown_step = 0
        self.news: list[str] = []

    def tell(self, sentence: str) -> None:
        """Shows a sentence, beside the table where there is one."""
        if self.live:
            self.news = [*self.news, sentence][-SHOWN_CHANGES:]
        else:
            self._line(sentence)

    def update(self, leader: Leader) -> None:
        """Shows what has changed since the last call."""
        if self.console.is_terminal:
            if self.live is None:
                self.live = Live(console=self.console, auto_refresh=False)
                self.live.start()
            self.live.update(self._whole(leader), refresh=True)
            return
        for change in leader.changes[self.shown_changes :]:
            for line in change_lines(change):
                self._line(line)
        self.shown_changes = len(leader.changes)
        progress, every = leader.state.history.progress, max(1, self.steps // 10)
        if progress and progress.step // every > self.shown_step // every:
            self._line(self._progress(progress))
        self.shown_step = progress.step if progress else 0

    def stop(self) -> None:
        """Gives the terminal back; what it showed stays."""
        if self.live:
            self.live.stop()
            self.live = None

    def finish(self, leader: Leader, outcome: JobOutcome, summary: str | None) -> None:
        """The job's last lines: its generations, and how it ended."""
        changes, progress = leader.changes, leader.state.history.progress
        for change in changes:
            self._line(f"generation {change.number}, {how(change)}")
        found = json.loads(summary) if summary else {}
        if found:
            self._line(
                f"loss {found['first_loss']:.4f} -> {found['last_loss']:.4f} over {self.steps} "
                f"steps, written to {found['output']}"
            )
        if self.quiet:
            print(as_json(found, changes), flush=True)
        if outcome.exit_code > 128 and progress:
            self._line(f"told to stop: step {progress.step} is saved, and --resume goes on from it")
        if outcome.sentence:
            print(f"training stopped: {outcome.sentence}", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def _whole(self, leader: Leader) -> RenderableType:
        parts: list[RenderableType] = [chips_table(leader)]
        if progress := leader.state.history.progress:
            parts.append(Text(self._progress(progress)))
        if doing := DOING[type(leader.state.phase)]:
            parts.append(Text(doing, style="bold"))
        for change in leader.changes[-SHOWN_CHANGES:]:
            parts += map(Text, change_lines(change))
        parts += [Text(sentence, style="dim") for sentence in self.news]
        return Group(*parts)

    def _progress(self, progress: Progress) -> str:
        loss = "not finite" if progress.loss is None else f"{progress.loss:.4f}"
        return (
            f"step {progress.step}/{self.steps}  loss {loss}  "
            f"{progress.tokens_per_s:,.0f} tokens/s  step {seconds(progress.step_s)}"
        )


def chips_table(leader: Leader) -> Table:
    """The chips by node, each with what it is to the job."""
    current = leader.state.current
    training = set(current.members) if current else set()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    by_node: dict[str, list[Text]] = defaultdict(list)
    for member, standing in leader.state.roster.standing.items():
        what = ("trains" if member in training else "coming") if standing == "up" else standing
        chip = member.rpartition("/")[2]
        by_node[node_of(member)].append(Text(f"{chip} {what}", style=STYLES[what]))
    for node, chips in by_node.items():
        table.add_row(node, Text("  ").join(chips))
    return table


def change_lines(change: Change) -> list[str]:
    """Plan before and after, what moved from where, and what the change cost."""
    lines = [f"generation {change.number}, {how(change)}"]
    if change.plan_before is not None:
        lines.append(f"  plan before  {change.plan_before}")
    lines.append(f"  plan         {change.plan}")
    if change.moved:
        total = change.bytes_by_source()
        lines.append(
            f"  state from   {', '.join(f'{s} {human_bytes(b)}' for s, b in total.items())}"
        )
        largest = sorted(change.moved, key=lambda moved: -moved.bytes)[:SHOWN_MOVES]
        moves = [f"{human_bytes(m.bytes)} {m.origin} -> {m.to} ({m.source})" for m in largest]
        if (more := len(change.moved) - len(moves)) > 0:
            moves.append(f"{more} more")
        lines.append(f"  moved        {', '.join(moves)}")
    cost = f"{seconds(change.downtime_s)} without a step"
    if change.steps_again:
        cost += f", {change.steps_again} steps trained again"
    if change.searched_s:
        cost += f"; the plan was searched in {seconds(change.searched_s)}"
    lines.append(f"  downtime     {cost}")
    return lines


def as_json(summary: dict[str, Any], changes: list[Change]) -> str:
    """The run's summary, with all generations."""
    return json.dumps({**summary, "generations": [asdict(change) for change in changes]}, indent=2)


def how(change: Change) -> str:
    """Returns in words how a generation began, and why."""
    what = {"initial": "the start", "switch": "a switch", "recover": "a recovery"}[change.start]
    when = f"{what} after step {change.step}" if change.step else what
    return f"{when}: {change.cause}" if change.cause else when
