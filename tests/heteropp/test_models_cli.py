"""heteropp-models, and what heteropp-train checks of families: what is right passes alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Ended, run_command
from layouts import plan_of
from tiny_decoders import tiny_config
from training_run import command, refusal, write_text

from heteropp.api.errors import InputError
from heteropp.api.training.checks import check_families
from heteropp.cli import train
from heteropp.cli.models import app
from heteropp.description.model import read_model
from heteropp.description.plan import write_plan
from heteropp.models.hugging_face import check as comparing
from heteropp.models.hugging_face.stage import HuggingFaceStage
from heteropp.models.hugging_face.usual import usual_config

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folder_of(place: Path, model_type: str, **changes: Any) -> Path:
    folder = place / model_type
    tiny_config(model_type, **changes).save_pretrained(folder)
    return folder


def run(*arguments: object) -> Ended:
    return run_command(app, [str(each) for each in arguments])


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


@pytest.fixture
def wrong_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The third layer's feed-forward layer gives a little more than the family's."""
    make = HuggingFaceStage.__init__

    def wrongly(self: HuggingFaceStage, *arguments: Any) -> None:
        make(self, *arguments)
        if "2" in self.layers:
            mlp: Any = self.layers["2"].mlp
            mlp.up_proj.register_forward_hook(lambda _, __, result: result * 1.01)

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceStage, "__init__", wrongly)
        yield patch


def test_a_family_is_as_transformers_has_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = folder_of(tmp_path, "qwen3_moe")
    result = run("check", folder, "--tp", 4, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["family"], found["has_experts"], found["passed"]) == ("qwen3_moe", True, True)
    *right, four = found["degrees"]
    degrees = [(each["tp"], each["sequence_parallel"]) for each in right]
    assert degrees == [(1, False), (2, False), (2, True)]
    assert all(each["error"] < 1e-5 for each in right)
    assert "does not divide the model's num_key_value_heads 2" in four["problem"]
    whole = AutoModelForCausalLM.from_config(tiny_config("qwen3_moe"))
    experts = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name)
    assert found["parameters"] == sum(p.numel() for p in whole.parameters())
    assert found["active_parameters"] == found["parameters"] - experts // 2  # 2 of 4
    said = run("check", folder / "config.json").stdout
    assert "qwen3_moe, experts; layers: " in said and "of which a token uses" in said
    for how in ("tp 2", "tp 2, sequence parallel"):
        assert re.search(rf"{how}: as transformers, within \d\.\de-\d\d \(layers\.\d\.", said)


def test_a_wrong_layer_is_caught_and_named(tmp_path: Path, wrong_layer: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "qwen2", num_hidden_layers=4, layer_types=None)
    result = run("check", folder)
    assert result.exit_code == 1
    for tp in (1, 2):
        assert re.search(
            rf"tp {tp}: FAILED, layers\.2\.\S* differs from transformers' by \d",
            result.output,
        )


def test_what_has_no_form_here_is_refused_by_name(tmp_path: Path) -> None:
    assert "embd_pdrop is 0.1; expected 0" in refused(
        "check", folder_of(tmp_path, "phi", embd_pdrop=0.1)
    )
    assert "router_jitter_noise is 0.1; expected 0" in refused(
        "check", folder_of(tmp_path, "mixtral", router_jitter_noise=0.1)
    )
    assert "phimoe draws the experts of each token at random" in refused(
        "check", folder_of(tmp_path, "phimoe")
    )
    assert "no layers between a table and a head" in refused(
        "check", folder_of(tmp_path, "bloom", n_layer=2, n_head=2)
    )
    assert "absent" in refused("check", tmp_path / "absent")
    assert "tp is 16; expected 1 to 8" in refused("check", "quickstart", "--tp", 16)
    assert "no causal language model of model_type 'qwen99'" in refused("list", "qwen99")


