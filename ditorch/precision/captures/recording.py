"""Reads a capture. A step whose file is not finished is as if it had never been."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ditorch.precision.captures import records
from ditorch.precision.captures.arguments import dtype_called
from ditorch.precision.captures.records import CallRecord, Manifest, TensorUse
from ditorch.precision.captures.statistics import Statistics, digest_of
from hyperhetero.input import problems

_T = TypeVar("_T")
_MANIFEST = TypeAdapter(Manifest)


@dataclass(frozen=True)
class RecordedStep:
    """A step's calls in the order they ran, and its tensors' statistics by digest."""

    step: int
    calls: list[CallRecord]
    statistics: dict[str, Statistics]


class Recording:
    """One rank's part of a capture."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError: the folder holds no capture this version can read; one sentence."""
        self.folder = folder
        self._opened: dict[Path, Any] = {}
        self.manifest = _parse(_MANIFEST, folder / "manifest.json", _read(folder / "manifest.json"))
        files = folder.glob("step*.jsonl")
        self.steps = sorted(
            int(found[1]) for path in files if (found := re.fullmatch(r"step(\d+)", path.stem))
        )

    def step(self, step: int) -> RecordedStep:
        """Raises ValueError: the step's file is damaged; one sentence."""
        path = records.step_path(self.folder, step)
        first, *rest = _read(path).splitlines() or [b""]
        header = _parse(records.HEADER, path, first)
        lines = [_parse(records.LINE, path, line, number) for number, line in enumerate(rest, 2)]
        calls = [line.call for line in lines if line.call is not None]
        statistics = {each.tensor.digest: each.tensor for each in lines if each.tensor is not None}
        if (header.step, header.calls, header.tensors) != (step, len(calls), len(statistics)):
            raise ValueError(
                f"{path}: has {len(calls)} calls and {len(statistics)} tensors, but was written "
                f"with {header.calls} and {header.tensors}: the file is damaged"
            )
        return RecordedStep(step, calls, statistics)

    def tensor(self, use: TensorUse) -> Tensor | None:
        """The tensor in host memory, laid out as it was captured; None if it was not kept.

        Raises:
            ValueError: the file that holds it is damaged; one sentence.
        """
        path = self._files.get(use.digest)
        if path is None:
            return None
        # safetensors gives every caller the same memory, which calls run again may write.
        stored = self._file(path).get_tensor(use.digest).clone()
        dtype = dtype_called(use.dtype)
        tensor = stored.reshape(-1).view(torch.uint8).view(dtype)
        if digest_of(tensor) != use.digest:
            raise ValueError(f"{path}: tensor {use.digest} is not what was captured")
        return _laid_out(tensor.reshape(use.shape), use.strides)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Where each kept tensor is."""
        paths = [records.tensors_path(self.folder, step) for step in self.steps]
        there = [path for path in paths if path.exists()]
        return {digest: path for path in there for digest in self._file(path).keys()}  # noqa: SIM118

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = safe_open(path, "pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: cannot be read: {error}") from None
        return self._opened[path]


def open_capture(output: Path) -> dict[int, Recording]:
    """Every rank's recording, of the folder that `Capture` was given as `output`.

    Raises:
        ValueError: there is no capture there that this version can read; one sentence.
    """
    folders = sorted(output.glob("rank[0-9]*")) if output.is_dir() else []
    found = [Recording(folder) for folder in folders if folder.is_dir()]
    if not found:
        raise ValueError(f"{output}: there is no capture here, expected folders rank00000 ...")
    worlds = {each.manifest.world_size for each in found}
    if len(worlds) > 1:
        raise ValueError(f"{output}: its ranks are of different runs, of {sorted(worlds)} ranks")
    return {each.manifest.rank: each for each in found}


def _laid_out(tensor: Tensor, strides: list[int] | None) -> Tensor:
    """Returns the tensor with the strides that it was recorded with.

    It returns the tensor as it is if no strides are known, or if its elements overlapped (an
    expanded tensor), because one cannot write to each of those by itself.
    """
    if strides is None or any(s == 0 and n > 1 for s, n in zip(strides, tensor.shape, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(form: TypeAdapter[_T], path: Path, content: bytes, line: int = 1) -> _T:
    try:
        return form.validate_json(content)
    except ValidationError as error:
        first: Any = error.errors()[0]
        if first["loc"] == ("version",):
            raise ValueError(
                f"{path}: is of version {first['input']} of the format, expected {records.VERSION}"
            ) from None
        raise ValueError(f"{path}: line {line}: {problems(error)}") from None
