"""A family's weights begin as transformers begins them: what is no draw is the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heteropp.models.hugging_face.check import small_model
from heteropp.models.hugging_face.config import Config
from heteropp.models.hugging_face.usual import usual_config


def theirs(config: Config, seed: int) -> dict[str, Tensor]:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = config.values()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values["model_type"]](**values))
    base = f"{model.base_model_prefix}."
    return {name.removeprefix(base): value for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "model_type, of_layers",
    [
        ("apertus", ("mlp.act_fn.alpha_p", "mlp.act_fn.beta", "mlp.act_fn.eps")),
        ("minimax", ("self_attn.slope_rate", "self_attn.query_decay")),
        ("qwen3_next", ("linear_attn.dt_bias", "linear_attn.norm.weight")),
        ("mamba2", ("mixer.A_log", "mixer.D")),
    ],
)
def test_what_no_seed_changes_is_as_transformers_begins(
    model_type: str, of_layers: tuple[str, ...]
) -> None:
    model = small_model(usual_config(model_type)[0])
    ours = dict(model.initial_values((0, model.layers), 0))
    one, two = theirs(model.config, 1), theirs(model.config, 2)
    fixed = {name for name, value in one.items() if torch.equal(value, two[name])} & set(ours)
    for name in fixed:
        assert torch.equal(ours[name].float(), one[name].float()), name
    for end in of_layers:
        assert sum(name.endswith(end) for name in fixed) > 1, end
    drawn = ours.keys() - fixed
    assert drawn and all(ours[name].std() > 0 for name in drawn)
