"""A chip's right kernels pass the standards over a training step. Run by test_compare.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check_training import SEQUENCE, VOCABULARY, Model
from torch import nn

import ditorch
from ditorch.precision.compare import Compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_training_step(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Model().to(ditorch.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1)).to(ditorch.device)
    with Compare() as compare:
        with torch.autocast(ditorch.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = compare.findings()
    assert found.passed, found.summary
    assert [each.operator for each in found.operators if each.threshold == "not compared"] == []
    for each in found.operators:  # addmm's product and sum are each rounded: half an ulp, twice
        margin = 1.0 if each.operator == "aten.addmm.default" else 0.8
        assert each.errors.worst_share_of_threshold <= margin, each
    own = {each.operator: each.dtype for each in found.operators if each.host_calls < each.calls}
    assert {
        "aten.mm.default",
        "aten._softmax_backward_data.default",
        "aten._fused_rms_norm_backward.default",
        "aten.native_layer_norm_backward.default",
        "aten._log_softmax_backward_data.default",
    } <= set(own)
    products = {each.dtype for each in found.operators if each.operator == "aten.mm.default"}
    assert products == {str(dtype).removeprefix("torch.")}
