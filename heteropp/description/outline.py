"""A plan in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heteropp.description.plan import Plan, Stage


def outline(plan: Plan) -> str:
    """A plan in a line; stages that are alike together."""
    pipelines = []
    for pipeline in plan.pipelines:
        alike: list[tuple[str, int]] = []
        for stage in pipeline.stages:
            words = f"{together(stage.chips)} {layers_of(stage)} layers dp {stage.dp} tp {stage.tp}"
            words += f" cp {parts_of(stage)}" if stage.cp > 1 else ""
            words += f" ep {experts_of(stage)}" if stage.ep > 1 else ""
            words += " with sequence parallelism" if stage.sequence_parallel else ""
            words += " recompute" if stage.recompute else ""
            words += " recompute of attention" if stage.selective_recompute else ""
            if alike and alike[-1][0] == words:
                alike[-1] = (words, alike[-1][1] + 1)
            else:
                alike.append((words, 1))
        words = ", ".join(f"{n} x {w}" if n > 1 else w for w, n in alike)
        if pipeline.token_slices:
            words += f" in slices of {' + '.join(map(str, pipeline.token_slices))} tokens"
        pipelines.append(words)
    distinct = list(dict.fromkeys(pipelines))
    return " | ".join(
        f"{pipelines.count(p)} pipelines of {p}" if pipelines.count(p) > 1 else p for p in distinct
    )


def parts_of(stage: Stage) -> str:
    """Returns a stage's context-parallel degree, and the tokens of each part in every replica."""
    shares = dict.fromkeys(replica.token_shares or () for replica in stage.replicas)
    return f"{stage.cp} of {' | '.join(' + '.join(map(str, each)) for each in shares)} tokens"


def experts_of(stage: Stage) -> str:
    """Returns a stage's expert-parallel degree, and how many experts each rank has in turn."""
    return f"{stage.ep} of {' + '.join(map(str, stage.expert_shares or ()))} experts"


def layers_of(stage: Stage) -> str:
    """Returns a stage's number of layers, with "o" where its activations wait in host memory and
    with its number of ministages if it has several.
    """
    count = f"{stage.layer_count}{' o' if stage.offload else ''}"
    return f"{count} in {stage.ministages}" if stage.ministages > 1 else count


def together(names: Iterable[str]) -> str:
    """Joins names with " + ", each of them once."""
    return " + ".join(dict.fromkeys(names))
