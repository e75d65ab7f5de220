"""Reads boxes of parameters from a checkpoint, whichever files they lie in."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.state.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    CheckpointFile,
    verify_file,
)
from heteropp.state.slices.block_files import key
from heteropp.state.slices.parameter_slice import ParameterSlice
from heteropp.state.slices.quantities import StoredName


class Reader:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self.held: dict[str, list[tuple[CheckpointFile, ParameterSlice]]] = defaultdict(list)
        for file in checkpoint.manifest.files:
            for piece in file.slices:
                self.held[piece.name].append((file, piece))
        self.open: dict[str, Any] = {}  # verified files

    def read(self, quantity: StoredName, name: str, box: Box) -> Tensor:
        """Returns a box of a parameter, on the host; verifies each file that it opens.

        Raises CheckpointError for a damaged file, and where no file holds the whole box.
        """
        whole: Tensor | None = None
        missing = torch.Size(box.shape).numel()
        for file, piece in self.held[name]:
            if (common := piece.box.intersect(box)) is None:
                continue
            try:
                held = self._file(file).get_slice(key(quantity, piece))
                part = held[common.within(piece.box)]
            except SafetensorError as error:
                raise CheckpointError(f"{self.path / file.name} cannot be read: {error}") from None
            if whole is None:
                whole = part.new_empty(box.shape)
            whole[common.within(box)] = part
            missing -= part.numel()
        if whole is None or missing:
            raise CheckpointError(f"{self.path} does not hold the whole of {name}")
        return whole

    def _file(self, file: CheckpointFile) -> Any:
        if file.name not in self.open:
            verify_file(self.path, file)
            self.open[file.name] = safe_open(self.path / file.name, framework="pt")
        return self.open[file.name]
