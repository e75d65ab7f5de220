"""Writes checkpoints while the training goes on: from a copy in host memory, in a thread.

Each rank writes its own files into a hidden folder that all ranks reach. When rank 0 knows of all
of them it writes the manifest, and the folder gets its name; a crash at any moment leaves the
checkpoints before it as they were.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from heteropp.description.files import FileError, flush, write_json
from heteropp.process_groups.control import Control
from heteropp.state.checkpoint.manifest import MANIFEST, CheckpointFile, Manifest, steps
from heteropp.state.slices.block_files import BlockFile, HeldSlice, block_files
from heteropp.state.slices.hashes import sha256


class Writer:
    """Writes one rank's part of checkpoints, in a thread and one checkpoint at a time."""

    def __init__(
        self, folder: Path, control: Control, keep: int, on_error: Callable[[str], None]
    ) -> None:
        """`control`: a connection for the thread alone; on_error is called in the thread."""
        self.folder, self.control, self.keep, self.on_error = folder, control, keep, on_error
        self.thread: threading.Thread | None = None

    def save(self, manifest: Manifest, held: Iterable[HeldSlice]) -> None:
        """Copies what this rank owns and leaves the rest to the thread; every rank must call it.

        Waits until the checkpoint before this one is written. The newest `keep` are kept.
        """
        self.finish()
        blocks = block_files(one.copy() for one in held if one.owned)
        self.thread = threading.Thread(
            target=self._write, args=(manifest, blocks), name="checkpoint", daemon=True
        )
        self.thread.start()

    def finish(self) -> None:
        """Waits until the newest checkpoint is complete, however long the slowest rank takes."""
        if self.thread:
            self.thread.join()

    def _write(self, manifest: Manifest, blocks: list[BlockFile]) -> None:
        partial = partial_folder(self.folder, manifest.step)
        try:
            partial.mkdir(parents=True, exist_ok=True)
            files = [self._write_block(partial, block) for block in blocks]
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

    def _write_block(self, partial: Path, block: BlockFile) -> CheckpointFile:
        path = partial / f"{block.block}.rank-{self.control.rank:05d}.safetensors"
        content = block.content()
        try:
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None  # write() names none
        rank, slices = self.control.rank, tuple(block.slices)
        return CheckpointFile(path.name, len(content), sha256(content), rank, slices)

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
