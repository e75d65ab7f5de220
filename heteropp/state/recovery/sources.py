"""Which snapshots of the state there are, and which step they still make up."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from heteropp.description.hyperparameters import OptimizerName
from heteropp.layout.boxes import Box, uncovered
from heteropp.models.spec import ModelSpec
from heteropp.state.recovery.manifest import RankManifest, SnapshotStep, SnapshotTensor, TierKind
from heteropp.state.slices.parameter_slice import block_of
from heteropp.state.slices.quantities import StoredName, stored_of

Key = tuple[StoredName, str]  # of what, and the parameter's name
NEARNESS: dict[TierKind, int] = {"memory": 0, "disk": 1, "remote": 2}


class LostError(ValueError):
    """No step can be recovered: one sentence says what has no snapshot left, and since when.

    nodes: whoever held some of what is missing; one that is not here may have it still.
    """

    def __init__(self, what: str, nodes: Iterable[str] = ()) -> None:
        super().__init__(what)
        self.nodes = tuple(sorted(nodes))


@dataclass(frozen=True)
class RankSnapshot:
    """What a rank once kept, and where it is now."""

    tier: TierKind
    node: str  # "" for the remote store
    manifest: RankManifest


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that can be read."""

    tier: TierKind
    node: str
    step: SnapshotStep
    file: str
    part: SnapshotTensor

    @property
    def key(self) -> Key:
        return self.part.quantity, self.part.name

    @property
    def bytes(self) -> int:
        return self.part.end - self.part.begin

    @property
    def where(self) -> str:
        """ "value of norm.weight in the memory of node a-0, step 12"."""
        place = f"the {self.tier} of node {self.node}" if self.node else "the remote store"
        return f"{self.part.quantity} of {self.part.name} in {place}, step {self.step.step}"


def choose(
    kept: Sequence[RankSnapshot],
    model: ModelSpec,
    damaged: Collection[StoredTensor] = (),
    reported: int | None = None,
) -> tuple[SnapshotStep, list[StoredTensor]]:
    """Returns the newest step that has a copy of every element, and its copies.

    reported: the newest step in the run's metrics. A later one is taken only where no step up to it
    is whole, and then the earliest, which leaves the smallest gap. Raises LostError where no step
    is whole.
    """
    copies: dict[SnapshotStep, list[StoredTensor]] = defaultdict(list)
    optimizer: OptimizerName = "adamw"
    for one in kept:
        optimizer = one.manifest.run.hyperparameters.optimizer  # the same of all of a job
        copies[one.manifest.step].extend(each for each in _copies(one) if each not in damaged)
    missing: dict[SnapshotStep, list[str]] = {}
    steps = sorted({one.manifest.step for one in kept}, reverse=True)
    known = [step for step in steps if reported is None or step.step <= reported]
    for step in known + steps[: len(steps) - len(known)][::-1]:
        missing[step] = missing_blocks(copies[step], model, optimizer)
        if not missing[step]:
            return step, copies[step]
    raise LostError(_sentence(missing, kept), _once_held(missing, kept))


def _copies(kept: RankSnapshot) -> Iterable[StoredTensor]:
    step = kept.manifest.step
    for file in kept.manifest.files:
        for part in file.parts:
            yield StoredTensor(kept.tier, kept.node, step, file.name, part)


def missing_blocks(
    copies: Iterable[StoredTensor], model: ModelSpec, optimizer: OptimizerName
) -> list[str]:
    """Returns the blocks of the model, in its order, of which some element has no copy."""
    boxes: dict[Key, set[Box]] = defaultdict(set)
    for copy in copies:
        boxes[copy.key].add(copy.part.box)
    missing: dict[str, None] = {}
    for parameter in model.parameters():
        name = model.global_name(parameter.name)
        for quantity in stored_of(parameter, optimizer):
            if uncovered([Box.whole(parameter.shape)], sorted(boxes[quantity, name])):
                missing[block_of(name)] = None
    return list(missing)


def _sentence(missing: Mapping[SnapshotStep, list[str]], kept: Sequence[RankSnapshot]) -> str:
    """Returns a sentence that names the blocks that every step lacks.

    Where the steps have no missing block in common, it says what each of them lacks.
    """
    newest = max(missing)
    everywhere = [block for block in missing[newest] if all(block in m for m in missing.values())]
    if everywhere:
        verb = "has" if len(everywhere) == 1 else "have"
        return (
            f"{_listed(everywhere)} {verb} no snapshot left: the last were of step {newest.step}, "
            f"{_last_holders(everywhere, newest, kept)}"
        )
    gaps = (
        f"step {step.step} lacks {_listed(blocks)} (last {_last_holders(blocks, step, kept)})"
        for step, blocks in sorted(missing.items(), reverse=True)
    )
    return f"no step has a snapshot of every layer left: {'; '.join(gaps)}"


def _once_held(missing: Mapping[SnapshotStep, list[str]], kept: Sequence[RankSnapshot]) -> set[str]:
    """Returns the nodes that held some of what any step lacks."""
    return {
        node
        for one in kept
        for block in missing[one.manifest.step]
        for node in one.manifest.holders.get(block, ())
    }


def _last_holders(blocks: Sequence[str], step: SnapshotStep, kept: Sequence[RankSnapshot]) -> str:
    """Says on which nodes the blocks were: those that are gone or no longer hold them."""
    of_step = [one for one in kept if one.manifest.step == step]
    held = {node for one in of_step for b in blocks for node in one.manifest.holders.get(b, ())}
    here = {one.node for one in of_step if any(file.block in blocks for file in one.manifest.files)}
    names = sorted(held - here or held)
    return f"on node{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _listed(blocks: Sequence[str]) -> str:
    """Lists blocks in words, such as "layers.3 to layers.5, norm and head"."""
    runs: list[list[str]] = []
    for block in blocks:
        first, _, number = (runs[-1][-1] if runs else "").partition(".")
        if number and block == f"{first}.{int(number) + 1}":
            runs[-1].append(block)
        else:
            runs.append([block])
    names = list(
        itertools.chain.from_iterable(
            run if len(run) < 3 else [f"{run[0]} to {run[-1]}"] for run in runs
        )
    )
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last
