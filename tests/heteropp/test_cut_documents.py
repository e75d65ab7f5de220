"""heteropp-train --bucket says, before the run, where most tokens of the documents are cut away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training_run import make_plan, tiny_model

from heteropp.api.training.mixed_lengths import say_documents
from heteropp.data.convert import convert
from heteropp.data.documents import Document
from heteropp.data.token_file import open_token_file
from heteropp.data.tokenizer import Bytes


@pytest.mark.parametrize(("length", "warned"), [(10, True), (40, False)])
def test_a_run_that_cuts_most_tokens_away_warns_of_it(
    length: int, warned: bool, tmp_path: Path
) -> None:
    convert([Document(b"x" * 50, "")] * 4, tmp_path / "x.tokens", Bytes())
    plan = make_plan(tiny_model(), (4,), (1,), (1,), (False,))
    plan = replace(plan, model=replace(plan.model, sequence_length=length))
    said = say_documents(open_token_file(tmp_path / "x.tokens"), [plan])
    assert said.startswith("warning: most tokens are cut away") == warned
    assert ("heteropp-data --longest" in said) == warned
    assert "4 are longer and cut" in said
