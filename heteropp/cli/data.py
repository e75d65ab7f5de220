"""heteropp-data: turns text, JSONL and Parquet files into a token file to train on.

Every line of a .jsonl file and every row of a .parquet file is a document, or with --chat a
conversation of which the answers are learnt; any other file is a document, or several with a
--separator. Files that end in .gz are unpacked. Folders are read with everything beneath them.
"""

from __future__ import annotations

import json as json_
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from heteropp.api.errors import InputError
from heteropp.cli.errors import one_sentence
from hyperhetero.cli import CommandLine, output_file
from hyperhetero.progress import Progress

app = CommandLine()

EXAMPLES = """\b
Examples:
  heteropp-data books/ -o books.tokens
  heteropp-data c4-*.jsonl.gz --tokenizer llama/tokenizer.json -o c4.tokens
  heteropp-data chats.jsonl --chat --tokenizer llama-chat/ -o chats.tokens
  heteropp-data book.txt --longest 65536 --hold-out 0.05 -o book.tokens
  heteropp-data wiki.parquet --field body --hold-out 0.01 -o wiki.tokens
  heteropp-train --data wiki.tokens --validation wiki.validation.tokens ...
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def data(
    sources: Annotated[list[Path], typer.Argument(help="Files, and folders of files.")],
    output: Annotated[Path, output_file("--output", "-o", help="The token file to write.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face tokenizer.json or its folder; bytes if absent."),
    ] = None,
    end: Annotated[
        str | None,
        typer.Option(
            help="The token that ends a document, '' for none; if absent the eos_token of the "
            "tokenizer_config.json beside the tokenizer, if any."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Read conversations, [{role, content}, ...], and render them with the chat "
            "template beside the --tokenizer; only the assistant's answers are learnt.",
        ),
    ] = False,
    field: Annotated[
        str | None,
        typer.Option(
            help="Where JSONL and Parquet have the text or conversation; if absent text, or "
            "messages with --chat."
        ),
    ] = None,
    separator: Annotated[
        str,
        typer.Option(
            help="What stands between the documents of a text file, such as '<|endoftext|>' or "
            "'\\n\\n'; if absent a file is one."
        ),
    ] = "",
    hold_out: Annotated[
        float,
        typer.Option(
            help="The share of documents that goes to OUTPUT.validation.tokens instead, chosen by "
            "a hash of their text."
        ),
    ] = 0,
    longest: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="Bytes: a longer document becomes several, which end behind a line or a word if "
            "they can. Not for --chat.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    from heteropp.data.conversations import Conversations
    from heteropp.data.convert import convert
    from heteropp.data.documents import find_files, read_documents, size_bytes
    from heteropp.data.split import split
    from heteropp.data.tokenizer import Bytes, HuggingFace, Tokenizer

    console = Console(stderr=True)
    with one_sentence():
        if not 0 <= hold_out < 1:
            raise InputError(f"--hold-out is {hold_out}; expected at least 0 and below 1")
        if end is not None and tokenizer is None:
            raise InputError("--end names a token of a --tokenizer, which is missing")
        if chat and tokenizer is None:
            raise InputError("--chat needs a --tokenizer, whose chat template it renders with")
        if chat and (end is not None or separator):
            raise InputError("--end and --separator are not for --chat: its template says both")
        if chat and longest is not None:
            raise InputError("--longest is not for --chat: no conversation is split")
        encoder: Tokenizer
        if chat and tokenizer:
            encoder = Conversations(tokenizer)
        else:
            encoder = HuggingFace(tokenizer, end) if tokenizer else Bytes()
        files = find_files(sources)
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
        ) as progress:
            task = progress.add_task("reading", total=size_bytes(files))
            between = separator.replace("\\n", "\n")
            documents = read_documents(
                files,
                field or ("messages" if chat else "text"),
                between,
                lambda n: progress.advance(task, n),
                conversations=chat,
            )
            if longest is not None:
                documents = split(documents, longest)
            written = convert(documents, output, encoder, hold_out)
    if json:
        rows = [asdict(each) for each in written]
        print(json_.dumps({"tokenizer": encoder.name, "files": rows}, indent=2))
        return
    for each in written:
        what = f"conversations, {each.targets:,} of them learnt" if chat else "documents"
        print(f"{each.path}: {each.tokens:,} tokens of {each.documents:,} {what}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
