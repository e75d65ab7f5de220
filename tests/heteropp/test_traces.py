"""What is kept of traced stages, against direct traces, and in whatever state its file is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clusters import tiny_model
from tiny_decoders import tiny_config

from heteropp.cost.tracing import cache, operators
from heteropp.cost.tracing.kind import Spread, StageKind
from heteropp.cost.tracing.results import result_of
from heteropp.cost.tracing.stage import Recording, record_stage
from heteropp.cost.tracing.traces import StageTrace, TracedPiece, trace_stage
from heteropp.models.hugging_face.reading import read

GRANULARITY_BYTES = 512


def most_alive(recording: Recording, piece: str) -> tuple[int, int]:
    """(most bytes alive during a piece, bytes alive at its end), every event replayed."""
    first, last = recording.spans[piece]
    alive: dict[int, int] = {}
    most = 0
    for position, event in enumerate(recording.events[:last]):
        if event >= 0:
            size = recording.tensors_bytes[event]
            alive[event] = (size + GRANULARITY_BYTES - 1) // GRANULARITY_BYTES * GRANULARITY_BYTES
        else:
            del alive[~event]
        if position >= first - 1:
            most = max(most, sum(alive.values()))
    return most, sum(alive.values())


def counted(*parts: TracedPiece) -> Counter:
    """How many operators of each (product, flops, bytes)."""
    found: Counter = Counter()
    for part in parts:
        for number, *operator in part.operators:
            found[tuple(operator)] += number
    return found


def check(trace: StageTrace, direct: Recording) -> None:
    pieces = direct.pieces
    for piece, ours in (
        ("forward", counted(trace.forward)),
        ("backward_input", counted(trace.backward_input)),
        ("backward_weight", counted(trace.backward_weight)),
        ("norm", counted(trace.norm)),
        ("update", counted(trace.update)),
    ):
        assert ours == Counter((o.product, o.flops, o.bytes) for o in pieces[piece].operators)
    for piece, reduces in (
        ("forward", trace.forward.all_reduce_bytes),
        ("backward_input", trace.backward_input.all_reduce_bytes),
    ):
        assert {size: n for n, size in reduces} == Counter(pieces[piece].all_reduce_bytes)
    for piece, gathers in (
        ("forward", trace.forward.gather_bytes),
        ("backward_input", trace.backward_input.gather_bytes),
    ):
        assert {size: n for n, size in gathers} == Counter(pieces[piece].gather_bytes)
    assert trace.forward_peak_bytes == most_alive(direct, "forward")[0]
    assert trace.kept_bytes == most_alive(direct, "forward")[1]
    second = direct.sizes_bytes["second_gradient"]
    assert trace.backward_input_peak_bytes - second == most_alive(direct, "backward_input")[0]
    assert trace.backward_weight_peak_bytes - second == most_alive(direct, "backward_weight")[0]
    before = most_alive(direct, "backward_weight")[1]
    assert trace.update_peak_bytes == most_alive(direct, "update")[0] - before
    assert trace.flat_bytes == direct.sizes_bytes["flat"]
    assert trace.input_bytes == direct.sizes_bytes["input"]
    assert trace.output_bytes == direct.sizes_bytes["output"]


@pytest.mark.parametrize(
    "changes, options",
    [
        ({}, {}),
        (dict(dtype="bfloat16", attention="fused"), {}),
        (dict(dropout=0.1), dict(sequence_parallel=True, selective_recompute=True)),
    ],
)
def test_every_number_of_sequences_is_as_if_traced(changes: dict, options: dict) -> None:
    """Odd sizes, so that nothing is a multiple of what allocators round to; a vocabulary that is
    larger than a micro-batch of few sequences."""
    sizes = dict(kv_heads=2, intermediate=40, vocab=72, sequence_length=12)
    model = tiny_model(4, **sizes, **changes)
    for layers, first, last, tp in ((1, True, False, 2), (2, False, False, 1), (1, False, True, 2)):
        for sequences in (1, 2, 5, 9):
            kind = StageKind("block", first, last, tp, sequences, whole_backward=first, **options)
            check(trace_stage(model, kind, layers), record_stage(model, layers, kind))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gpt_oss", StageKind("", True, False, 1, 2, whole_backward=True)),
        ("qwen3_moe", StageKind("", False, True, 2, 3, True, spread=Spread((1, 3), (1, 1)))),
        ("deepseek_v3", StageKind("", False, False, 1, 1, optimizer="muon")),
    ],
)
def test_what_operators_return_may_be_remembered(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: StageKind
) -> None:
    """Nothing of a stage is another where each operator is run."""
    model = read(tiny_config(family, layers=4).to_dict(), family, sequence_length=16)
    kind = replace(kind, block=model.block_kind(1))
    first, second = (record_stage(model, 2, kind) for _ in range(2))
    monkeypatch.setattr(operators, "result_of", lambda run, args, kwargs: run(*args, **kwargs))
    assert first == second == record_stage(model, 2, kind)


def test_what_is_equal_and_of_another_type_gives_another_result() -> None:
    x = torch.empty(3, dtype=torch.int64, device="meta")
    for other in (1, 1.0, True, 1, 1.0):
        result = result_of(torch.ops.aten.mul.Scalar, (x, other), {})
        assert result.dtype == (x * other).dtype


def test_every_module_that_traces_is_in_the_digest_of_what_is_kept() -> None:
    folder = Path(cache.__file__).parent
    modules = {f"cost/tracing/{path.stem}" for path in folder.glob("*.py")}
    assert modules - {"cost/tracing/__init__"} <= {*cache.SOURCES}


def test_a_view_stays_one() -> None:
    x = torch.empty(2, 6, device="meta")
    for _ in range(3):
        view = result_of(torch.ops.aten._unsafe_view.default, (x, [3, 4]), {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata


def test_ends_and_layers_add_up() -> None:
    """A stage is a first part, layers and a last part: what planners extend from."""
    model = tiny_model(8)
    for tp in (1, 4):
        kind = StageKind("block", True, True, tp, 2)
        three, four = (record_stage(model, n, kind) for n in (3, 4))
        one, two = (trace_stage(model, kind, n) for n in (1, 2))
        for name in (
            "kept_bytes",
            "forward_peak_bytes",
            "backward_input_peak_bytes",
            "backward_weight_peak_bytes",
            "flat_bytes",
        ):
            found = getattr(one, name) + 2 * (getattr(two, name) - getattr(one, name))
            direct = {
                "kept_bytes": most_alive(three, "forward")[1],
                "forward_peak_bytes": most_alive(three, "forward")[0],
                "backward_input_peak_bytes": most_alive(three, "backward_input")[0],
                "backward_weight_peak_bytes": most_alive(three, "backward_weight")[0],
                "flat_bytes": three.sizes_bytes["flat"],
            }[name]
            assert found == direct, name
        pieces = four.pieces, three.pieces
        layer, less = (
            Counter(
                (o.product, o.flops, o.bytes)
                for name in ("backward_input", "backward_weight")
                for o in of[name].operators
            )
            for of in pieces
        )
        layer -= less
        longer, shorter = (counted(t.backward_input, t.backward_weight) for t in (two, one))
        assert longer - shorter == layer


SECOND = """
import sys
from heteropp.description.chips import load_chip
from heteropp.cost.token_shares import token_shares
from heteropp.description.cluster import Link
from heteropp.description.model import read_model
from heteropp.cost.stage_time import StageShape, stage_memory, stage_time
from heteropp.models.llama.model import LlamaModel

