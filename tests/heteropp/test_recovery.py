"""Whatever copies of the state are left, a fresh generation has all of it again, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layouts import figure_8, plan_of, three_pipelines, two_pipelines
from recovery_ranks import Counted, Hanging, Ranks, fetched_bytes, keep, recovered
from sampled import sampled
from test_context_parallel import cut
from test_expert_parallel import LAYOUTS as SPREAD
from test_expert_parallel import decoder
from tiny_decoders import tiny_config
from training_run import make_plan, several_pipelines, tiny_model

from heteropp.description.plan import Plan
from heteropp.state.recovery.bitmap import lines
from heteropp.state.recovery.recover import Recovered
from heteropp.state.recovery.snapshots import Cadence
from heteropp.state.recovery.sources import LostError

MODEL = tiny_model(kv_heads=4)
ELEMENTS = sum(
    # embedding and head, a layer's four and three matrices and two norms, the last norm
    [2 * 256 * 32, 4 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32), 32]
)
STATE_BYTES = 12 * ELEMENTS  # value, average and average of the square


def tp(degree: int) -> Plan:
    return make_plan(MODEL, (4,), (1,), (degree,), (False,))


# two groups of two stages, each stage on a node of its own: each is a copy of the other
GROUPS = several_pipelines(MODEL, ((2, 2), (1, 1), (1, 1), 2), ((2, 2), (1, 1), (1, 1), 2))
NODES = ["a-0", "b-0", "a-1", "b-1"]
ALWAYS = Cadence(memory=1, disk=1, remote=1)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    running = Ranks(tmp_path_factory.mktemp("recovery"))
    yield running
    running.close()


@pytest.fixture
def ranks(processes: Ranks, tmp_path: Path) -> Ranks:
    processes.root = tmp_path
    return processes


def recover_whole(ranks: Ranks, plan: Plan, nodes: list[str], *arguments: object) -> Recovered:
    """What rank 0 says of a recovery after which every rank has exactly what it should."""
    answers = ranks.run(plan, nodes, recovered, *arguments)
    for answer in answers:
        assert not isinstance(answer, str), answer
        found, wrong = answer
        assert found is not None and not wrong, wrong
    return answers[0][0]


def kept(ranks: Ranks, plan: Plan, nodes: list[str], *arguments: object) -> None:
    for warnings in ranks.run(plan, nodes, keep, *arguments):
        assert warnings == []


PAIRS: dict[str, tuple[Plan, Plan]] = {  # the first six every day
    "tp 2 to 4": (tp(2), tp(4)),
    "two pipelines to one": (GROUPS, plan_of(MODEL, (4,), (1,), (2,))),
    "16 bits": (
        make_plan(tiny_model(dtype="bfloat16"), (2, 2), (2, 1), (1, 2), (False, False)),
        make_plan(tiny_model(dtype="bfloat16"), (3, 1), (1, 2), (2, 1), (False, False)),
    ),
    "ZeRO on four to ZeRO on three": (
        make_plan(MODEL, (4,), (4,), (1,), (False,)),
        plan_of(MODEL, (2, 2), (3, 1), (1, 2), shares={0: (1, 2, 1)}),
    ),
    "context parallelism in replicas to less of it": (
        cut(plan_of(MODEL, (3, 1), (2, 1), (2, 2)), {0: [(10, 6), (4, 12)], 1: [(9, 7)]}),
        cut(plan_of(MODEL, (2, 2), (1, 2), (3, 1)), {0: [(8, 5, 3)]}),
    ),
    "experts over parts of sequences, ZeRO-0, to over other ranks": (
        SPREAD["with cp in replicas, 4 ways"](decoder(dtype="float32")),
        SPREAD["unequal, then another"](decoder(dtype="float32")),
    ),
    "context parallelism beside tp to one rank, ZeRO-0": (
        cut(plan_of(MODEL, (4,), (1,), (4,), zero_stage=0), {0: [(10, 6)]}),
        tp(1),
    ),
    "unlike pipelines to tied embeddings' twins": (
        three_pipelines(tiny_model(layers=8)),
        plan_of(tiny_model(layers=8, tied_embeddings=True), (4, 4), (2, 1), (1, 2)),
    ),
    "one pipeline to two, ZeRO": (make_plan(MODEL, (3, 1), (2, 1), (1, 2), (False, True)), GROUPS),
    "tp 2 to 1": (tp(2), tp(1)),
    "unlike pipelines to figure 8": (
        two_pipelines(tiny_model(layers=8, kv_heads=4)),
        figure_8(tiny_model(layers=8)),
    ),
}


@pytest.mark.parametrize("name", sampled(PAIRS, 3, everyday=6))
def test_another_plan_has_the_state_that_was_kept(ranks: Ranks, name: str) -> None:
    first, second = PAIRS[name]
    nodes = [f"a-{rank // 2}" for rank in range(first.world_size)]
    kept(ranks, first, nodes, [1], Cadence(memory=1))
    there = [f"a-{rank // 2}" for rank in range(second.world_size)]
    found = recover_whole(ranks, second, there)
    assert found.step == 1
    assert found.bytes_from("disk") == found.bytes_from("remote") == 0


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)]
)
def test_so_has_one_of_a_model_that_is_frozen_but_for_lora(ranks: Ranks, dtype: str) -> None:
    from heteropp.models.hugging_face.lora import with_lora
    from heteropp.models.hugging_face.reading import read

    values = tiny_config("qwen2", layers=4).to_dict()
    model = with_lora(read(values, "tiny", sequence_length=32, dtype=dtype), "r=2")
    first = plan_of(model, (3, 1), (3, 1), (1, 2), shares={0: (1, 2, 1)})
    second = plan_of(model, (1, 3), (1, 2), (2, 1), zero_stage=2)
    kept(ranks, first, [f"a-{rank // 3}" for rank in range(5)], [1], Cadence(memory=1))
    there = [f"a-{rank // 2}" for rank in range(4)]
    assert recover_whole(ranks, second, there).step == 1


def test_the_nodes_own_memory_is_enough(ranks: Ranks) -> None:
    kept(ranks, GROUPS, NODES, [1], Cadence(memory=1, disk=1))
    found = recover_whole(ranks, GROUPS, NODES)
    assert {moved.source for moved in found.moved} == {"memory"}
    assert found.bytes_from("memory") == 2 * STATE_BYTES
    assert all(moved.origin == moved.to for moved in found.moved)


def test_replicas_of_a_node_share_the_keeping(ranks: Ranks, tmp_path: Path) -> None:
    plan = make_plan(MODEL, (4,), (4,), (1,), (False,), zero_stage=0)
    kept(ranks, plan, ["a-0", "a-0", "a-1", "a-1"], [1], Cadence(memory=1))
    for node, those in (("a-0", "01"), ("a-1", "23")):
        files = list((tmp_path / "memory" / node).glob("step-*/*.safetensors"))
        blocks = [path.name.partition(".tp-")[0] for path in files]
        assert len(blocks) == len(set(blocks)) == 7
        by_rank = [path.name.split(".")[-2] for path in files]
        assert {by_rank.count(f"rank-0000{rank}") for rank in those} == {3, 4}
    assert recover_whole(ranks, tp(2), ["a-0", "a-1"]).bytes_from("peer") == 0


def test_a_lost_nodes_share_comes_from_its_copy_on_another(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [1], Cadence(memory=1, disk=1))
    for tier in ("memory", "disk"):
        shutil.rmtree(tmp_path / tier / "b-0")
    found = recover_whole(ranks, GROUPS, ["a-0", "c-0", "a-1", "b-1"])
    peers = {(moved.origin, moved.to) for moved in found.moved if moved.source == "peer"}
    assert peers == {("b-1", "c-0")}
    assert found.bytes_from("memory") + found.bytes_from("peer") == 2 * STATE_BYTES


def test_where_memory_was_cleared_the_disk_has_it(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [1], Cadence(memory=1, disk=1))
    shutil.rmtree(tmp_path / "memory" / "b-0")
    found = recover_whole(ranks, GROUPS, NODES)
    assert {moved.to for moved in found.moved if moved.source == "disk"} == {"b-0"}
    assert found.bytes_from("peer") == 0


def test_what_no_node_has_is_fetched_once_from_the_remote_store(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Two groups want the layers of the nodes that are gone; the store gives them once."""
    store = f"{Counted.protocol}://{tmp_path / 'store'}"
    kept(ranks, GROUPS, NODES, [1], ALWAYS, 0, store)
    for tier in ("memory", "disk"):
        for node in ("b-0", "b-1"):
            shutil.rmtree(tmp_path / tier / node)
    found = recover_whole(ranks, GROUPS, ["a-0", "c-0", "a-1", "c-1"], store)
    lost_bytes = 12 * (2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 256 * 32)
    assert fetched_bytes(tmp_path / "store") == found.bytes_from("remote") == lost_bytes
    fetchers = {moved.to for moved in found.moved if moved.source == "remote"}
    assert fetchers == {"c-0", "c-1"}
    assert found.bytes_from("peer") == lost_bytes