def test_multipliers_of_the_table_count_once(tmp_path: Path) -> None:
    """Every stage runs the family's own loop, which scales what enters it."""
    result = run("list", "granite", "--json")
    (found,) = json.loads(result.stdout)
    assert found["passed"] and found["changes"]["embedding_multiplier"] == 12
    assert [degree["problem"] for degree in found["degrees"]] == ["", "", ""]


def test_models_of_our_own_need_no_check() -> None:
    assert "its modules are our own" in run("check", "quickstart").stdout
    listed = run("list", "llama", "gpt2", "--markdown").stdout
    assert "| llama | our own | yes | yes | yes |" in listed
    assert "| gpt2 | our own | yes | yes | no |" in listed


def test_training_begins_once_a_family_has_passed(
    tmp_path: Path, wrong_layer: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, "qwen2", num_hidden_layers=4, layer_types=None)
    plan = plan_of(read_model(folder, 16), (4,), (1,), (1,))  # type: ignore[arg-type]
    write_plan(plan, tmp_path / "plan.json")
    write_text(tmp_path / "text")
    for _ in range(2):  # nothing is kept of a failure
        said = refusal(tmp_path, "--device", "cpu", "--steps", "1")
        assert re.search(r"^model qwen2 is not trained, .* degree 1: layers\.2\.\S* differs", said)
    assert not (tmp_path / "run" / "starts").exists()
    wrong_layer.undo()
    trained = run_command(train.app, command(tmp_path, "--device", "cpu", "--steps", "1"))
    assert trained.exit_code == 0, trained.output
    (kept,) = (tmp_path / "cache" / "hyperhetero" / "proofs").iterdir()
    assert kept.name.startswith("qwen2-")

    def never(*_: object) -> None:
        raise AssertionError("the family has passed")

    wrong_layer.setattr(comparing, "check", never)
    check_families([plan], elastic=False)
    with pytest.raises(AssertionError, match="has passed"):  # another degree has not
        check_families([plan], elastic=True)
    kept.write_text(kept.read_text().replace('"error":', '"error" :'))  # no longer as written
    with pytest.raises(AssertionError, match="has passed"):
        check_families([plan], elastic=False)


def test_rows_are_cut_once_a_family_has_passed_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every rank takes its first row for the first of a sequence."""
    folder = folder_of(tmp_path, "qwen2", num_hidden_layers=4, layer_types=None)
    model: Any = read_model(folder, 16)
    make = HuggingFaceStage.__init__

    def by_place(self: HuggingFaceStage, *arguments: Any) -> None:
        make(self, *arguments)
        for layer in self.layers.values():
            norm: Any = layer.input_layernorm

            def larger_first_row(_: Any, __: Any, result: Any) -> Any:
                scale = torch.ones(result.shape[1], 1, dtype=result.dtype)
                scale[0] = 1.01 if self.group.sequence_parallel else 1.0
                return result * scale

            norm.register_forward_hook(larger_first_row)

    monkeypatch.setattr(HuggingFaceStage, "__init__", by_place)
    check_families([plan_of(model, (4,), (1,), (2,))], elastic=False)
    for _ in range(2):
        with pytest.raises(InputError, match="degree 2 and sequence parallelism: layers"):
            check_families(
                [plan_of(model, (2, 2), (1, 1), (1, 2), sequence_parallel=True)], elastic=False
            )


def test_rows_of_a_vocabulary_that_no_rank_has_a_part_of() -> None:
    """Each rank has its rows' logits and losses."""
    values, _ = usual_config("qwen2")
    found = comparing.check({**values, "vocab_size": 255}, 2, sequence_parallel=True)
    assert found.passed, found.explain()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_the_page_of_families_is_what_the_command_prints() -> None:
    """But for the figures, which differ in their last digits from machine to machine."""
    printed = run("list", "--markdown")
    assert printed.exit_code == 0
    figure = re.compile(r"\de[+-]\d\d")
    assert figure.sub("x", printed.stdout) == figure.sub("x", PAGE.read_text())
    assert "FAILED" not in printed.stdout and "differs from" not in printed.stdout
