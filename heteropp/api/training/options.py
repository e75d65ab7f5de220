"""Everything that a run can be asked for; heteropp-train --help says what each is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Le

from hyperhetero.input import LONGEST_WAIT_S

if TYPE_CHECKING:
    from heteropp.runtime.measuring.trackers.tracking import Tracking

OUTPUT = Path("runs/train")

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of heteropp-train; heteropp.train has the same, by the same names."""

    plan: Path | None = None
    bucket: list[Path] | None = None  # in place of a plan: one for each length of sequence
    documents: Positive | None = None  # of an optimizer step, with buckets
    cluster: Path | None = None
    profile: Path | None = None  # of its chips; None: their files say how fast they are
    steps: Positive = 60  # of the optimizer, in all
    data: Path | None = None  # None: the Python standard library's sources
    validation: list[str] | None = None  # [NAME=]FILE; heteropp.train also takes paths by name
    validate_every: Count = 0  # steps; 0: only at the end
    # document or sequence; None: a document for conversations, a sequence for other text
    attention_within: str | None = None
    weights: Path | None = None  # a Hugging Face folder to start from
    trust_remote_code: bool = False  # code that came with the model may run; said at every start
    output: Path = OUTPUT
    resume: bool = False
    resume_from: Positive | None = None  # a step
    checkpoint_every: Count = 0  # steps; 0: only at the end
    keep: Positive = 2  # checkpoints
    restarts: Count = 0
    deadline: Annotated[float, Ge(5), Le(LONGEST_WAIT_S)] = (
        300.0  # seconds that a rank waits for another
    )
    elastic: bool = False
    availability: str | None = None
    node_name: str | None = None
    notice: Annotated[float, Ge(1), Le(LONGEST_WAIT_S)] = 30.0  # seconds
    disk: Path | None = None
    remote: str | None = None
    keep_memory_every: Positive = 1  # steps
    keep_disk_every: Count = 10
    keep_remote_every: Positive = 50
    optimizer: str | None = None  # adamw or muon; None: as the plan says
    learning_rate: float | None = None
    learning_rate_schedule: str | None = None  # cosine, linear, constant or wsd
    warmup_steps: int | None = None
    decay_steps: int | None = None
    cooldown_steps: int | None = None
    minimum_ratio: float | None = None
    gradient_clip: float | None = None
    weight_decay: float | None = None
    expert_bias_update_rate: float | None = None
    group: list[str] | None = None  # such as "embedding*:learning_rate=0.1x"
    most_skipped: int | None = None
    spike_factor: float | None = None
    skip_spikes: bool | None = None
    seed: Count = 0
    device: str = "chip"  # or cpu
    p2p: str | None = None  # device-direct or cpu-mediated
    force: bool = False  # skips the memory check
    track: list[str] | None = None  # services for the figures: tensorboard, wandb, mlflow
    metrics_port: int | None = None  # of an endpoint for Prometheus; 0: any that is free
    metrics_host: str = "127.0.0.1"
    json: bool = False  # prints the summary as JSON

    def tracking(self) -> Tracking:
        """Returns what is to follow the run; a text may name several services."""
        # --help has no use for it
        from heteropp.runtime.measuring.trackers.tracking import Tracking

        named = [name.strip() for text in self.track or [] for name in text.split(",")]
        names = tuple(dict.fromkeys(name for name in named if name))
        return Tracking(names, self.metrics_port, self.metrics_host)
