"""What a seed draws: a cluster, a job, how often copies are kept, and what befalls it.

A run is a function of its seed: whom an event befalls is drawn as a number too, and means a place
among those that live by then.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

from twins import CHIP

from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Schedule, ZeroStage
from heteropp.models.hugging_face.reading import read
from heteropp.models.llama.model import LlamaModel
from heteropp.models.spec import ModelSpec

Deed = Literal["kill", "kill node", "pause", "notice", "short notice", "withdraw", "add", "tear"]
Phase = Literal["step", "save", "change", "switch"]  # that a moment lies in

MICRO_BATCH, MICRO_BATCHES = 4, 4
LONGEST = 160  # steps
DEADLINE_S = 12
NOTICE_S = 20
EVERY_CHIPS = 5  # every how many seeds run on emulated chips; the others on the host
EVERY_EXPERTS = 4  # every how many seeds train a model with experts
FEWEST_LEFT = 2  # chips that no event goes below


@dataclass(frozen=True)
class Curve:
    """What is trained; its losses are those of every run of it, to rounding."""

    model: ModelSpec
    learning_rate: float
    tolerance: float  # relative


_TINY = LlamaModel(
    name="tiny",
    layers=5,
    hidden=32,
    heads=4,
    kv_heads=4,
    intermediate=64,
    vocab=256,
    sequence_length=64,
)
# Adam divides by the gradient's own size: where a gradient nearly cancels, its float32 noise comes
# out times the learning rate; in float64 the rate can be high, so that a wrong state shows at once
CURVES = (
    Curve(replace(_TINY, dtype="float64"), 3e-3, 1e-9),
    Curve(replace(_TINY, name="tiny-6", layers=6), 1e-4, 2e-6),
)


@cache
def of_experts() -> Curve:
    """Five layers of four experts, to two of which each token goes."""
    values = {
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": _TINY.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 64,
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = read(values, "tiny-experts", sequence_length=64, dtype="float64")
    return Curve(model, 3e-3, 1e-9)


@dataclass(frozen=True)
class Moment:
    """When a phase is first seen from outside after a step, and then so long after it."""

    phase: Phase
    step: int  # completed, at least; in a change or a switch it does not count
    delay_s: float


@dataclass(frozen=True)
class Event:
    deed: Deed
    moment: Moment
    pick: float  # in [0, 1): a place among those it may befall
    lasts_s: float | None = None  # of a pause, None: for ever; of a short notice


@dataclass(frozen=True)
class Scene:
    seed: int
    device: Literal["cpu", "chip"]
    nodes: tuple[tuple[str, int], ...]  # chip name and its chips, of each node
    absent: int  # chips of the last node that are not there to begin with
    curve: Curve
    steps: int
    zero_stage: ZeroStage
    schedule: Schedule
    keep_every: tuple[int, int, int]  # steps; memory, disk, remote
    events: tuple[Event, ...]

    def keeping(self, folder: Path) -> list[object]:
        """Options of the tiers; the remote store is in a folder's `remote`."""
        memory, disk, remote = self.keep_every
        options: list[object] = ["--keep-memory-every", memory, "--keep-disk-every", disk]
        if remote:
            options += ["--remote", folder / "remote", "--keep-remote-every", remote]
        return options


def draw(seed: int) -> Scene:
    random = Random(seed)
    device: Literal["cpu", "chip"] = "chip" if seed % EVERY_CHIPS == EVERY_CHIPS - 1 else "cpu"
    nodes = _nodes(random)
    steps = random.randint(24, 36) if device == "chip" else random.randint(110, LONGEST)
    remote = random.choice([0, 0, 4, 7])
    scene = Scene(
        seed=seed,
        device=device,
        nodes=nodes,
        absent=random.choice([0, 1, nodes[-1][1]]) if sum(n for _, n in nodes) > 6 else 0,
        curve=random.choice(CURVES),
        steps=steps,
        zero_stage=random.choice([0, 1]),
        schedule=random.choice(["1f1b", "1f1b", "gpipe", "zb-h1"]),
        keep_every=(random.choice([1, 1, 2, 3]), random.choice([0, 3, 5]), remote),
        events=tuple(_events(random, steps)),
    )
    has_experts = seed % EVERY_EXPERTS == EVERY_EXPERTS - 2
    return replace(scene, curve=of_experts()) if has_experts else scene


