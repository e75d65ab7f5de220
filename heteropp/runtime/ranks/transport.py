"""Where a rank stands, and how ranks reach each other: process groups of torch.distributed.

On chips the backend is dicomm and the device ditorch's; on the host alone it is gloo and the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from heteropp.description.plan import Pipeline, Plan, Stage, ministage_layers
from heteropp.description.sections import Section, expert_group, sections_of
from heteropp.models.parallel.context_parallel import ContextParallelGroup, ContextProcessGroup
from heteropp.models.parallel.expert_parallel import ExpertParallelGroup, ExpertProcessGroup
from heteropp.models.parallel.tensor_parallel import ProcessGroup, SoloGroup, TensorParallelGroup
from heteropp.schedule.stage_actions import Part, links

# of a rank and a plan without context parallelism: the world, its replica, those over which experts
# lie, and those that hold the same slices of these and of all else
MOST_GROUPS = 5
P2P = Literal["device-direct", "cpu-mediated"]  # dicomm's strategies (H2, section 3.2)


class AdjacentMinistage(NamedTuple):
    """The ministage before or after one of ours."""

    stage: Stage
    ministage: int  # in the stage's own order
    link: int  # the pipeline's number for the two of them


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in a plan."""

    rank: int
    pipeline_index: int
    stage_index: int
    replica_index: int
    tp_index: int
    cp_index: int
    pipeline: Pipeline
    links: tuple[tuple[Part, Part], ...]  # of the pipeline
    layers: tuple[tuple[int, int], ...]  # [first, last) by ministage

    @staticmethod
    def of(plan: Plan, rank: int) -> Coordinates:
        p, stage, replica, tp_index = plan.place(rank)
        pipeline = plan.pipelines[p]
        return Coordinates(
            rank,
            p,
            stage,
            replica,
            tp_index,
            plan.cp_index(rank),
            pipeline,
            tuple(links(plan.schedule, pipeline)),
            tuple(ministage_layers(pipeline, plan.schedule)[stage]),
        )

    @property
    def stage(self) -> Stage:
        return self.pipeline.stages[self.stage_index]

    @property
    def sections(self) -> list[Section]:
        """The sections of the stage's parameters that the rank holds."""
        return sections_of(self.stage, self.tp_index, self.rank)

    def before(self, ministage: int) -> AdjacentMinistage | None:
        """Returns the neighbour that a ministage receives its activations from, if any.

        It may be a ministage of its own stage, which hands over in place.
        """
        own = self.stage_index, ministage
        return next((self._at(a, i) for i, (a, b) in enumerate(self.links) if b == own), None)

    def after(self, ministage: int) -> AdjacentMinistage | None:
        """Returns the neighbour that a ministage sends its activations to, if any.

        It may be a ministage of its own stage, to which it hands over in place.
        """
        own = self.stage_index, ministage
        return next((self._at(b, i) for i, (a, b) in enumerate(self.links) if a == own), None)

    def _at(self, part: Part, link: int) -> AdjacentMinistage:
        stage, ministage = part
        return AdjacentMinistage(self.pipeline.stages[stage], ministage, link)


class Groups:
    """The process groups a rank belongs to. Every rank of the plan must build them."""

    def __init__(self, place: Coordinates) -> None:
        replica = place.stage.replicas[place.replica_index]
        ranks = replica.group(place.cp_index)
        self.tensor_parallel: TensorParallelGroup = (
            SoloGroup()
            if len(ranks) == 1
            else ProcessGroup(_new_group(ranks), place.stage.sequence_parallel)
        )
        self.context_parallel: ContextParallelGroup | None = None
        if replica.token_ranges is not None:
            own = replica.across(place.tp_index)
            self.context_parallel = ContextProcessGroup(_new_group(own), replica.token_ranges)
        self.expert_parallel: ExpertParallelGroup | None = None
        if place.stage.ep > 1:
            parts = expert_group(place.stage, place.tp_index, place.rank)
            group = _new_group(tuple(parts))
            self.expert_parallel = ExpertProcessGroup(group, parts, place.stage.expert_capacity)
        # by section: the ranks that hold the same slices; None: no other rank does
        peers = (section.peers[place.tp_index] for section in place.sections)
        self.data_parallel = [None if len(each) == 1 else _new_group(each) for each in peers]

    def make_up(self, rank: int) -> None:
        """Makes groups of this rank alone until it has made as many as any rank may have.

        torch names a group by its ranks and by the number of groups that the rank has made before,
        so that all ranks must have made as many before they make those of another plan.
        """
        for _ in range(MOST_GROUPS - len(self.every())):
            _new_group((rank,))

    def every(self) -> list[dist.ProcessGroup]:
        """Returns all groups of this rank, the world's first."""
        world = dist.group.WORLD
        assert world is not None
        groups = [world]
        if isinstance(self.tensor_parallel, ProcessGroup):
            groups.append(self.tensor_parallel.group)
        if isinstance(self.context_parallel, ContextProcessGroup):
            groups.append(self.context_parallel.group)
        if isinstance(self.expert_parallel, ExpertProcessGroup):
            groups.append(self.expert_parallel.group)
        return groups + [group for group in self.data_parallel if group is not None]


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True)


def connect(
    store: dist.Store,
    rank: int,
    world_size: int,
    backend: str,
    timeout_s: float = 300,
    p2p: P2P | None = None,
) -> None:
    """Joins the job's world group; raises what torch.distributed raises when a peer is missing.

    p2p: how dicomm carries what goes from stage to stage; None: as the environment says.
    """
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("heteropp", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        pg_options=_options(p2p) if p2p else None,
    )


def _options(p2p: P2P) -> Any:
    from dicomm.distributed import Options  # only where chips are

    return Options(strategy=p2p)
