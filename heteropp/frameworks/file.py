"""What an export gives: a file's lines, and what of the plan had to be replaced."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from heteropp.description.outline import outline
from heteropp.description.plan import Plan


class ExportError(ValueError):
    """A plan that a framework cannot run in any form; the message is one sentence."""


@dataclass(frozen=True)
class Replacement:
    """Something that a framework cannot express, and what stands in its place."""

    what: str  # in the plan
    by: str  # in the framework's file


@dataclass(frozen=True)
class FrameworkFile:
    """A framework's file."""

    text: str
    replacements: tuple[Replacement, ...]


def heading(plan: Plan, use: str, replacements: Iterable[Replacement]) -> list[str]:
    """The comment with which every file begins; use: how the framework is given the file."""
    lines = [f"Plan of {plan.model.name} on {plan.world_size} chips: {outline(plan)}", use]
    replaced = [f"- {one.what}: {one.by}" for one in replacements]
    if replaced:
        lines += ["", "What the plan says and this file cannot, and what stands in its place:"]
    return [part for line in [*lines, *replaced, ""] for part in _comment(line)]


def _comment(line: str) -> list[str]:
    return textwrap.wrap(line, 98, initial_indent="# ", subsequent_indent="#   ") or ["#"]


def rank_lines(ranks: Iterable[tuple[str, tuple[int, ...]]]) -> list[str]:
    """Comments that say which of the plan's ranks each stage's are, in the framework's order.

    ranks: of each stage, its chips and the plan's ranks.
    """
    lines = ["# The framework numbers ranks stage by stage; start the machines in this order:"]
    first = 0
    for stage, (chips, own) in enumerate(ranks):
        last = first + len(own) - 1
        lines.append(f"#   stage {stage}: ranks {first}-{last}, {chips}, the plan's {spans(own)}")
        first = last + 1
    return lines


def spans(numbers: Iterable[int]) -> str:
    """Returns numbers in their order, runs of them as "0-3"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
