"""A chip's right kernels pass the standards. Run by test_compare.py on every chip."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from check_training import SEQUENCE, VOCABULARY, Model
from torch import nn

import ditorch
from ditorch.precision.compare import Compare
from ditorch.precision.fallback import Fallback
from ditorch.precision.results import OperatorFinding


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


def test_log_probabilities_near_0() -> None:
    """log(sum) rounds a number near 1, however small the result: that is no fault of the chip."""
    torch.manual_seed(0)
    with Compare(operators="_log_softmax") as compare:
        for lead in (1, 5, 10, 14, 20):
            scores = torch.randn(64, 64)
            scores[:, 0] += lead
            scores.to(ditorch.device).log_softmax(-1)
    (found,) = compare.findings().operators
    assert found.passed, found.reason


def embedding_gradient(terms: int, spread: float) -> OperatorFinding:
    """Returns what Compare finds of the embedding gradient of a token that occurs `terms` times.

    The host, which sums it in bfloat16, computes the gradient in the chip's stead.
    """
    torch.manual_seed(0)
    gradient = (1 + spread * torch.randn(terms, 64)).bfloat16().to(ditorch.device)
    tokens = torch.zeros(terms, dtype=torch.long, device=ditorch.device)
    operator = "embedding_dense_backward"
    with Compare(operators=operator) as compare, Fallback(operators=operator):
        torch.ops.aten.embedding_dense_backward(gradient, tokens, 4, -1, False)
    (found,) = compare.findings().operators
    return found


def test_embedding_gradients_may_be_summed_in_their_own_dtype_while_the_sum_grows() -> None:
    for terms in (1, 8, 64, 256, 512):
        found = embedding_gradient(terms, spread=0.3)
        assert found.passed, found.reason
    assert not embedding_gradient(2048, spread=0.0).passed  # it stops at 256