model = LlamaModel(name="x/../y", layers=4, hidden=16, heads=4, kv_heads=4, intermediate=48,
                   vocab=56, sequence_length=20)
shape = StageShape(layers=3, first=True, last=False, tp=2, dp=2, sequences=1, zero_stage=1,
                   recompute=False)
link = Link(1e-5, 1e9)
print(stage_time(model, shape, load_chip("a-mini"), link, link))
print(stage_memory(model, shape, 2, 4))
print(token_shares(read_model("mixtral-8x7b"), [1, 2]))  # one of transformers' families
print("torch" in sys.modules)
"""


def run(script: str, cache: Path) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.splitlines()


def test_a_second_search_imports_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    exec(SECOND, {})
    first, second = capsys.readouterr().out.splitlines(), run(SECOND, tmp_path)
    assert first[:3] == second[:3]
    assert (first[3], second[3]) == ("True", "False")
    for file in (tmp_path / "hyperhetero" / "traces").iterdir():
        content = json.loads(file.read_text())
        assert set(content) == {"format", "sha256", "entries"}


ENTRY = """
import sys
from heteropp.cost.tracing import cache as trace_cache
from heteropp.models.llama.model import LlamaModel

model = LlamaModel(name="x", layers=4, hidden=16, heads=4, kv_heads=4, intermediate=32, vocab=32,
              sequence_length=16)
made = []
value = trace_cache.get(model, "k", lambda: made.append(1) or {"n": 7}, lambda entry: entry["n"])
print(value, len(made))
"""


@pytest.mark.long
def test_a_file_that_is_not_what_it_says_is_as_good_as_none(tmp_path: Path) -> None:
    assert run(ENTRY, tmp_path) == ["7 1"]
    assert run(ENTRY, tmp_path) == ["7 0"]
    (file,) = (tmp_path / "hyperhetero" / "traces").iterdir()
    good = file.read_text()
    others = tmp_path / "hyperhetero" / "traces" / "not-a-file"
    for bad in (
        "",
        "{}",
        good[: len(good) // 2],
        good.replace('"n":7', '"n":8'),
        good.replace('"format": 2', '"format": 1'),
        "[1, 2]\n" * 3,
        "\x00\xff" * 10,
    ):
        file.write_text(bad)
        assert run(ENTRY, tmp_path) == ["7 1"], bad
        assert file.read_text() == good
    others.write_text("of another")
    assert run(ENTRY, tmp_path) == ["7 0"]
    # a folder that cannot be written to costs time, and nothing else
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, where the folder would be")
    assert run(ENTRY, blocked) == ["7 1"]
    again = (
        ENTRY
        + """
for key in "abcdefgh" * 2:
    trace_cache.get(model, key, lambda: made.append(1) or {"n": 7}, lambda entry: entry["n"])
print(len(made))
"""
    )
    assert run(again, blocked) == ["7 1", "9"]  # each entry is made once in a process