def test_nothing_is_fetched_that_a_node_has(ranks: Ranks, tmp_path: Path) -> None:
    store = f"{Counted.protocol}://{tmp_path / 'store'}"
    kept(ranks, GROUPS, NODES, [1], ALWAYS, 0, store)
    recover_whole(ranks, tp(2), ["a-0", "b-1"], store)
    assert fetched_bytes(tmp_path / "store") == 0


def test_the_remote_store_alone_is_enough(ranks: Ranks, tmp_path: Path) -> None:
    store = f"{Counted.protocol}://{tmp_path / 'store'}"
    kept(ranks, GROUPS, NODES, [1], ALWAYS, 0, store)
    for tier in ("memory", "disk"):
        shutil.rmtree(tmp_path / tier)
    found = recover_whole(ranks, tp(4), ["c-0", "c-0", "d-0", "d-0"], store)
    assert fetched_bytes(tmp_path / "store") == found.bytes_from("remote") == STATE_BYTES


def test_a_store_is_not_asked_for_what_the_nodes_have(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [1], Cadence(memory=1))
    store = f"{Hanging.protocol}://{tmp_path / 'store'}"
    assert recover_whole(ranks, GROUPS, NODES, store).warnings == ()


def test_a_store_that_cannot_be_read_is_said(ranks: Ranks, tmp_path: Path) -> None:
    """It is asked, as the nodes lack a part of their newest step."""
    kept(ranks, GROUPS, NODES, [1, 2], Cadence(memory=1))
    for node in ("b-0", "b-1"):
        next((tmp_path / "memory" / node).glob("step-000002.*/rank-*.json")).unlink()
    found = recover_whole(ranks, GROUPS, NODES, "/dev/null/store")
    assert found.step == 1
    (warning,) = found.warnings
    assert warning.startswith("/dev/null/store (remote) cannot be read: ")


