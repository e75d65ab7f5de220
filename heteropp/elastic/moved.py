"""What a change of plans moves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from heteropp.boxes import Box
from heteropp.layout import layout
from heteropp.plan import Plan, ministage_layers

Held = dict[tuple[str, bool], list[Box]]  # by parameter, and whether of the optimizer's state


def moved_bytes(old: Plan, new: Plan, old_rank_of: Sequence[int | None]) -> int:
    """Bytes of parameters and optimizer state that the new plan's ranks do not have yet.

    old_rank_of: by new rank, its chip's rank in the old plan; None: it had none.
    """
    model = new.model
    wide = {"float64": 8}.get(model.wide_dtype, 4)
    kept = 3 if model.wide_dtype != model.dtype else 2  # of each element: averages, wide value
    sizes = {False: model.dtype_bytes, True: kept * wide}
    total = 0
    for rank, was in enumerate(old_rank_of):
        had = _held(old, was) if was is not None else {}
        for (name, optimizer), boxes in _held(new, rank).items():
            for box in boxes:
                common = (box.intersect(other) for other in had.get((name, optimizer), ()))
                lacking = _size(box) - sum(_size(part) for part in common if part)
                total += sizes[optimizer] * max(0, lacking)
    return total


def _held(plan: Plan, rank: int) -> Held:
    p, s, r, tp_index = plan.place(rank)
    stage = plan.pipelines[p].stages[s]
    shards = stage.dp if plan.zero_stage else 1
    found: Held = defaultdict(list)
    for layers in ministage_layers(plan.pipelines[p], plan.schedule)[s]:
        whole = layout(plan.model, layers, stage.tp, tp_index, shards)
        for entry in whole.entries:
            found[entry.global_name, False].append(entry.box)
        for piece in whole.pieces(r % shards):
            found[piece.name, True].append(piece.box)
    return found


def _size(box: Box) -> int:
    return math.prod(box.shape)
