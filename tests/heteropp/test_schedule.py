"""The action tables: whole, in step with their neighbours, and holding what in_flight says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from clusters import tiny_model

from heteropp.description.plan import (
    Pipeline,
    Plan,
    PlanError,
    Replica,
    Schedule,
    Stage,
    ministage_layers,
    validate,
)
from heteropp.schedule.action import Action, Kind
from heteropp.schedule.in_flight import in_flight
from heteropp.schedule.stage_actions import actions, bubble_coefficient, links, paths

MINISTAGES: dict[Schedule, list[int]] = {
    "1f1b": [1],
    "gpipe": [1, 2, 3],
    "interleaved-1f1b": [1, 2, 3],
    "zb-h1": [1],
    "zb-v": [2],
    "chimera": [2],
}
CASES = [
    (schedule, stages, micro_batches, ministages)
    for schedule, counts in MINISTAGES.items()
    for ministages in counts
    for stages in (1, 2, 3, 4, 7)
    for micro_batches in (1, 2, 3, 5, 8, 13)
    if schedule != "chimera" or (stages % 2 == 0 and micro_batches > 1)
]


def pipeline_of(
    stages: int,
    micro_batches: int,
    ministages: list[int],
    recompute: bool = True,
    tp: int = 1,
    sequences: Sequence[int] = (1,),  # a micro-batch of each stage, over and over
    slices: tuple[int, ...] | None = None,
) -> Pipeline:
    return Pipeline(
        micro_batches=micro_batches,
        token_slices=slices,
        stages=tuple(
            Stage(
                layers=(4 * s, 4 * s + 4),
                recompute=recompute,
                ministages=ministages[s],
                replicas=(
                    Replica(
                        ranks=tuple(range(tp * s, tp * s + tp)),
                        chip="x",
                        batch_share=sequences[s % len(sequences)],
                    ),
                ),
            )
            for s in range(stages)
        ),
    )


@pytest.mark.parametrize("schedule", MINISTAGES)
def test_all_work_is_there_once_and_in_order(schedule: Schedule) -> None:
    for name, stages, micro_batches, ministages in CASES:
        if name != schedule:
            continue
        pipeline = pipeline_of(stages, micro_batches, [ministages] * stages)
        for stage in range(stages):
            table = actions(schedule, pipeline, stage)
            assert table[-1] == Action(Kind.STEP)
            works = [a for a in table if a.kind in (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)]
            backwards = [halves(schedule, pipeline, (stage, k)) for k in range(ministages)]
            assert Counter(works) == Counter(
                Action(kind, i, k)
                for k in range(ministages)
                for kind in (Kind.F, Kind.R, *backwards[k])
                for i in taken(schedule, k, micro_batches)
            )
            for k in range(ministages):
                own = list(taken(schedule, k, micro_batches))
                for kind in (Kind.F, *backwards[k]):  # gradients are summed in a plain loop's order
                    order = [a.micro_batch for a in works if (a.kind, a.ministage) == (kind, k)]
                    assert order == own
                reduced = table.index(Action(Kind.REDUCE, None, k))
                assert table.index(Action(backwards[k][-1], own[-1], k)) < reduced
            for k in range(ministages):
                for i in taken(schedule, k, micro_batches):
                    place = {
                        kind: table.index(Action(kind, i, k)) for kind in (Kind.R, *backwards[k])
                    }
                    assert list(place.values()) == sorted(place.values())
                    waits, sends = (
                        [table.index(a) for a in (Action(kind, i, k),) if a in table]
                        for kind in (Kind.RECV_GRADIENT, Kind.SEND_GRADIENT)
                    )
                    assert all(place[Kind.R] < at for at in waits)  # so that it fills the wait
                    # the gradient of the input leaves first
                    assert all(place[Kind.I] < at < place[Kind.W] for at in sends)


def taken(schedule: Schedule, ministage: int, micro_batches: int) -> range:
    """The micro-batches that a ministage takes: Chimera's every other one."""
    return range(ministage, micro_batches, 2) if schedule == "chimera" else range(micro_batches)


def halves(schedule: Schedule, pipeline: Pipeline, part: tuple[int, int]) -> tuple[Kind, ...]:
    """Returns the actions that make up a backward: I and W, or B for both at once.

    The zero-bubble schedules cut every backward, the others where its gradient is sent on.
    """
    sends = any(a[0] != b[0] for a, b in links(schedule, pipeline) if b == part)
    return (Kind.I, Kind.W) if sends or schedule in ("zb-h1", "zb-v") else (Kind.B,)


