"""heteropp-board: shows runs in the browser, while they train or afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heteropp.cli.errors import one_sentence
from hyperhetero.cli import CommandLine, output_file

if TYPE_CHECKING:
    from heteropp.board.board import RunBoard

app = CommandLine()

EXAMPLES = """\b
Examples:
  heteropp-board runs/quickstart
  heteropp-board runs/one runs/two --port 8700
  heteropp-board runs/quickstart --output board.html
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def board(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folders that heteropp-train wrote, or writes; several are drawn over each other.",
        ),
    ],
    output: Annotated[
        Path | None,
        output_file(
            "--output", "-o",
            help="Write the page to this file, which opens without network, and serve nothing.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to serve; 0.0.0.0 lets everyone in the network read.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where to serve; 0: any free one.")
    ] = 8600,
) -> None:  # fmt: skip
    with one_sentence():
        from heteropp.board.board import RunBoard

        shown = RunBoard(runs)
        if output is not None:
            _write(shown, output)
            return
        from heteropp.board.server import BoardServer

        server = BoardServer(shown, host, port)
    with server:
        name = f"[{host}]" if ":" in host else host
        print(
            f"http://{name}:{server.server_port}/ shows {_names(runs)}; Ctrl-C ends it", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def _write(shown: RunBoard, output: Path) -> None:
    """Raises FileError."""
    from heteropp.board.page import render
    from heteropp.description.files import write_text

    write_text(output, render(shown.whole()))
    print(f"written to {output}")


def _names(runs: list[Path]) -> str:
    return ", ".join(map(str, runs))


def main() -> None:
    app()


if __name__ == "__main__":
    main()