def _nodes(random: Random) -> tuple[tuple[str, int], ...]:
    """2 to 4 of them, 5 to 8 chips of one type or two."""
    while True:
        kinds = random.choice(["a", "ab"])
        nodes = [(random.choice(kinds), random.randint(1, 3)) for _ in range(random.randint(2, 4))]
        if 5 <= sum(chips for _, chips in nodes) <= 8:
            return tuple(nodes)


def _events(random: Random, steps: int) -> Iterator[Event]:
    count = random.choice([1, 2, 2, 3, 3, 4, 5])
    at = sorted(random.randint(1, steps // 3) for _ in range(count))
    may_pause = True  # for ever: it takes the deadline
    before: Deed | None = None
    for step in at:
        phase: Phase = random.choice(_phases(before))
        before = deed = random.choice(DEEDS)
        lasts_s = None
        if deed == "pause" and not (may_pause and random.random() < 0.5):
            lasts_s = random.uniform(0.3, 4)
        elif deed == "pause":
            may_pause = False
        elif deed == "short notice":
            lasts_s = random.uniform(0, 2)
        delay_s = random.uniform(0, DELAY_S[phase])
        yield Event(deed, Moment(phase, step, delay_s), random.random(), lasts_s)


def _phases(before: Deed | None) -> Sequence[Phase]:
    """Returns the phases that an event may come in, given the one before it.

    A phase that is to be drawn more often is repeated.
    """
    if before is None:
        return ("save", "save", "step")
    if before in ("notice", "withdraw", "add"):  # the job switches
        return ("change", "switch", "switch", "switch")
    return ("change", "change", "save", "step")


DELAY_S = {"step": 0.3, "save": 0.03, "change": 2.5, "switch": 0.3}
DEEDS: tuple[Deed, ...] = (
    *("kill", "kill", "kill", "kill node", "pause", "pause", "notice", "notice"),
    *("short notice", "withdraw", "withdraw", "add", "add", "tear"),
)


# ---------------------------------------------------------------- its files


def write_text(folder: Path) -> Path:
    """A folder of text to train on: letters, some more often than others."""
    folder.mkdir()
    letters = Random(0)
    for n in range(100):
        text = letters.choices(string.ascii_lowercase, range(26, 0, -1), k=200)
        (folder / f"{n:03}.txt").write_text("".join(text))
    return folder


def write_cluster(scene: Scene, folder: Path) -> Cluster:
    """cluster.toml and its chips; gives the cluster of all chips."""
    launch_s = 4e-4 if scene.device == "chip" else 0.0
    for name, flops, capacity_bytes in (("a", 1e12, 1 << 30), ("b", 5e11, 1 << 29)):
        chip = CHIP.format(
            vendor=name.upper(),
            launch_s=launch_s,
            efficiency=1.0,
            flops=flops,
            capacity_bytes=capacity_bytes,
            bandwidth_bytes_per_s=1e15,
            intra_node_bytes_per_s=1e15,
            latency_s=0.0,
            nic_bytes_per_s=1e15,
            nic_latency_s=0.0,
            host_bytes_per_s=1e15,
            neutral="true",
        )
        (folder / f"{name}.toml").write_text(chip)
    text = 'name = "chaos"\n'
    for name, chips in scene.nodes:
        text += f'[[nodes]]\nchip = "{name}.toml"\nchips = {chips}\n'
    (folder / "cluster.toml").write_text(text)
    return read_cluster(folder / "cluster.toml")


def first_chips(scene: Scene, cluster: Cluster) -> dict[str, int]:
    """Returns how many chips each node has when the job begins; the last node lacks the absent."""
    names = cluster.node_names
    chips = {name: len(node.ranks) for name, node in zip(names, cluster.nodes, strict=True)}
    last = names[-1]
    chips[last] = max(0, chips[last] - scene.absent)
    return chips
