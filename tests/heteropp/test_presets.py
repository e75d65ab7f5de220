"""The papers' clusters and models, against the figures that the papers give."""

from __future__ import annotations

from pathlib import Path

import pytest

import heteropp.description.presets
from heteropp.description.chips import chip_names, load_chip
from heteropp.description.cluster import read_cluster
from heteropp.description.files import FileError
from heteropp.description.model import read_model
from heteropp.description.presets import cluster_names, model_names
from heteropp.models.llama.model import LlamaModel

# chips by type; nodes
CLUSTERS = {
    "h2-256-a": ({"a": 256}, 16),
    "h2-256-b": ({"b": 256}, 32),
    "h2-256-c": ({"c": 256}, 16),
    "h2-256-d": ({"d": 256}, 32),
    "h2-exp-a": ({"a": 256, "b": 256, "c": 256}, 64),
    "h2-exp-b": ({"a": 256, "b": 256, "c": 256, "d": 256}, 96),
    "h2-exp-c": ({"a": 384, "b": 1024}, 152),
    "h2-exp-d": ({"a": 384, "b": 2048}, 280),
    "autohet": ({"a100": 8, "h800": 8, "h20": 8}, 3),
    "autohet-4a100-2h800": ({"a100": 4, "h800": 2}, 2),
    "autohet-1a100-4h20": ({"a100": 1, "h20": 4}, 2),
    "autohet-64": ({"a100": 32, "h800": 16, "h20": 16}, 8),
    "hetu-16h800-32h20": ({"h800": 16, "h20": 32}, 6),
    "hetu-31h20": ({"h20": 31}, 4),
    "zorse-a": ({"h100-nvl": 4, "a100": 16}, 4),
    "zorse-b": ({"a100-40gb": 8, "a10g": 16, "v100": 16, "t4": 24}, 8),
    "zorse-c": ({"a10g": 16, "v100": 16, "t4": 96}, 16),
    "metis-16-16": ({"a100": 16, "v100": 16}, 8),
    "metis-128-128": ({"a100": 128, "v100": 128}, 64),
}
# billions of parameters, as the papers call their models; layers
MODELS = {
    "h2-100b": (100, 96),
    "autohet-bert-large": (0.34, 24),
    "autohet-gpt3-6.7b": (6.7, 32),
    "autohet-llama-6.7b": (6.7, 32),
    "hetu-32b": (32, 60),
    "hetu-70b": (70, 80),
    "metis-gpt2-10": (2.5, 10),
    "metis-gpt2-20": (4.5, 20),
    "metis-gpt2-40": (8.5, 40),
    **{f"zorse-{c}-llama-7b": (6.7, 32) for c in "abc"},
    **{f"zorse-{c}-llama-13b": (13, 40) for c in "abc"},
    **{f"zorse-{c}-llama-33b": (32.5, 60) for c in "abc"},
    "zorse-a-llama-65b": (65.2, 80),
    "llama-3.1-405b": (405.9, 126),
}
# billions of parameters, all and those that a token meets, as their makers say; layers
OF_EXPERTS = {
    "qwen3-30b-a3b": (30.5, 3.3, 48),
    "mixtral-8x7b": (46.7, 12.9, 32),
    "deepseek-v3": (671, 37, 61),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_papers_cluster(name: str) -> None:
    chips, nodes = CLUSTERS[name]
    cluster = read_cluster(name)
    assert {chip: len(cluster.ranks_of(chip)) for chip in cluster.chip_names()} == chips
    assert len(cluster.nodes) == nodes


@pytest.mark.parametrize("name", MODELS)
def test_a_papers_model(name: str) -> None:
    billions, layers = MODELS[name]
    model = read_model(name)
    assert model.layers == layers
    assert parameters(model) / 1e9 == pytest.approx(billions, rel=0.1)


def parameters(model: LlamaModel) -> int:
    attention = 2 * model.hidden**2 + 2 * model.hidden * model.kv_heads * model.head_size
    layer = attention + 3 * model.hidden * model.intermediate
    return model.layers * layer + 2 * model.vocab * model.hidden


def test_every_preset_is_called_as_its_file() -> None:
    assert {name: read_cluster(name).name for name in cluster_names()} == {
        name: name for name in cluster_names()
    }
    assert {name: read_model(name).name for name in model_names()} == {
        name: name for name in model_names()
    }


def test_a_model_fits_the_tensor_parallel_degrees_of_its_paper() -> None:
    for name, degrees in [("h2-100b", (4, 8)), ("hetu-32b", (4,)), ("hetu-70b", (8,))]:
        model = read_model(name)
        for tp in degrees:
            assert model.kv_heads % tp == model.intermediate % tp == model.vocab % tp == 0


def test_zorses_total_of_cluster_a() -> None:
    """Table 4: 8332 TFLOPS."""
    cluster = read_cluster("zorse-a")
    total = sum(cluster.chip(rank).compute.float16_flops for rank in range(cluster.world_size))
    assert total == pytest.approx(8332e12, rel=1e-3)


def test_every_chip_file_says_where_its_figures_are_from() -> None:
    for name in chip_names():
        text = load_chip(name).path.read_text()
        assert "data sheet" in text or "H2 paper" in text or "twin" in text, name


def test_every_chip_file_is_called_as_its_chip_type() -> None:
    assert {name: load_chip(name).chip_type for name in chip_names()} == {
        name: name.upper() for name in chip_names()
    }


# TFLOPS of bfloat16, GiB, TB/s: of a module as its maker sells it, and the chips that it shows
SOLD = {
    "h100": (989.5, 80, 3.35, 1),
    "h200": (989.5, 141, 4.8, 1),
    "l40s": (362, 48, 0.864, 1),
    "rtx-4090": (165.2, 24, 1.008, 1),
    "rtx-5090": (209.5, 32, 1.792, 1),
    "mi250x": (383, 128, 3.2, 2),
    "mi300x": (1307.4, 192, 5.3, 1),
    "ascend-910b": (353.9, 64, 1.76, 1),
    "ascend-910c": (707.8, 128, 3.52, 2),
    "mlu370": (96, 48, 0.6144, 2),
    "metax-c500": (280, 64, 1.8, 1),
    "mtt-s4000": (100, 48, 0.768, 1),
    "mtt-s5000": (500, 80, 1.6, 1),
    "kunlun-p800": (345, 96, 1.8, 1),
    "gaudi2": (432, 96, 2.46, 1),
    "gaudi3": (1835, 128, 3.67, 1),
}


@pytest.mark.parametrize("name", SOLD)
def test_a_chip_that_is_sold(name: str) -> None:
    tflops, gib, tb_per_s, chips = SOLD[name]
    chip = load_chip(name)
    assert chip.compute.bfloat16_flops * chips / 1e12 == pytest.approx(tflops, rel=1e-3)
    assert chip.memory.capacity_bytes * chips == gib << 30
    assert chip.memory.bandwidth_bytes_per_s * chips / 1e12 == pytest.approx(tb_per_s, rel=1e-2)
    assert chip.chips_per_node % chips == 0 and chip.tp_limit <= chip.chips_per_node


def test_a_name_that_is_no_preset_is_told_the_presets() -> None:
    with pytest.raises(FileError) as error:
        read_cluster("h2-exp-z")
    assert "'h2-exp-z'" in str(error.value) and "h2-exp-d" in str(error.value)
    with pytest.raises(FileError) as error:
        read_model("llama")
    assert "'llama'" in str(error.value) and "hetu-70b" in str(error.value)


def test_a_file_of_a_presets_name_with_a_path_is_the_file(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart.toml").write_text('name = "mine"\n[[nodes]]\nchip = "a-mini"\n')
    assert read_cluster("./quickstart.toml").name == "mine"
    assert read_cluster("quickstart.toml").name == "mine"
    assert read_cluster("quickstart").name == "quickstart"


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_a_model_of_experts(name: str) -> None:
    total, active, layers = OF_EXPERTS[name]
    model = read_model(name)
    assert model.elements() / 1e9 == pytest.approx(total, rel=5e-3)
    assert model.active_elements() / 1e9 == pytest.approx(active, rel=2e-2)
    assert (model.layers, model.attention) == (layers, "fused")
    assert model.training_problem() is None


def test_a_model_file_on_a_config_says_what_it_may_not_have(tmp_path: Path) -> None:
    config = Path(heteropp.description.presets.__file__).parent / "models" / "mixtral-8x7b.json"
    path = tmp_path / "own.toml"
    path.write_text(f'hugging_face = "{config}"\nsequence_length = 64\ndtype = "float32"\n')
    model = read_model(path)
    assert (model.name, model.sequence_length, model.dtype) == ("own", 64, "float32")
    path.write_text(f'hugging_face = "{config}"\nheads = 4\n')
    with pytest.raises(FileError, match=r"own\.toml: heads: unknown key"):
        read_model(path)
    path.write_text('hugging_face = "absent"\n')
    with pytest.raises(FileError, match="absent"):
        read_model(path)