def test_without_overlap_the_wait_comes_before_the_recompute() -> None:
    for stage in range(2):
        table = actions("1f1b", pipeline_of(3, 4, [1] * 3), stage, overlap=False)
        kinds = [action.kind for action in table]
        assert kinds.index(Kind.RECV_GRADIENT) < kinds.index(Kind.R)


def test_slack_puts_weight_gradients_off_and_holds_what_they_need() -> None:
    plain = pipeline_of(4, 8, [1] * 4)
    for slack in range(5):
        pipeline = replace(
            plain,
            stages=tuple(
                replace(stage, slack=min(slack, s)) for s, stage in enumerate(plain.stages)
            ),
        )
        run_to_the_end("1f1b", pipeline)
        for stage in range(1, 4):
            works = [a for a in actions("1f1b", pipeline, stage) if a.kind in "FIW"]
            held = most = late = latest = 0
            for action in works:
                held += (action.kind == Kind.F) - (action.kind == Kind.W)
                late += (action.kind == Kind.I) - (action.kind == Kind.W)
                most, latest = max(most, held), max(latest, late)
            assert latest == min(slack, stage) + 1
            assert most == in_flight("1f1b", pipeline, stage) <= 4  # the first stage's
            if slack == 4:
                assert works == [a for a in actions("zb-h1", plain, stage) if a.kind in "FIW"]


def test_slack_beyond_that_runs_forwards_ahead() -> None:
    plain = pipeline_of(4, 8, [1] * 4)
    for ahead in (1, 2, 9):
        stages = tuple(replace(stage, slack=s + ahead) for s, stage in enumerate(plain.stages))
        pipeline = replace(plain, stages=stages)
        run_to_the_end("1f1b", pipeline)
        for stage in range(4):
            kinds = [a.kind for a in actions("1f1b", pipeline, stage) if a.kind in "FBIW"]
            first = min(kinds.index(kind) for kind in (Kind.B, Kind.I) if kind in kinds)
            assert first == min(4 - stage + ahead, 8)
            held = most = 0
            for kind in kinds:
                held += (kind == Kind.F) - (kind in (Kind.B, Kind.W))
                most = max(most, held)
            assert most == in_flight("1f1b", pipeline, stage) == min(4 + ahead, 8)


def test_a_plan_with_slack_runs_to_its_end_or_is_refused() -> None:
    generator, refused = random.Random(0), 0
    model = tiny_model(16, hidden=8, heads=1, kv_heads=1)
    for _ in range(300):
        stages, micro_batches = generator.randint(2, 4), generator.randint(9, 12)
        sequences = generator.choice([(1,), (1, 2), (4, 1, 2)])
        slices = generator.choice([None, (12, 4)]) if sequences == (1,) else None
        pipeline = pipeline_of(
            stages, micro_batches, [1] * stages, sequences=sequences, slices=slices
        )
        pipeline = replace(
            pipeline,
            stages=tuple(
                replace(stage, slack=generator.randint(0, 4)) for stage in pipeline.stages
            ),
        )
        micro_batch = max(sequences[:stages])
        plan = Plan(
            model=replace(model, layers=4 * stages),
            global_batch=micro_batch * micro_batches,
            micro_batch=micro_batch,
            schedule="1f1b",
            zero_stage=0,
            pipelines=(pipeline,),
        )
        try:
            validate(plan)
        except PlanError as error:
            assert "slack" in str(error)
            with pytest.raises(AssertionError):
                run_to_the_end("1f1b", pipeline)
            refused += 1
        else:
            run_to_the_end("1f1b", pipeline)
    assert 30 < refused < 270


@pytest.mark.parametrize("schedule", MINISTAGES)
def test_no_stage_waits_for_ever(schedule: Schedule) -> None:
    """Every table runs to its end when each action waits for what it needs, and no more."""
    for name, stages, micro_batches, ministages in CASES:
        if name == schedule:
            for sequences in ((1,), (1, 2), (2, 1), (4, 1, 2)):
                pipeline = pipeline_of(
                    stages, micro_batches, [ministages] * stages, sequences=sequences
                )
                run_to_the_end(schedule, pipeline)


