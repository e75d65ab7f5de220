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
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from heteropp.cli.show import output_console, seconds
from heteropp.elastic.change import Change
from heteropp.elastic.job import Moved, Progress, node_of
from heteropp.elastic.leader import Leader, Outcome
from heteropp.planned import human_bytes

SHOWN_CHANGES = 3
SHOWN_MOVES = 6  # of a change, the largest
DOING = {
    "planning": "searching a plan for the chips that are up",
    "joining": "new members open their chips",
    "switching": "switching to the new plan",
    "starting": "members start",
    "running": "",
    "dropping": "the chips changed again: new members end",
    "fencing": "ending all members",
}
STYLES = {"trains": "green", "coming": "cyan", "noticed": "yellow", "lost": "red", "away": "dim"}


class Screen:
    def __init__(self, steps: int, quiet: bool) -> None:
        """quiet: standard output is kept for JSON."""
        self.steps, self.quiet = steps, quiet
        self.console = output_console(sys.stderr if quiet else sys.stdout)
        self.live: Live | None = None
        self.shown_changes = 0
        self.shown_step = 0
        self.news: list[str] = []

    def tell(self, sentence: str) -> None:
        if self.live:
            self.news = [*self.news, sentence][-SHOWN_CHANGES:]
        else:
            self._line(sentence)

    def update(self, leader: Leader) -> None:
        if self.console.is_terminal:
            if self.live is None:
                self.live = Live(console=self.console, auto_refresh=False)
                self.live.start()
            self.live.update(self._whole(leader), refresh=True)
            return
        for change in leader.changes[self.shown_changes :]:
            self.console.print(change_table(change), soft_wrap=True)
        self.shown_changes = len(leader.changes)
        progress, every = leader.progress, max(1, self.steps // 10)
        if progress and progress.step // every > self.shown_step // every:
            self._line(self._progress(progress))
        self.shown_step = progress.step if progress else 0

    def stop(self) -> None:
        """Gives the terminal back; what it showed stays."""
        if self.live:
            self.live.stop()
            self.live = None

    def finish(self, leader: Leader, outcome: Outcome, summary: str | None) -> None:
        """The job's last lines: its generations, and how it ended."""
        if self.quiet and summary:
            print(as_json(json.loads(summary), leader.changes), flush=True)
        for change in leader.changes:
            self._line(f"generation {change.number}, {how(change)}: {change.plan}")
        if outcome.sentence:
            print(f"training stopped: {outcome.sentence}", file=sys.stderr, flush=True)

    def _line(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def _whole(self, leader: Leader) -> RenderableType:
        parts: list[RenderableType] = [chips_table(leader)]
        if leader.progress:
            parts.append(Text(self._progress(leader.progress)))
        if doing := DOING[leader.phase]:
            parts.append(Text(doing, style="bold"))
        parts += [change_table(change) for change in leader.changes[-SHOWN_CHANGES:]]
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
    training = set(leader.running.members) if leader.running else set()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    by_node: dict[str, list[str]] = defaultdict(list)
    for member, standing in leader.roster.standing.items():
        what = ("trains" if member in training else "coming") if standing == "up" else standing
        chip = member.rpartition("/")[2]
        by_node[node_of(member)].append(f"[{STYLES[what]}]{chip} {what}[/]")
    for node, chips in by_node.items():
        table.add_row(escape(node), "  ".join(chips))
    return table


def change_table(change: Change) -> Table:
    """Plan before and after, what moved from where, and what the change cost."""
    table = Table(box=None, padding=(0, 2, 0, 2), show_header=False)
    table.title = f"generation {change.number}, {how(change)}"
    table.title_justify = "left"
    table.title_style = ""
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if change.plan_before is not None:
        table.add_row("plan before", escape(change.plan_before))
    table.add_row("plan", escape(change.plan))
    if change.moved:
        total = change.bytes_by_source()
        table.add_row("from", ", ".join(f"{s} {human_bytes(b)}" for s, b in total.items()))
        largest = sorted(change.moved, key=lambda moved: -moved.bytes)[:SHOWN_MOVES]
        moves = [f"{m.to} {human_bytes(m.bytes)} from {_where(m)}" for m in largest]
        if (more := len(change.moved) - len(moves)) > 0:
            moves.append(f"{more} more")
        table.add_row("moved", escape("; ".join(moves)))
    cost = f"{seconds(change.downtime_s)} without a step"
    if change.steps_again:
        cost += f", {change.steps_again} steps trained again"
    table.add_row("cost", cost)
    return table


def as_json(summary: dict[str, Any], changes: list[Change]) -> str:
    """The run's summary, with all generations."""
    return json.dumps({**summary, "generations": [asdict(change) for change in changes]}, indent=2)


def how(change: Change) -> str:
    what = {"initial": "the start", "switch": "a switch", "recover": "a recovery"}[change.start]
    when = f"{what} after step {change.step}" if change.step else what
    return f"{when}: {change.cause}" if change.cause else when


def _where(moved: Moved) -> str:
    return f"{moved.origin} ({moved.source})"
