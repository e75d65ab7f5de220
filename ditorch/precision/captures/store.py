"""Writes one rank's folder of a capture, inside its budget and one finished step at a time."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ditorch.precision.captures import records
from ditorch.precision.captures.recording import Recording
from ditorch.precision.captures.records import CallRecord, Header, Line, Manifest, line_of
from ditorch.precision.captures.statistics import Statistics
from ditorch.precision.results import write_atomically

Existing = Literal["refuse", "resume", "overwrite"]

SMALLEST_BUDGET_BYTES = 64 << 10
_MANIFEST_BYTES = 8 << 10  # twice: the finished one and the one being written
_TENSORS_SHARE = 0.75  # of the budget, so that statistics go on when tensors have filled theirs
_ENTRY_BYTES = 256  # at most, of a tensor in the header of a safetensors file
_COMMON_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class Store:
    """One rank's folder. A step is collected in memory and written by `finish_step`."""

    def __init__(self, output: Path, manifest: Manifest, existing: Existing) -> None:
        """Raises ValueError: the folder cannot be used; one sentence."""
        self.folder = records.rank_folder(output, manifest.rank)
        self.manifest = manifest
        self._kept: set[str] = set()  # digests of tensors on disk
        self._finished: set[int] = set()
        try:
            self._open(existing)
        except OSError as error:
            raise ValueError(f"{self.folder}: cannot be written: {error.strerror}") from None
        self._begin()

    @property
    def steps(self) -> int:
        """Finished steps on disk, and the one being collected."""
        return len(self._finished) + bool(self._calls)

    def has_step(self, step: int) -> bool:
        return step in self._finished

    def knows(self, digest: str) -> bool:
        """Whether the step being collected has this tensor's statistics."""
        return digest in self._statistics

    def add_statistics(self, statistics: Statistics) -> None:
        self._statistics[statistics.digest] = statistics

    def add_call(self, call: CallRecord) -> None:
        self._calls.append(call)

    def keep(self, digest: str, host: Tensor) -> None:
        """Stores the tensor itself, once for this rank, if the budget has room for it."""
        if digest in self._kept or digest in self._tensors:
            return
        size = host.nbytes + _ENTRY_BYTES
        if self.manifest.used_bytes + self._tensors_bytes + size > (
            _TENSORS_SHARE * self.manifest.budget_bytes
        ):
            self._left_out[digest] = host.nbytes
            return
        self._tensors[digest] = _storable(host)
        self._tensors_bytes += size

    def finish_step(self, step: int) -> None:
        """Writes what was collected as `step`, whole or, for lack of room, not at all."""
        if not self._calls:
            return
        if step == self.manifest.left_out.first_step_missing:
            self._count_missing_steps_anew()
        content = self._content(step)
        room = self.manifest.budget_bytes - self.manifest.used_bytes - self._tensors_bytes
        if len(content) > room:
            self._leave_out_step(step)
        else:
            if self._tensors:
                self._write_tensors(step)
            write_atomically(records.step_path(self.folder, step), content)
            self._count(records.step_path(self.folder, step))
            self._kept.update(self._tensors)
            self._finished.add(step)
            self._leave_out_tensors(step)
        self._begin()
        self._write_manifest()

    def _begin(self) -> None:
        self._calls: list[CallRecord] = []
        self._statistics: dict[str, Statistics] = {}
        self._tensors: dict[str, Tensor] = {}
        self._tensors_bytes = 0
        self._left_out: dict[str, int] = {}

    def _open(self, existing: Existing) -> None:
        if self.folder.exists():
            if existing == "refuse":
                raise ValueError(
                    f"{self.folder}: there is a capture already; choose another output, or "
                    'existing="overwrite" or "resume"'
                )
            if existing == "overwrite":
                shutil.rmtree(self.folder)
            elif (self.folder / "manifest.json").exists():
                self._go_on()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.manifest.used_bytes = 2 * _MANIFEST_BYTES
        self._take_up()
        self._write_manifest()

    def _go_on(self) -> None:
        """Keeps what the budget left out. Raises ValueError: other things were captured."""
        before = Recording(self.folder).manifest
        for name in ("tensors", "every", "every_steps", "selection"):
            old, new = getattr(before, name), getattr(self.manifest, name)
            if old != new:
                raise ValueError(
                    f"{self.folder}: {name} is {new!r} where the capture to resume has {old!r}, "
                    "expected the same"
                )
        self.manifest.left_out = before.left_out

    def _take_up(self) -> None:
        """Counts the finished steps that are there, and removes the remains of unfinished ones."""
        for path in sorted(self.folder.iterdir()):
            if path.suffix == ".jsonl" and not path.name.startswith("."):
                self._finished.add(int(path.stem.removeprefix("step")))
                self._count(path)
        for path in self.folder.iterdir():
            is_finished = not path.name.startswith(".") and (
                path.with_suffix(".jsonl").exists() or path.name == "manifest.json"
            )
            if not is_finished:
                path.unlink()
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt") as file:
                    self._kept.update(file.keys())
                self._count(path)

    def _content(self, step: int) -> bytes:
        lines = [line_of(Header(step, len(self._calls), len(self._statistics)))]
        lines += [line_of(Line(tensor=each)) for each in self._statistics.values()]
        lines += [line_of(Line(call=each)) for each in self._calls]
        return b"\n".join((*lines, b""))

    def _write_tensors(self, step: int) -> None:
        path = records.tensors_path(self.folder, step)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            save_file(self._tensors, unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._count(path)
        self._tensors_bytes = 0

    def _count(self, path: Path) -> None:
        self.manifest.used_bytes += path.stat().st_size

    def _leave_out_tensors(self, step: int) -> None:
        left_out = self.manifest.left_out
        if self._left_out and left_out.first_step_without_all_tensors is None:
            left_out.first_step_without_all_tensors = step
        left_out.tensors += len(self._left_out)
        left_out.tensor_bytes += sum(self._left_out.values())

    def _leave_out_step(self, step: int) -> None:
        left_out = self.manifest.left_out
        if left_out.first_step_missing is None:
            left_out.first_step_missing = step
        left_out.steps += 1

    def _count_missing_steps_anew(self) -> None:
        """A resumed run that reaches the first of them goes through them all once more."""
        self.manifest.left_out.steps = 0
        self.manifest.left_out.first_step_missing = None

    def _write_manifest(self) -> None:
        content = self.manifest.model_dump_json(indent=1).encode()
        write_atomically(self.folder / "manifest.json", content)


def _storable(host: Tensor) -> Tensor:
    """A copy safetensors can hold; readers go by the bytes, not by this dtype and shape."""
    if host.dtype not in _COMMON_DTYPES:
        host = host.reshape(-1).view(torch.uint8)
    return host.clone(memory_format=torch.contiguous_format)