SLICES = ((3, 1), (5, 4, 4, 3), (1,) * 7)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("slices", SLICES)
def test_slices_go_up_in_order_and_down_in_the_opposite(
    schedule: Schedule, slices: tuple[int, ...]
) -> None:
    """A slice's forward needs the earlier ones', and its backward those of the later ones."""
    count = len(slices)
    for stages in (1, 2, 3, 5):
        for micro_batches in (1, 2, 5):
            pipeline = pipeline_of(stages, micro_batches, [1] * stages, slices=slices)
            run_to_the_end(schedule, pipeline)
            for stage in range(stages):
                table = actions(schedule, pipeline, stage)
                forwards = [a.micro_batch for a in table if a.kind == Kind.F]
                assert forwards == list(range(count * micro_batches))
                for kinds in ((Kind.B, Kind.I), (Kind.B, Kind.W)):
                    backwards = [a.micro_batch for a in table if a.kind in kinds]
                    assert backwards == [
                        m * count + j for m in range(micro_batches) for j in reversed(range(count))
                    ]
                order = [(a.kind, a.micro_batch) for a in table]
                for m in range(micro_batches):
                    last = m * count + count - 1
                    begins = next(n for n, a in enumerate(order) if a[0] in "BI" and a[1] == last)
                    assert order.index((Kind.F, last)) < begins


