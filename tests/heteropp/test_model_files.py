"""A Hugging Face config.json given where a model file is expected."""

from __future__ import annotations

import json

import pytest

from heteropp.description.files import FileError
from heteropp.description.model import read_model
from heteropp.models.llama.model import LlamaModel, RopeScaling

# as Llama 2 70B's config.json says it
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}


def write(folder, changes: dict):
    path = folder / "config.json"
    content = {**LLAMA, **changes}
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))
    return path


def test_a_config_of_the_llama_family(tmp_path) -> None:
    folder = tmp_path / "llama-70b"
    folder.mkdir()
    assert read_model(write(folder, {})) == LlamaModel(
        name="llama-70b",
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        intermediate=28672,
        vocab=32000,
        sequence_length=4096,
        norm_eps=1e-5,
        dtype="float16",
    )


def test_what_a_config_may_leave_out(tmp_path) -> None:
    absent = dict.fromkeys(("num_key_value_heads", "torch_dtype", "rms_norm_eps"), "absent")
    model = read_model(write(tmp_path, {**absent, "rope_theta": 5e5}))
    assert (model.kv_heads, model.dtype, model.norm_eps) == (64, "float32", 1e-6)
    assert model.rope_theta == 5e5


def test_what_mistral_s_config_leaves_out_is_transformers_default(tmp_path) -> None:
    """Not Llama's: it has 8 heads of keys and values, and a sliding window."""
    absent = {"model_type": "mistral", "num_key_value_heads": "absent"}
    model = read_model(write(tmp_path, {**absent, "sliding_window": None}))
    assert model.family == "llama" and model.kv_heads == 8  # type: ignore[attr-defined]
    every = {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": None}
    assert read_model(write(tmp_path, every)).kv_heads == 64  # type: ignore[attr-defined]
    model = read_model(write(tmp_path, {**absent, "num_hidden_layers": 2}), 8192)
    assert model.family == "hugging_face"
    assert model.config.values().get("sliding_window", 4096) == 4096  # type: ignore[attr-defined]


# as Llama 3.1's config.json says it
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 5e5, "rope_scaling": SCALING},
        {"rope_parameters": {"rope_theta": 5e5, **SCALING}},  # since transformers 5
    ],
)
def test_scaled_angles_and_tied_embeddings(tmp_path, said: dict) -> None:
    model = read_model(write(tmp_path, {"tie_word_embeddings": True, **said}).parent)
    expected = {name: value for name, value in SCALING.items() if name != "rope_type"}
    assert model.rope_theta == 5e5
    assert model.rope_scaling == RopeScaling(**expected)  # type: ignore[arg-type]
    assert model.tied_embeddings


UNSUPPORTED = {
    "another family": (
        {"model_type": "bert"},
        "model_type bert has no layers between a table and a head",
    ),
    "no family": ({"model_type": "absent"}, "model_type: missing"),
    "no layers": ({"num_hidden_layers": "absent"}, "num_hidden_layers: missing"),
    "layers is text": ({"num_hidden_layers": "80"}, "num_hidden_layers"),
    "angles scaled by halves": (
        {"rope_scaling": {**SCALING, "low_freq_factor": None}},
        "rope_scaling.low_freq_factor: missing",
    ),
    "angles scaled backwards": (
        {"rope_scaling": {**SCALING, "low_freq_factor": 8.0}},
        "rope_scaling has low_freq_factor 8.0 and high_freq_factor 4.0",
    ),
    "angles scaled by nothing": (
        {"rope_scaling": {**SCALING, "factor": 0}},
        "rope_scaling.factor is 0.0; expected at least 1",
    ),
    "no heads": ({"num_attention_heads": 0, "head_dim": 128}, "head_dim is 128"),
    "an unknown dtype": ({"torch_dtype": "float8"}, "dtype is 'float8'"),
    "heads that do not divide": ({"num_key_value_heads": 7}, "heads 64 is not a multiple"),
    "negative layers": ({"num_hidden_layers": -1}, "layers is -1"),
}
# what our own modules have no form of, and transformers' have
OF_TRANSFORMERS = {
    "biases": ({"attention_bias": True}, "attention_bias is True; expected False"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'silu'"),
    "angles scaled otherwise": (
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling.rope_type is 'linear'; expected 'default' or 'llama3'",
    ),
    "half a head turned": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor is 0.5; expected 1",
    ),
    "a sliding window": ({"sliding_window": 4096}, "sliding_window is 4096"),
    "heads of their own size": ({"head_dim": 256}, "head_dim is 256"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_an_unsupported_config_is_one_sentence(tmp_path, kind: str) -> None:
    changes, expected = UNSUPPORTED[kind]
    path = write(tmp_path, changes)
    with pytest.raises(FileError) as error:
        read_model(path)
    assert expected in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", OF_TRANSFORMERS)
def test_a_form_that_is_not_ours_is_left_to_transformers(
    tmp_path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    changes, expected = OF_TRANSFORMERS[kind]
    path = write(tmp_path, changes)
    assert read_model(path, 64).family == "hugging_face"
    monkeypatch.setattr("heteropp.description.model.find_spec", lambda _: None)
    with pytest.raises(FileError) as error:
        read_model(path)
    assert expected in str(error.value) and "pip install" in str(error.value)


def test_a_config_that_is_no_object(tmp_path) -> None:
    path = tmp_path / "config.json"
    for text in ("[1]", "{", ""):
        path.write_text(text)
        with pytest.raises(FileError, match=r"config\.json"):
            read_model(path)
