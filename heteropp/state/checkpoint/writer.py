"""Writes checkpoints while the training goes on: from a copy in host memory, in a thread.

Each rank writes its own files into a hidden folder that all ranks reach. When rank 0 knows of all
of them it writes the manifest, and the folder gets its name; a crash at any moment leaves the
checkpoints before it as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter
from safetensors.torch import save
from torch import Tensor

from heteropp.description.files import FileError, flush, write_json
from heteropp.process_groups.control import Control
from heteropp.state.checkpoint.manifest import (
    MANIFEST,
    CheckpointFile,
    Manifest,
    ParameterSlice,
    steps,
)
from heteropp.state.checkpoint.reader import Quantity, key

Tensors = Mapping[Quantity, Tensor]  # of one slice


def block_of(name: str) -> str:
    """Returns the block of the model that a parameter belongs to: "layers.3", "embedding"."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first


class Writer:
    """Writes one rank's part of checkpoints, in a thread and one checkpoint at a time."""

    def __init__(
        self, folder: Path, control: Control, keep: int, on_error: Callable[[str], None]
    ) -> None:
        """`control`: a connection for the thread alone; on_error is called in the thread."""
        self.folder, self.control, self.keep, self.on_error = folder, control, keep, on_error
        self.thread: threading.Thread | None = None

    def save(self, manifest: Manifest, slices: Iterable[tuple[ParameterSlice, Tensors]]) -> None:
        """Copies this rank's slices and leaves the rest to the thread; every rank must call it.

        Waits until the checkpoint before this one is written. The newest `keep` are kept.
        """
        self.finish()
        blocks: dict[str, dict[ParameterSlice, Tensors]] = defaultdict(dict)
        for piece, tensors in slices:
            copies = {
                what: tensor.detach().to("cpu", copy=True) for what, tensor in tensors.items()
            }
            blocks[block_of(piece.name)][piece] = copies
        self.thread = threading.Thread(
            target=self._write, args=(manifest, blocks), name="checkpoint", daemon=True
        )
        self.thread.start()

    def finish(self) -> None:
        """Waits until the newest checkpoint is complete, however long the slowest rank takes."""
        if self.thread:
            self.thread.join()

    def _write(self, manifest: Manifest, blocks: dict[str, dict[ParameterSlice, Tensors]]) -> None:
        partial = partial_folder(self.folder, manifest.step)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            files = [self._write_block(partial, *block) for block in blocks.items()]
            written, complete = f"{partial.name}/written", f"{partial.name}/complete"
            self.control.publish(written, json.dumps([asdict(file) for file in files]))
            if self.control.rank == 0:
                texts = self.control.collect(written)
                every = [file for text in texts for file in _files.validate_json(text)]
                self._complete(partial, replace(manifest, files=tuple(every)))
                self.control.forget(written)
                self.control.announce(complete, "")
            else:
                self.control.hear(complete)
        except OSError as error:
            self.on_error(f"{error.filename or partial} cannot be written: {error.strerror}")
        except FileError as error:
            self.on_error(str(error))
        except Exception as error:  # nobody waits for the thread before the next checkpoint
            self.on_error(f"{partial} was not finished: {type(error).__name__}: {error}")

    def _write_block(
        self, partial: Path, block: str, slices: dict[ParameterSlice, Tensors]
    ) -> CheckpointFile:
        path = partial / f"{block}.rank-{self.control.rank:05d}.safetensors"
        content = save(
            {
                key(what, piece): tensor
                for piece, tensors in slices.items()
                for what, tensor in tensors.items()
            }
        )
        try:
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None  # write() names none
        digest = hashlib.sha256(content).hexdigest()
        return CheckpointFile(path.name, len(content), digest, self.control.rank, tuple(slices))

    def _complete(self, partial: Path, manifest: Manifest) -> None:
        write_json(partial / MANIFEST, manifest)
        flush(partial)
        path = self.folder / f"step-{manifest.step:06d}"
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        flush(self.folder)
        for _, old in steps(self.folder)[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)


_files = TypeAdapter(list[CheckpointFile])


def partial_folder(folder: Path, step: int) -> Path:
    return folder / f".step-{step:06d}.partial"


def remove_partial(folder: Path) -> None:
    """Removes what earlier runs did not finish."""
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path, after: int) -> None:
    """Renames the checkpoints after a step, for a run that resumes there and trains on anew."""
    for step, path in steps(folder):
        if step > after:
            aside = path.with_name(f"{path.name}.aside")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
