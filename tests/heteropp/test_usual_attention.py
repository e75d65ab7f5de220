"""How a model attends where its file does not say, by the chips that it is planned for."""

from __future__ import annotations

from pathlib import Path

import pytest
from remote_family import MODELING, write_scaled
from tiny_decoders import tiny_config
from training_run import NEUTRAL_CHIP

import heteropp
from heteropp.api.attention import with_usual_attention
from heteropp.description.cluster import read_cluster
from heteropp.description.model import read_model
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.llama.model import LlamaModel

MODEL = """
family = "llama"
name = "tiny"
layers = 4
hidden = 32
heads = 4
kv_heads = 2
intermediate = 48
vocab = 256
sequence_length = 16
"""


def attention(model: Path, *chips: str | Path) -> str:
    """How the model is planned to attend on a node of each chip."""
    cluster = model.with_name("cluster.toml")
    nodes = "".join(f'[[nodes]]\nchip = "{chip}"\nchips = 1\n' for chip in chips)
    cluster.write_text(f'name = "small"\n{nodes}')
    plan = heteropp.plan(model, cluster, global_batch=4, planner="heteroauto")
    assert isinstance(plan.model, LlamaModel)
    return plan.model.attention


@pytest.fixture
def neutral(tmp_path: Path) -> Path:
    """A chip that computes with the host's kernels, of which none is an attention."""
    path = tmp_path / "neutral.toml"
    path.write_text(NEUTRAL_CHIP.format(chips_per_node=1, capacity_bytes=1 << 30))
    return path


def test_it_is_fused_where_every_chip_has_the_kernel(tmp_path: Path, neutral: Path) -> None:
    model = tmp_path / "model.toml"
    model.write_text(MODEL)
    assert attention(model, "b-mini", "c-mini") == "fused"
    assert attention(model, "b-mini", neutral) == "explicit"
    for said in ("explicit", "fused"):
        model.write_text(f'{MODEL}attention = "{said}"\n')
        assert attention(model, "b-mini", "c-mini") == said


@pytest.mark.parametrize(
    ("family", "expected"),
    [("mistral", "fused"), ("gemma2", "fused"), ("gpt_oss", "explicit")],  # soft cap, sinks
)
def test_a_model_that_keeps_scores_in_any_case_does_so(
    tmp_path: Path, family: str, expected: str
) -> None:
    tiny_config(family, layers=2).save_pretrained(tmp_path)
    model = with_usual_attention(read_model(tmp_path), read_cluster("quickstart"))
    assert isinstance(model, HuggingFaceModel) and model.attention == expected


def test_values_may_be_wider_than_keys_and_seen_through_a_window(tmp_path: Path) -> None:
    folder = write_scaled(tmp_path / "wide", weights=False)
    text = (folder / MODELING).read_text()
    for was, wide in (
        ("self.is_causal = True", "self.is_causal, self.sliding_window = True, 8"),
        ("self.v_proj = nn.Linear(config.hidden_size, kv", "{}, 2 * kv"),
        ("self.o_proj = nn.Linear(config.hidden_size", "self.o_proj = nn.Linear(2 * kv * 2"),
        ("self.v_proj(hidden_states).view(shape)", "self.v_proj(hidden_states).view(WIDE)"),
        ("scaling=self.scaling, **others", "scaling=self.scaling, sliding_window=8, **others"),
    ):
        assert was in text
        text = text.replace(was, wide.format(was.removesuffix(", kv")))
    wide = "(*hidden_states.shape[:-1], -1, 2 * self.head_dim)"
    (folder / MODELING).write_text(text.replace("WIDE", wide))
    model = read_model(folder, 32, trust_remote_code=True)
    found = with_usual_attention(model, read_cluster("quickstart"))
    assert isinstance(found, HuggingFaceModel) and found.attention == "fused"
    assert found.fused_head_sizes == {(8, 16)}