def test_a_manifest_that_cannot_be_read_leaves_the_others(ranks: Ranks, tmp_path: Path) -> None:
    """One of the older step's is a folder, of which nothing can be read as of a file."""
    kept(ranks, GROUPS, NODES, [1, 2], Cadence(memory=1))
    path = next((tmp_path / "memory" / "a-0").glob("step-000001.*/rank-*.json"))
    path.unlink()
    (path / "entry").mkdir(parents=True)
    found = recover_whole(ranks, GROUPS, NODES)
    assert found.step == 2
    (warning,) = found.warnings
    assert "(memory) cannot be read in part: " in warning and str(path) in warning


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def decayed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [torn, decayed, Path.unlink])
def test_a_damaged_file_is_taken_from_the_next_source(ranks: Ranks, tmp_path: Path, damage) -> None:
    kept(ranks, GROUPS, NODES, [1], Cadence(memory=1, disk=1))
    in_memory, on_disk = (
        next((tmp_path / tier / "b-0").glob("step-*/layers.3.*")) for tier in ("memory", "disk")
    )
    damage(in_memory)
    found = recover_whole(ranks, GROUPS, NODES)
    assert {(moved.block, moved.to) for moved in found.moved if moved.source == "disk"} == {
        ("layers.3", "b-0")
    }
    if damage is decayed:
        assert any(
            "of layers.3." in warning and "in the memory of node b-0, step 1" in warning
            for warning in found.warnings
        )
    damage(on_disk)
    found = recover_whole(ranks, GROUPS, NODES)
    origins = {moved.origin for moved in found.moved if moved.source == "peer"}
    assert origins == {"b-1"}


def test_a_torn_manifest_is_not_believed(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [1], Cadence(memory=1, disk=1))
    manifest = next((tmp_path / "memory" / "a-0").glob("step-*/rank-*.json"))
    changed = manifest.read_bytes().replace(b'"updates":0', b'"updates":9')
    assert changed != manifest.read_bytes()
    manifest.write_bytes(changed)
    found = recover_whole(ranks, GROUPS, NODES)
    assert {moved.to for moved in found.moved if moved.source == "disk"} == {"a-0"}


def test_a_step_that_is_not_whole_gives_way_to_the_one_before(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [1, 2], Cadence(memory=1))
    for node in ("b-0", "b-1"):
        next((tmp_path / "memory" / node).glob("step-000002.*/rank-*.json")).unlink()
    assert recover_whole(ranks, GROUPS, NODES).step == 1


def test_steps_of_two_generations_are_not_put_together(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [1, 2], Cadence(memory=1), 0)
    shutil.copytree(tmp_path / "memory" / "b-0", tmp_path / "aside")
    shutil.rmtree(tmp_path / "memory")
    kept(ranks, GROUPS, NODES, [1, 2], Cadence(memory=1), 1)
    for node in ("b-0", "b-1"):
        next((tmp_path / "memory" / node).glob("step-000002.*/rank-*.json")).unlink()
    shutil.copytree(tmp_path / "aside", tmp_path / "memory" / "b-0", dirs_exist_ok=True)
    assert recover_whole(ranks, GROUPS, NODES).step == 1


