"""Losses: a training script's loss at each step, and how far two runs' losses are apart.

The loss is the one-element tensor that backward starts from. It is copied on the chip when backward
begins and read about once a second, so that a step waits for nothing.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ditorch.precision import place
from ditorch.precision.call import Call
from ditorch.precision.results import Findings, LossCurve, read_findings, write_findings
from ditorch.precision.select import Selection
from ditorch.precision.tool import Proceed, Tool, new_findings

BAR = 0.015
"""The mean relative error that a chip's losses have to stay below (H2, section 3.1.2)."""

PUBLISHED = {"a": 0.00391, "b": 0.00477, "c": 0.00584, "d": 0.01215}
"""The H2 paper's table 1: mean relative errors of its four chips, from a 20-billion model."""

_READ_EVERY_S = 1.0


class Losses(Tool):
    """Records the loss of each step, and writes the curve while the script runs.

    Where backward is called several times within a step (micro-batches), the step's loss is the
    mean of theirs. A loss that is scaled, by a GradScaler or by the number of micro-batches, is
    recorded scaled: relative errors are the same.

    Args:
        operators: Refused, as a loss has no operator.
        modules: Refused, as a loss has no module.
        stop_after: Ends the process, as `sys.exit(0)` does, after so many steps.
        output: The folder for the findings, a file for each rank; without it none are written.
    """

    rank_in_line: ClassVar[int] = 90
    sees_calls: ClassVar[bool] = False

    def __init__(
        self,
        *,
        output: Path | None = None,
        stop_after: int | None = None,
        **selection: Unpack[Selection],
    ) -> None:
        super().__init__(**selection)
        if self.select.operators or self.select.modules:
            raise ValueError("a loss has no operator and no module, expected steps and ranks only")
        if stop_after is not None and stop_after < 1:
            raise ValueError(f"stop_after is {stop_after}, expected at least 1 step")
        self.output = output
        self.stop_after = stop_after
        self._unread: list[tuple[int, Tensor]] = []
        self._values: dict[int, list[float]] = {}
        self._rank = self._step = 0
        self._read_at_s = time.monotonic()
        self._thread = threading.local()
        self._backward: Callable[..., None] = torch.autograd.backward

    def around(self, call: Call, proceed: Proceed) -> Any:
        return proceed(call)

    def opened(self) -> None:
        # Tensor.backward looks torch.autograd.backward up, so this sees both, in every thread.
        self._backward = torch.autograd.backward

        @wraps(self._backward)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if getattr(self._thread, "is_inside", False):  # other tools' modes call it once more
                return self._backward(tensors, *args, **kwargs)
            self._see(tensors)
            self._thread.is_inside = True
            try:
                return self._backward(tensors, *args, **kwargs)
            finally:
                self._thread.is_inside = False

        torch.autograd.backward = backward

    def closed(self) -> None:
        torch.autograd.backward = self._backward
        self._read()

    def losses(self) -> list[float]:
        """One for each step in which backward was called, in order."""
        for step, loss in self._unread:
            self._values.setdefault(step, []).append(loss.item())
        self._unread = []
        return [fmean(self._values[step]) for step in sorted(self._values)]

    def findings(self) -> Findings:
        losses = self.losses()
        summary = f"{len(losses)} losses, the last {losses[-1]:.6g}" if losses else "no losses"
        findings = new_findings("loss", summary=summary)
        if losses:
            findings.losses = [LossCurve(name=findings.chip, losses=losses)]
        findings.rank = self._rank  # the process group may be gone by now
        return findings

    def _see(self, tensors: Any) -> None:
        loss = _only(tensors)
        if loss is None or torch._C._current_autograd_node() is not None:
            return  # not where backward starts: a checkpoint's own, or a stage's of a pipeline
        before, self._step = self._step, place.step()
        self._rank = place.rank()
        if self._step > before and time.monotonic() - self._read_at_s >= _READ_EVERY_S:
            self._read()  # whole steps only
        if self.stop_after is not None and self._step >= self.stop_after:
            raise SystemExit(0)
        if self.select.matches(place.Place(self._rank, self._step, "forward", "", "", 0, "", "")):
            with _disable_current_modes(), torch.no_grad():
                self._unread.append((self._step, loss.detach().clone()))

    def _read(self) -> None:
        with _disable_current_modes():
            if self.output is not None:
                write_findings(self.findings(), self.output)
        self._read_at_s = time.monotonic()


def _only(tensors: Any) -> Tensor | None:
    if isinstance(tensors, (list, tuple)):
        tensors = tensors[0] if len(tensors) == 1 else None
    return tensors if isinstance(tensors, Tensor) and tensors.numel() == 1 else None


def mean_relative_error(reference: Sequence[float], chip: Sequence[float]) -> float:
    """The mean of |reference - chip| / |reference| over the steps (H2, equation 1).

    NaN or inf where the chip's losses are.

    Raises:
        ValueError: there are no losses, unequally many, or a reference's is zero or not finite.
    """
    return fmean(relative_errors(reference, chip))


def relative_errors(reference: Sequence[float], chip: Sequence[float]) -> list[float]:
    """|reference - chip| / |reference| of each step. Raises what `mean_relative_error` raises."""
    if len(reference) != len(chip):
        raise ValueError(
            f"the reference has {len(reference)} losses and the chip {len(chip)}, "
            "expected as many of one as of the other"
        )
    if not reference:
        raise ValueError("there are no losses to compare")
    for step, loss in enumerate(reference):
        if loss == 0 or not math.isfinite(loss):
            raise ValueError(
                f"the reference's loss of step {step} is {loss}, expected a finite one other than 0"
            )
    return [abs(y - y_chip) / abs(y) for y, y_chip in zip(reference, chip, strict=True)]


def read_losses(path: Path) -> list[float]:
    """The losses of a run: a findings file, a folder of them, or heteropp-train's metrics.jsonl.

    Where several ranks have losses, each step's is the mean over the ranks.

    Raises:
        ValueError: there are none; one sentence naming the file and what is wrong.
    """
    if path.suffix == ".jsonl":
        return _losses_of_metrics(path)
    files = sorted(path.glob("loss-rank*.json")) if path.is_dir() else [path]
    curves = [curve.losses for file in files for curve in read_findings(file).losses[:1]]
    if not curves:
        raise ValueError(f"{path}: no losses; was backward called on a loss there?")
    return [fmean(each) for each in zip(*curves, strict=False)]  # a rank may have been stopped


def _losses_of_metrics(path: Path) -> list[float]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    losses = []
    for number, line in enumerate(lines, start=1):
        try:
            losses.append(float(json.loads(line)["loss"]))
        except (ValueError, KeyError, TypeError):
            if number < len(lines):  # the last line may be torn
                raise ValueError(f"{path}: line {number} has no loss") from None
    if not losses:
        raise ValueError(f"{path}: no losses")
    return losses
