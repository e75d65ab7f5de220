"""The option that lets code in a Hugging Face folder run, the same for every command."""

from __future__ import annotations

from typing import Annotated

import typer

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the Python code in the model's Hugging Face folder, of a family that "
        "transformers lacks.",
    ),
]
