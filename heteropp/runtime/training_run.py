"""What a run trains, and where to: the settings that all of its ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from heteropp.data.sequences import AttentionWithin
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.runtime.measuring.trackers.tracking import Tracking
from heteropp.runtime.ranks.transport import P2P


@dataclass(frozen=True)
class RankChip:
    """The chip a rank runs on."""

    file: str  # a chip file's name or path
    chip_type: str


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What to train, and where to."""

    plan: Plan
    cluster: Path | None  # None only without chips
    chips: tuple[RankChip, ...]  # by rank
    steps: int  # in all, those before a resume included
    output: Path
    data: Path | None  # None: the Python standard library's sources
    validation: Mapping[str, Path] = field(default_factory=dict)  # other tokens, or text, by name
    validate_every: int = 0  # steps; 0: only at the end
    attention_within: AttentionWithin = "sequence"  # but of mixed lengths, where it is a document
    weights: Path | None  # a Hugging Face folder to start from; None: initial values of the seed
    trust_remote_code: bool = False  # its ranks may run code that came with the model
    resume: bool
    resume_from: int | None  # step; None: the newest checkpoint
    checkpoint_every: int  # steps; 0: only at the end
    keep: int  # checkpoints
    deadline_s: float  # of every wait for another rank
    seed: int
    hyperparameters: Hyperparameters
    device: Literal["chip", "cpu"]
    p2p: P2P | None = None  # None: as DICOMM_STRATEGY says
    tracking: Tracking = Tracking()  # noqa: RUF009  # which is frozen
    by_length: tuple[Plan, ...] = ()  # of a run of mixed lengths; `plan` is the first
    documents: int = 0  # of a step of such a run

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the ranks in messages, such as "rank 3 (chip B)"."""
        return tuple(f"rank {i} (chip {chip.chip_type})" for i, chip in enumerate(self.chips))

    def validates(self, step: int) -> bool:
        """Whether the validation loss is wanted after this many steps."""
        if not self.validation:
            return False
        return step == self.steps or bool(self.validate_every and step % self.validate_every == 0)

    def allow_code(self) -> None:
        """Lets this process, a rank, run code that came with the model, if the run may.

        Raises ModelError where it may not, or the code has changed since it was planned.
        """
        for plan in self.by_length or (self.plan,):
            plan.model.allow_code(self.trust_remote_code)

    @property
    def within_documents(self) -> bool:
        """Whether attention is within a document of those that a sequence may have."""
        return bool(self.by_length) or self.attention_within == "document"

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.output / "logs"