def test_gpipe_runs_unlike_numbers_of_ministages() -> None:
    pipeline = pipeline_of(3, 4, [1, 4, 2])
    path = (0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (1, 3)
    assert paths("gpipe", pipeline) == (path,)
    run_to_the_end("gpipe", pipeline)


def run_to_the_end(schedule: Schedule, pipeline: Pipeline) -> None:
    tables = [actions(schedule, pipeline, s) for s in range(len(pipeline.stages))]
    after = dict(links(schedule, pipeline))
    before = {part: previous for previous, part in after.items()}
    done: set[tuple[int, Action]] = set()
    at = [0] * len(tables)
    moved = True
    while moved:
        moved = False
        for s, table in enumerate(tables):
            while at[s] < len(table):
                action = table[at[s]]
                part, i = (s, action.ministage), action.micro_batch
                needs: list[tuple[tuple[int, int], Kind]] = []
                if action.kind == Kind.RECV_ACTIVATION:
                    needs = [(before[part], Kind.SEND_ACTIVATION)]
                elif action.kind == Kind.RECV_GRADIENT:
                    needs = [(after[part], Kind.SEND_GRADIENT)]
                elif action.kind == Kind.F and part in before and before[part][0] == s:
                    needs = [(before[part], Kind.F)]
                elif action.kind in (Kind.B, Kind.I):
                    needs = [(part, Kind.F)]
                    if part in after and after[part][0] == s:
                        needs.append((after[part], Kind.B))
                if not all(
                    ran(done, t, kind, j, k)
                    for (t, k), kind in needs
                    for j in same_rows(pipeline.stages[s], i, pipeline.stages[t])
                ):
                    break
                done.add((s, action))
                at[s] += 1
                moved = True
    assert at == [len(table) for table in tables]
    sends, receives = (
        sum(
            stage.micro_batch
            for stage, table in zip(pipeline.stages, tables, strict=True)
            for action in table
            if action.kind in kinds
        )
        for kinds in (
            (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT),
            (Kind.RECV_ACTIVATION, Kind.RECV_GRADIENT),
        )
    )
    assert sends == receives  # sequences


def same_rows(stage: Stage, micro_batch: int | None, other: Stage) -> range:
    """The micro-batches of another stage that hold sequences of one of this stage's."""
    assert micro_batch is not None
    first, last = micro_batch * stage.micro_batch, (micro_batch + 1) * stage.micro_batch
    return range(first // other.micro_batch, -(-last // other.micro_batch))


def ran(done: set[tuple[int, Action]], stage: int, kind: Kind, i: int, k: int) -> bool:
    """Whether an action is done; of a backward, its first half."""
    kinds = (Kind.B, Kind.I) if kind == Kind.B else (kind,)
    return any((stage, Action(each, i, k)) in done for each in kinds)


@pytest.mark.parametrize("schedule", MINISTAGES)
def test_in_flight_is_what_the_table_holds(schedule: Schedule) -> None:
    for name, stages, micro_batches, ministages in CASES:
        if name != schedule:
            continue
        pipeline = pipeline_of(stages, micro_batches, [ministages] * stages)
        for stage in range(stages):
            layers = [b - a for a, b in ministage_layers(pipeline, schedule)[stage]]
            held = most = 0
            for action in actions(schedule, pipeline, stage):
                if action.kind == Kind.F:
                    held += layers[action.ministage]
                elif action.kind in (Kind.B, Kind.W):
                    held -= layers[action.ministage]
                most = max(most, held)
            assert held == 0
            assert in_flight(schedule, pipeline, stage) == most / sum(layers)
            if schedule in ("1f1b", "zb-h1", "zb-v"):  # no more than 1F1B's first stage
                assert most / 4 <= min(stages, micro_batches) + (schedule == "zb-v") / 2


@pytest.mark.parametrize("slices", SLICES)
def test_in_flight_counts_a_slice_by_its_tokens(slices: tuple[int, ...]) -> None:
    for stages in (1, 2, 4):
        for micro_batches in (1, 2, 5):
            pipeline = pipeline_of(stages, micro_batches, [1] * stages, slices=slices)
            for stage in range(stages):
                tokens = sum(slices)
                most = in_flight("1f1b", pipeline, stage) * tokens
                held = most_held = 0
                for action in actions("1f1b", pipeline, stage):
                    if action.micro_batch is not None:
                        own = slices[action.micro_batch % len(slices)]
                        held += own * (action.kind == Kind.F)
                        most_held = max(most_held, held)
                        held -= own * (action.kind in (Kind.B, Kind.W))
                assert most == pytest.approx(most_held)
                assert in_flight("gpipe", pipeline, stage) == micro_batches
                if len(set(slices)) == 1:  # a micro-batch, and a slice more for each stage after
                    ahead = min(stages - 1 - stage, (micro_batches - 1) * len(slices))
                    assert most == tokens + ahead * slices[0]


def test_the_orders_that_were_published() -> None:
    """1F1B and ZB-H1 on 4 stages; Megatron's interleaving on 2 stages of 2 ministages."""

    def works(schedule: Schedule, pipeline: Pipeline, stage: int) -> str:
        kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
        return " ".join(
            f"{a.kind}{a.micro_batch}" + "'" * a.ministage
            for a in actions(schedule, pipeline, stage)
            if a.kind in kinds
        )

    four = pipeline_of(4, 5, [1] * 4)
    assert works("1f1b", four, 0) == "F0 F1 F2 F3 B0 F4 B1 B2 B3 B4"
    assert works("1f1b", four, 2) == "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 F4 I3 W3 I4 W4"
    assert works("zb-h1", four, 0) == "F0 F1 F2 F3 I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4"
    assert works("zb-h1", four, 3) == "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4"
    two = pipeline_of(2, 4, [2, 2])
    assert works("interleaved-1f1b", two, 0) == (
        "F0 F1 F0' F1' F2 I0' W0' F3 I1' W1' F2' B0 F3' B1 I2' W2' I3' W3' B2 B3"
    )
    assert works("gpipe", two, 0) == (
        "F0 F1 F2 F3 F0' F1' F2' F3' I0' W0' I1' W1' I2' W2' I3' W3' B0 B1 B2 B3"
    )
    sliced = pipeline_of(2, 2, [1] * 2, slices=(1, 1, 1))
    assert works("1f1b", sliced, 0) == "F0 F1 F2 F3 B2 F4 B1 F5 B0 B5 B4 B3"
    assert works("1f1b", sliced, 1) == ("F0 F1 F2 I2 W2 F3 I1 W1 F4 I0 W0 F5 I5 W5 I4 W4 I3 W3")
    assert works("zb-v", pipeline_of(1, 2, [2]), 0) == "F0 F0' I0' W0' F1 I0 W0 F1' I1' W1' I1 W1"


def test_the_ends_of_a_v_are_handed_over_within_the_stage() -> None:
    pipeline = pipeline_of(3, 6, [2] * 3, tp=2)
    last = Counter(a.kind for a in actions("zb-v", pipeline, 2))
    assert last[Kind.RECV_ACTIVATION] == last[Kind.SEND_ACTIVATION] == 6
    assert last[Kind.GATHER_ACTIVATION] == 6
    first = Counter(a.kind for a in actions("zb-v", pipeline, 0))
    assert first[Kind.SEND_ACTIVATION] == first[Kind.RECV_ACTIVATION] == 6
    middle = Counter(a.kind for a in actions("zb-v", pipeline, 1))
    assert middle[Kind.RECV_ACTIVATION] == middle[Kind.SEND_GRADIENT] == 12


def test_bubble_coefficients() -> None:
    assert bubble_coefficient("1f1b") == 1
    assert bubble_coefficient("interleaved-1f1b", 4) == bubble_coefficient("gpipe", 4) == 0.25
    assert bubble_coefficient("zb-v") == 0
    assert bubble_coefficient("chimera") == 0.5
