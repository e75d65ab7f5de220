"""heteropp-export-plan: writes a plan as another framework's flags or configuration.

What that framework cannot express is replaced, and listed in a table and in the file's head.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from heteropp.api.console import output_console
from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from heteropp.cli.trust import TrustRemoteCode
from hyperhetero.cli import CommandLine, output_file

if TYPE_CHECKING:
    from heteropp.description.plan import Plan
    from heteropp.frameworks.file import FrameworkFile

app = CommandLine()

EXAMPLES = """\b
Examples:
  heteropp-export-plan plan.json --to megatron --output plan.sh
  heteropp-export-plan plan.json --to flagscale --output conf/train/plan.yaml
  heteropp-export-plan plan.json --to torchtitan --output plan.py
"""


class Framework(StrEnum):
    MEGATRON = "megatron"
    FLAGSCALE = "flagscale"
    TORCHTITAN = "torchtitan"


@app.command(help=__doc__, epilog=EXAMPLES)
def export_plan(
    plan: Annotated[Path, typer.Argument(help="What heteropp-search wrote.")],
    to: Annotated[Framework, typer.Option(help="The framework to write for.")],
    output: Annotated[
        Path | None,
        output_file("--output", "-o", help="The file to write; standard output if absent."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    with one_sentence():
        from heteropp.api.given import allow_code
        from heteropp.description.files import write_text
        from heteropp.description.plan import read_plan
        from heteropp.frameworks.file import ExportError

        content = read_plan(plan)
        allow_code(content.model, trust_remote_code)
        try:
            written = _written(content, to)
        except ExportError as error:
            raise InputError(f"{plan}: {error}") from None
        if output is None:
            print(written.text, end="")
            return
        write_text(output, written.text)
    console = output_console()
    if written.replacements:
        table = Table(title=f"what {to} cannot express", box=None, padding=(0, 2, 0, 0))
        table.add_column("in the plan")
        table.add_column("in its place")
        for one in written.replacements:
            table.add_row(one.what, one.by)
        console.print(table)
    console.print(f"written to {output}", soft_wrap=True)


def _written(plan: Plan, to: Framework) -> FrameworkFile:
    if to == Framework.MEGATRON:
        from heteropp.frameworks.megatron import to_megatron

        return to_megatron(plan)
    if to == Framework.FLAGSCALE:
        from heteropp.frameworks.flagscale import to_flagscale

        return to_flagscale(plan)
    from heteropp.frameworks.torchtitan import to_torchtitan

    return to_torchtitan(plan)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
