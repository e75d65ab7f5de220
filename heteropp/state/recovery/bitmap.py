"""The layer bitmap: which node holds which shard of a layer, in which tier, of which step.

Made from the manifests that are really there (AutoHet, section IV-C).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from heteropp.models.spec import ModelSpec
from heteropp.state.recovery.manifest import Shard, SnapshotStep
from heteropp.state.recovery.sources import NEARNESS, RankSnapshot
from heteropp.state.slices.parameter_slice import block_of

Place = tuple[str, str]  # tier, and node; the remote store's is ""


def bitmap(kept: Sequence[RankSnapshot]) -> dict[str, dict[SnapshotStep, dict[Place, set[Shard]]]]:
    """Returns the shards that each place holds, by block, step and place."""
    found: dict[str, dict[SnapshotStep, dict[Place, set[Shard]]]] = {}
    for one in sorted(kept, key=lambda one: (NEARNESS[one.tier], one.node, one.manifest.rank)):
        for file in one.manifest.files:
            steps = found.setdefault(file.block, {})
            places = steps.setdefault(one.manifest.step, defaultdict(set))
            places[one.tier, one.node].add(file.shard)
    return found


def lines(kept: Sequence[RankSnapshot], model: ModelSpec) -> list[str]:
    """Returns a line for each layer, in the model's order, with what each place holds of it.

    For example "layers.3  step 12: memory a-0 (0/2 1/2), disk a-0 (0/2); step 10: remote".
    """
    found = bitmap(kept)
    width = max(map(len, found), default=0)
    blocks = dict.fromkeys(block_of(parameter.name) for parameter in model.parameters())
    return [f"{block:<{width}}  {_steps(found[block])}" for block in blocks if block in found]


def _steps(steps: dict[SnapshotStep, dict[Place, set[Shard]]]) -> str:
    return "; ".join(
        f"step {step.step}: {', '.join(_place(*item) for item in steps[step].items())}"
        for step in sorted(steps, reverse=True)
    )


def _place(place: Place, shards: set[Shard]) -> str:
    name = " ".join(filter(None, place))
    if shards == {Shard()}:
        return name  # the whole layer
    return f"{name} ({' '.join(map(str, sorted(shards)))})"