def test_a_step_that_was_not_reported_is_taken_only_where_none_was(
    ranks: Ranks, tmp_path: Path
) -> None:
    kept(ranks, GROUPS, NODES, [12, 13], Cadence(memory=1))
    for reported, step in ((None, 13), (13, 13), (12, 12), (7, 12)):
        assert recover_whole(ranks, GROUPS, NODES, None, reported).step == step


def test_a_newer_checkpoint_wins(ranks: Ranks) -> None:
    kept(ranks, GROUPS, NODES, [4, 5], Cadence(memory=1))
    assert recover_whole(ranks, GROUPS, NODES, None, None, 5).step == 5  # memory is nearer
    assert ranks.run(GROUPS, NODES, recovered, None, None, 6) == [(None, [])] * 4


def test_another_jobs_copies_are_not_believed(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [1], Cadence(memory=1))
    for node in NODES:
        for path in (tmp_path / "memory" / node).glob("step-*/rank-*.json"):
            assert b'"job":"job-1"' in path.read_bytes()
    answers = ranks.run(GROUPS, NODES, recovered_of_job, "job-2")
    assert answers == [None] * 4


def recovered_of_job(here, job: str):
    from heteropp.state.recovery.recover import recover

    tiers = replace(here.tiers(), job=job)
    from recovery_ranks import manifest_of

    return recover(here.state, manifest_of(here.plan, 0), tiers, here.nodes, here.control)


def test_what_has_no_copy_left_is_named(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [11, 12], Cadence(memory=1, disk=1))
    for tier in ("memory", "disk"):
        for node in ("b-0", "b-1"):
            shutil.rmtree(tmp_path / tier / node)
    for answer in ranks.run(GROUPS, ["a-0", "c-0", "a-1", "c-1"], recovered):
        assert answer.splitlines()[0] == (
            "LostError: layers.2, layers.3, norm and head have no snapshot left: "
            "the last were of step 12, on nodes b-0, b-1"
        )
    assert ranks.run(GROUPS, ["a-0", "c-0", "a-1", "c-1"], who_held) == [("b-0", "b-1")] * 4


def who_held(here: Any) -> tuple[str, ...]:
    """The nodes that last held what a recovery lacks; () where it lacks nothing."""
    try:
        recovered(here)
    except LostError as error:
        return error.nodes
    return ()


def test_where_every_step_has_another_gap_each_is_named(ranks: Ranks, tmp_path: Path) -> None:
    kept(ranks, GROUPS, NODES, [11, 12], Cadence(memory=1))
    for step, layer, node in ((11, 1, "a"), (12, 3, "b")):
        for pipeline in range(2):
            folder = tmp_path / "memory" / f"{node}-{pipeline}" / f"step-0000{step}.generation-0000"
            next(folder.glob(f"layers.{layer}.*")).unlink()
    answer = ranks.run(GROUPS, NODES, recovered)[0]
    assert answer.splitlines()[0] == (
        "LostError: no step has a snapshot of every layer left: "
        "step 12 lacks layers.3 (last on nodes b-0, b-1); "
        "step 11 lacks layers.1 (last on nodes a-0, a-1)"
    )


def test_where_nothing_was_kept_there_is_nothing_to_recover(ranks: Ranks) -> None:
    assert ranks.run(GROUPS, NODES, recovered) == [(None, [])] * 4


def test_the_bitmap_shows_what_is_there(ranks: Ranks, tmp_path: Path) -> None:
    nodes = ["a-0", "a-0", "a-1", "a-1"]
    plan = several_pipelines(MODEL, ((4,), (1,), (2,), 2), ((4,), (1,), (2,), 2))
    kept(ranks, plan, nodes, [1, 2], Cadence(memory=1, disk=2))
    next((tmp_path / "memory" / "a-1").glob("step-000002.*/layers.1.tp-1*")).unlink()
    found = recover_whole(ranks, plan, nodes)
    assert lines(found.kept, MODEL)[1:3] == [
        "layers.0   step 2: memory a-0 (0/2 1/2), memory a-1 (0/2 1/2), disk a-0 (0/2 1/2), "
        "disk a-1 (0/2 1/2); step 1: memory a-0 (0/2 1/2), memory a-1 (0/2 1/2)",
        "layers.1   step 2: memory a-0 (0/2 1/2), memory a-1 (0/2), disk a-0 (0/2 1/2), "
        "disk a-1 (0/2 1/2); step 1: memory a-0 (0/2 1/2), memory a-1 (0/2 1/2)",
    ]
    assert [line.split()[0] for line in lines(found.kept, MODEL)] == [
        *("embedding", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head")
    ]
