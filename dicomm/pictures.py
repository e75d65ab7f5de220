"""Writes a picture; its format is the file's suffix."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from dicomm._dicomm import Error
from hyperhetero.output import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PictureError(Error):
    """A picture that cannot be written; the message is one sentence."""


def save(figure: Figure, path: Path, dpi: int) -> None:
    """The file appears whole or not at all. Raises PictureError."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, format=path.suffix.removeprefix("."))
    try:
        write_file(path, picture.getvalue())
    except OSError as error:
        raise PictureError(f"--plot {path} cannot be written: {error.strerror}") from None
