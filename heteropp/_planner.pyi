from collections.abc import Mapping, Sequence

Line = tuple[float, float]
Plane = tuple[float, float, float, float]

class Cost:
    def __init__(
        self,
        *,
        time_s: Sequence[Line],
        update_s: Sequence[Line],
        working: Sequence[tuple[Plane, Sequence[float]]],
        alone: Sequence[Line],
        measured_s: Sequence[tuple[float, float]],
    ) -> None: ...

class Choice:
    def __init__(
        self,
        *,
        chips: int,
        align: int,
        costs: Sequence[Sequence[Cost]],
        places: Sequence[int],
    ) -> None: ...

class Lane:
    def __init__(self, *, choices: Sequence[int], alike: bool) -> None: ...

class ChipType:
    def __init__(
        self,
        *,
        chips: int,
        capacity_bytes: float,
        choices: Sequence[Choice],
        lanes: Sequence[Lane],
    ) -> None: ...

class Problem:
    def __init__(
        self,
        *,
        layers: int,
        micro_batches: float,
        alpha: float,
        in_flight: Sequence[float],
        stages: int,
        types: Sequence[ChipType],
    ) -> None: ...

class Solution:
    @property
    def cost_s(self) -> float: ...
    @property
    def lower_bound_s(self) -> float: ...
    @property
    def steps(self) -> int: ...
    @property
    def stages(self) -> list[tuple[int, int, int]]: ...

def solve(problem: Problem, cutoff_s: float, width: int) -> Solution: ...

class MetisProfile:
    def __init__(
        self,
        *,
        seconds: Sequence[float],
        between_s: float,
        held_bytes: Sequence[float],
        divided_bytes: Sequence[float],
        capacity_bytes: float,
    ) -> None: ...

class MetisChipType:
    def __init__(
        self,
        *,
        intra_bytes_per_s: float,
        inter_bytes_per_s: float,
        collective_bytes_per_s: Sequence[float],
        update_s: float,
        profiles: Mapping[tuple[int, int], MetisProfile],
    ) -> None: ...

class MetisProblem:
    def __init__(
        self,
        *,
        layers: int,
        global_batch: int,
        largest_batch: int,
        types: Sequence[MetisChipType],
        nodes: Sequence[tuple[int, int]],
        orders: Sequence[Sequence[int]],
        micro_batches: Sequence[int],
        degrees: Sequence[int],
        parameter_bytes: Sequence[float],
        activation_bytes: float,
        batch_s: float,
        pooled: bool,
        busy_s: float,
    ) -> None: ...

class MetisSolution:
    @property
    def cost_s(self) -> float: ...
    @property
    def lower_bound_s(self) -> float: ...
    @property
    def order(self) -> int: ...
    @property
    def micro_batches(self) -> int: ...
    @property
    def stages(self) -> list[tuple[int, int, int]]: ...
    @property
    def steps(self) -> int: ...

def solve_metis(problem: MetisProblem, most_steps: int) -> MetisSolution: ...
def divide(
    power: Sequence[float],
    memory: Sequence[float],
    everything: Sequence[int],
    groups: int,
    micro_batches: int,
    least_power: float,
    least_memory: float,
) -> tuple[list[list[int]] | None, int]: ...

class Ops:
    def __init__(self, table: Sequence[tuple[int, int, int]]) -> None: ...

class Boxes:
    def __init__(
        self,
        *,
        outboxes: Sequence[Sequence[tuple[int, int, float, Sequence[tuple[int, float]]]]],
        messages: Sequence[int],
    ) -> None: ...

class Actor:
    def __init__(
        self,
        *,
        ops: Ops,
        seconds: Sequence[float],
        factors: Sequence[float],
        boxes: Boxes,
        begin_s: float,
    ) -> None: ...

class Played:
    starts: list[list[float]]
    ends: list[list[float]]
    message_s: list[float]
    next: list[int]
    blocked: dict[int, list[int]]

def play(actors: Sequence[Actor], slack: int | None, hold: bool) -> Played: ...

class WalkedBytes:
    @property
    def before(self) -> int: ...
    @property
    def during(self) -> list[int]: ...
    @property
    def after(self) -> list[int]: ...
    @property
    def most(self) -> tuple[int, int, int, int, int, int]: ...
    @property
    def host(self) -> int: ...

def walk_memory(
    table: Sequence[tuple[int, int, int]],
    *,
    ministages: Sequence[Sequence[Sequence[int]]],
    following: Sequence[int],
    ahead: Sequence[tuple[int, int, int]],
    fixed_bytes: int,
    gathers: int,
    dp: int,
    zero_stage: int,
    under_way: int,
    keeps: bool,
    offload: bool,
    in_place_update: bool,
    overlap: bool,
) -> WalkedBytes: ...
def most_waiting(
    tables: Sequence[Sequence[tuple[int, int, int]]],
    between: Sequence[tuple[int, int, int, int]],
) -> list[tuple[int, int, int, int]]: ...
