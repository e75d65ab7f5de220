"""heteropp-models: which models can be trained, and that they are trained as transformers does.

A family that transformers knows is made small, with layers of every kind that it has, and one step
of it is run by transformers unsplit and by us in three stages: the loss and every gradient must be
the same.
"""

from __future__ import annotations

import json as json_
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from heteropp.cli.errors import one_sentence
from heteropp.cli.families import markdown, table
from heteropp.cli.trust import TrustRemoteCode
from hyperhetero.cli import CommandLine
from hyperhetero.progress import Progress, Status

if TYPE_CHECKING:
    from heteropp.api.families import Report

FAILED = 1

app = CommandLine(help=__doc__, no_args_is_help=True)

CHECK_EXAMPLES = """\b
Examples:
  heteropp-models check qwen3-30b-a3b
  heteropp-models check mixtral/config.json --tp 4 --json
"""
LIST_EXAMPLES = """\b
Examples:
  heteropp-models list
  heteropp-models list qwen3_moe deepseek_v3 --json
  heteropp-models list --markdown > docs/models.md
"""
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command(epilog=CHECK_EXAMPLES)
def check(
    model: Annotated[
        str,
        typer.Argument(help="A Hugging Face folder, a config.json, a model file or a preset."),
    ],
    tp: Annotated[
        int, typer.Option(help="The largest degree of tensor parallelism to check, 1 to 8.")
    ] = 2,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
) -> None:
    """Check one model's family against transformers; exit code 1 where they differ."""
    from heteropp.api.families import check_model

    _silence()
    with one_sentence(), Status("reading the model") as status:
        report = check_model(
            model, tp, lambda text: status.update(f"checking {text}"), trust_remote_code
        )
    if json:
        print(json_.dumps(_as_dict(report), indent=2))
    else:
        print("\n".join(_sentences(report, Path(model).name)))
    if not report.passed:
        raise typer.Exit(FAILED)


@app.command("list", epilog=LIST_EXAMPLES)
def list_(
    families: Annotated[
        list[str] | None, typer.Argument(help="Some families, by model_type; all if absent.")
    ] = None,
    markdown_: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/models.md.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Check every family of transformers' causal language models (some minutes, the first time)."""
    from heteropp.api.families import check_family, family_names

    _silence()
    with one_sentence():
        names = families or family_names()
        reports = [check_family(name) for name in _tracked(names)]
    if json:
        print(json_.dumps([_as_dict(report) for report in reports], indent=2))
    elif markdown_:
        print(markdown(reports))
    else:
        Console(markup=False).print(table(reports))


def _silence() -> None:
    """Keeps transformers' remarks on configs off the terminal, where it is there."""
    import os
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")


def _tracked(names: list[str]) -> Iterator[str]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            yield name
            progress.advance(task)


def _sentences(report: Report, name: str) -> Iterator[str]:
    what = "experts" if report.has_experts else "dense"
    layers = ", ".join(f"{count} {kind}" for kind, count in report.kinds.items())
    yield f"{name}: family {report.family}, {what}; layers: {layers}"
    yield (
        f"{report.parameters:,} parameters, of which a token uses {report.active_parameters:,}"
        if report.active_parameters < report.parameters
        else f"{report.parameters:,} parameters"
    )
    if report.is_own:
        yield "its modules are our own, which our tests hold against transformers"
    for degree in report.degrees:
        how = f"tp {degree.tp}{', sequence parallel' if degree.sequence_parallel else ''}"
        if degree.failed:
            yield f"{how}: FAILED, {degree.problem}"
        elif degree.problem:
            yield f"{how}: no, {degree.problem}"
        else:
            yield f"{how}: as transformers, within {degree.error:.1e} ({degree.parameter})"


def _as_dict(report: Report) -> dict:
    return {**asdict(report), "passed": report.passed}


def main() -> None:
    app()


if __name__ == "__main__":
    main()
