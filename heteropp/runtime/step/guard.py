"""Keeps a step that went wrong out of the parameters.

Every rank sees the same loss and gradient norm, and so they all decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.state.slices.scalars import Scalars

WINDOW = 64  # steps whose median is what is usual
FEWEST = 16  # steps before anything is unusual


class DivergedError(RuntimeError):
    """Too many steps in a row were skipped; the message is one sentence."""


class Guard:
    def __init__(self, hyperparameters: Hyperparameters) -> None:
        self.hyperparameters = hyperparameters
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.gradient_norms: deque[float] = deque(maxlen=WINDOW)
        self.skipped_in_a_row = 0
        self.warning: str | None = None  # of the newest step that it judged

    def judging(self, targets: int) -> Callable[[float, float], bool]:
        """Returns what judges a step that learns so many targets; one without any is skipped."""
        return self.accepts if targets else self._skips

    def _skips(self, loss: float, gradient_norm: float) -> bool:
        self.warning = "none of the step's tokens is to be learnt: skipped"
        return False

    def accepts(self, loss: float, gradient_norm: float) -> bool:
        """Whether a step may change the parameters; called once a step, before the update.

        Raises DivergedError.
        """
        unusual = _not_finite(loss, gradient_norm)
        skipped = unusual is not None
        if unusual is None:
            unusual = self._spike(loss, gradient_norm)
            skipped = unusual is not None and self.hyperparameters.skip_spikes
        if skipped:
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
            self.losses.append(loss)
            self.gradient_norms.append(gradient_norm)
        self.warning = unusual and unusual + (": skipped" if skipped else "")
        most = self.hyperparameters.most_skipped
        if self.skipped_in_a_row >= most:
            raise DivergedError(f"{most} steps in a row went wrong; in the last {unusual}")
        return not skipped

    def take_warning(self) -> str | None:
        """Returns the newest step's warning, if there is one, and forgets it."""
        warning, self.warning = self.warning, None
        return warning

    def _spike(self, loss: float, gradient_norm: float) -> str | None:
        factor = self.hyperparameters.spike_factor
        if not factor or len(self.losses) < FEWEST:
            return None
        for what, value, usual in (
            ("loss", loss, self.losses),
            ("gradient norm", gradient_norm, self.gradient_norms),
        ):
            if value > factor * (median := statistics.median(usual)) > 0:
                return (
                    f"the {what} is {value:.4g}, {value / median:.1f} times the median {median:.4g}"
                )
        return None

    def restore(self, scalars: Scalars) -> None:
        self.losses.extend(scalars.losses)
        self.gradient_norms.extend(scalars.gradient_norms)
        self.skipped_in_a_row = scalars.skipped_in_a_row


def _not_finite(loss: float, gradient_norm: float) -> str | None:
    for what, value in (("loss", loss), ("gradient norm", gradient_norm)):
        if not math.isfinite(value):
            return f"the {what} is {value}"
    return None
