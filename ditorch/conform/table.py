"""A conformance result for people: a table on the terminal, a page in Markdown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ditorch.conform.results import COMPUTED_BY, Conformance, OperatorResult, Tally
from ditorch.precision.results import write_atomically

_HEADINGS = ("passed", "failed", "unsupported")
_SHOWN = 20  # failures on the terminal; the JSON and the page have them all


def print_table(conformance: Conformance, console: Console | None = None) -> None:
    console = console or Console()
    name = f"{conformance.vendor} {conformance.chip_type} ({conformance.device})"
    table = Table(title=f"Conformance of {escape(name)}, PyTorch {conformance.torch_version}")
    table.add_column("group")
    for heading in ("operators", *_HEADINGS):
        table.add_column(heading, justify="right")
    for group, tally in _runtime_groups(conformance).items():
        table.add_row(f"runtime: {group}", "", *_cells(tally))
    for group, operators in _operator_groups(conformance).items():
        covered = sum(operator.tally.supported > 0 for operator in operators)
        table.add_row(group, str(covered), *_cells(_sum(operators)))
    if conformance.operators:
        table.add_section()
        table.add_row("all operators", str(len(conformance.covered)), *_cells(conformance.tally))
    console.print(table)
    for line in _summary(conformance):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    failures = _failures(conformance)
    for line in failures[:_SHOWN]:
        console.print(f"failed: {line}", markup=False, highlight=False, soft_wrap=True)
    if len(failures) > _SHOWN:
        console.print(f"... and {len(failures) - _SHOWN} more kinds of failure, in the JSON file")


def write_markdown(conformance: Conformance, path: Path) -> None:
    """The published form, atomically: counts, every failure and every reason for no support."""
    write_atomically(path, ("\n".join(_page(conformance)) + "\n").encode())


def _page(conformance: Conformance) -> list[str]:
    settings = conformance.settings
    lines = [
        f"# Conformance of chip {conformance.vendor} {conformance.chip_type} "
        f"(`{conformance.device}`)",
        "",
        f"PyTorch {conformance.torch_version}, its operator database against the CPU: "
        f"{settings.samples_per_dtype} samples of each operator and dtype, seed {settings.seed}; "
        f"{conformance.elapsed_s:.0f} s. Made by `{conformance.command}`.",
        "",
        *_summary(conformance),
        "",
        "A *sample* is one input of one operator in one dtype through one variant: the function, "
        "the method, the in-place form, `out=` of the right size and of size zero, the gradient. "
        "Samples that the CPU itself refuses are not counted.",
        "",
    ]
    if conformance.checks:
        rows = [(group, *_cells(tally)) for group, tally in _runtime_groups(conformance).items()]
        lines += ["## Runtime", "", *_markdown(("group", *_HEADINGS), rows), ""]
    if conformance.operators:
        lines += _operator_part(conformance)
    lines += ["## Failures", "", *_list(_failures(conformance)), ""]
    lines += ["## Unsupported, with reasons", "", *_list(_unsupported(conformance))]
    return lines


def _operator_part(conformance: Conformance) -> list[str]:
    groups = [
        (group, str(sum(o.tally.supported > 0 for o in operators)), *_cells(_sum(operators)))
        for group, operators in _operator_groups(conformance).items()
    ]
    by_variant, by_dtype = _by_variant_and_dtype(conformance)
    kernels, fallbacks = _runs(conformance)
    return [
        "## Operators by group", "",
        *_markdown(("group", "operators", *_HEADINGS), groups), "",
        "## Operators by variant", "",
        *_markdown(("variant", *_HEADINGS), [(k, *_cells(t)) for k, t in by_variant.items()]), "",
        "## Operators by dtype", "",
        *_markdown(("dtype", *_HEADINGS), [(k, *_cells(t)) for k, t in by_dtype.items()]), "",
        "## Chip kernels and host fallbacks", "",
        *_markdown(("computed by", "samples"), _computed_by(conformance)), "",
        f"The chip's own kernels ran {sum(kernels.values())} times:", "",
        *_markdown(("kernel", "runs"), [(f"`{k}`", str(n)) for k, n in kernels.most_common()]), "",
        f"Host fallbacks ran {sum(fallbacks.values())} times, of {len(fallbacks)} operators.", "",
    ]  # fmt: skip


def _summary(conformance: Conformance) -> list[str]:
    lines = []
    if conformance.checks:
        tally = conformance.check_tally
        lines.append(
            f"Runtime: {tally.passed} checks passed, {tally.failed} failed, "
            f"{tally.unsupported} unsupported."
        )
    if conformance.operators:
        tally = conformance.tally
        computed = ", ".join(f"{count} {name}" for name, count in _computed_by(conformance))
        lines.append(
            f"Operators: {len(conformance.covered)} of {len(conformance.operators)} covered; of "
            f"{tally.supported} supported samples {tally.passed} passed "
            f"({_percent(conformance.pass_rate)}), {tally.failed} failed; {tally.unsupported} "
            "unsupported."
        )
        lines.append(f"Samples by who computed them: {computed}.")
    if conformance.left_out:
        lines.append(f"There was no time for {conformance.left_out} more operators and checks.")
    return lines


def _percent(share: float) -> str:
    """Rounded down: only 1 is 100%."""
    return f"{int(share * 1e4) / 100:.2f}%"


def _cells(tally: Tally) -> tuple[str, str, str]:
    return str(tally.passed), str(tally.failed), str(tally.unsupported)


def _sum(operators: list[OperatorResult]) -> Tally:
    total = Tally()
    for operator in operators:
        total.add(operator.tally)
    return total


def _runtime_groups(conformance: Conformance) -> dict[str, Tally]:
    groups: dict[str, Tally] = defaultdict(Tally)
    for check in conformance.checks:
        groups[check.group].count(check.status)
    return groups


def _operator_groups(conformance: Conformance) -> dict[str, list[OperatorResult]]:
    """Groups operators by their namespace in the OpInfo database: linalg, nn.functional, torch."""
    groups: dict[str, list[OperatorResult]] = defaultdict(list)
    namespaces = ("nn.functional", "linalg", "fft", "special", "signal.windows", "masked", "_refs")
    for operator in conformance.operators:
        found = (name for name in namespaces if operator.name.startswith(name + "."))
        groups[next(found, "torch")].append(operator)
    return dict(sorted(groups.items()))


def _by_variant_and_dtype(conformance: Conformance) -> tuple[dict[str, Tally], dict[str, Tally]]:
    by_variant: dict[str, Tally] = defaultdict(Tally)
    by_dtype: dict[str, Tally] = defaultdict(Tally)
    for operator in conformance.operators:
        for dtype, variants in operator.tallies.items():
            for variant, tally in variants.items():
                by_variant[variant].add(tally)
                by_dtype[dtype].add(tally)
    return by_variant, dict(sorted(by_dtype.items()))


def _computed_by(conformance: Conformance) -> list[tuple[str, str]]:
    names = {
        "chip": "by the chip's kernels alone",
        "both": "by chip kernels and host fallbacks",
        "host": "by host fallbacks alone",
        "neither": "by neither (views, copies, memory)",
    }
    counts: Counter[str] = Counter()
    for operator in conformance.operators:
        counts.update(operator.computed_by)
    return [(names[kind], str(counts[kind])) for kind in COMPUTED_BY]


def _runs(conformance: Conformance) -> tuple[Counter[str], Counter[str]]:
    kernels: Counter[str] = Counter()
    fallbacks: Counter[str] = Counter()
    for operator in conformance.operators:
        kernels.update(operator.kernels)
        fallbacks.update(operator.fallbacks)
    return kernels, fallbacks


def _failures(conformance: Conformance) -> list[str]:
    """One line for each operator, variant and reason."""
    lines = [
        f"runtime, {check.group}: {check.name}: {check.reason}"
        for check in conformance.checks
        if check.status == "failed"
    ]
    kinds: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name, outcome in conformance.problems("failed"):
        kinds[name, outcome.variant].append((outcome.dtype, outcome.reason))
    for (name, variant), found in kinds.items():
        dtypes = ", ".join(sorted({dtype for dtype, _ in found}))
        count = f"{len(found)} sample{'s' if len(found) > 1 else ''}"
        lines.append(f"`{name}`, {variant}, {dtypes} ({count}): {found[0][1]}")
    return lines


def _unsupported(conformance: Conformance) -> list[str]:
    lines = [
        f"runtime, {check.group}: {check.name}: {check.reason}"
        for check in conformance.checks
        if check.status == "unsupported"
    ]
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for name, outcome in conformance.problems("unsupported"):
        reasons[outcome.reason][name] += 1
    for reason, names in sorted(reasons.items()):
        listed = ", ".join(f"`{name}` ({count})" for name, count in sorted(names.items()))
        lines.append(f"{reason} ({sum(names.values())} samples): {listed}")
    refused = [o.name for o in conformance.operators if not o.tally.supported + o.tally.unsupported]
    if refused:
        lines.append(
            f"refused by the CPU, so never checked: {', '.join(f'`{n}`' for n in refused)}"
        )
    return lines


def _list(lines: list[str]) -> list[str]:
    return [f"- {line}" for line in lines] or ["None."]


def _markdown(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    rule = ["---", *["---:"] * (len(headings) - 1)]
    return [f"| {' | '.join(row)} |" for row in (headings, rule, *rows)]
