"""Ten steps of a Llama on the device lose as much as on the CPU, by the device's own kernels."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import ditorch

sys.path.insert(0, str(Path("tests/ditorch/checks").resolve()))
from check_training import SEQUENCE, VOCABULARY, Model


def train(device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        tokens = torch.randint(VOCABULARY, (2, SEQUENCE + 1)).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


here, there = train("cpu"), train("device")
for expected, loss in zip(here[0], there[0], strict=True):
    assert abs(loss - expected) < 2e-5 * abs(expected), (here[0], there[0])
for name, expected in here[1].items():
    torch.testing.assert_close(there[1][name], expected, rtol=1e-3, atol=1e-4, msg=name)
own = {name for name, runs in ditorch.kernel_counts().items() if runs}
wanted = {"mm", "_fused_rms_norm", "_fused_rms_norm_backward", "native_layer_norm", "_softmax"}
assert wanted <= own, own
print("done")
