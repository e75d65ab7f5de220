"""DITORCH_STRICT=1 turns what the host would compute into an error."""

from __future__ import annotations

import pytest
from on_chip import run_python

MODEL = """
import torch, ditorch
from torch import nn
class Running(nn.Module):
    def forward(self, x):
        return torch.cumprod(x, 0)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.SiLU(), Running()))
model = model.to("device")
x = torch.ones(2, 4, dtype=torch.float32).to("device")
"""


def test_the_operator_the_dtypes_and_the_module_are_named() -> None:
    code = MODEL + "try:\n    model(x)\nexcept NotImplementedError as error:\n    print(error)\n"
    done = run_python(code, "b-mini", DITORCH_STRICT="1")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]
    for part in ("DITORCH_STRICT=1", "aten::cumprod", "(Float)", "Sequential.1.1", "emuchip"):
        assert part in line, line


def test_outside_of_modules_it_says_so_and_the_next_operator_runs() -> None:
    code = MODEL + (
        "try:\n    x.double().cumprod(0)\nexcept NotImplementedError as error:\n    print(error)\n"
        "print((x @ x.t() + 1).sum().item())\n"
    )
    done = run_python(code, "b-mini", DITORCH_STRICT="1")
    assert done.returncode == 0, done.stderr
    assert "(Double) in no module's forward" in done.stdout
    assert done.stdout.splitlines()[-1] == "20.0"


def test_without_it_the_host_computes() -> None:
    done = run_python(MODEL + "print(model(x).shape)", "b-mini")
    assert done.stdout.strip() == "torch.Size([2, 4])", done.stderr


def test_another_value_is_refused() -> None:
    done = run_python("import ditorch", "b-mini", DITORCH_STRICT="yes")
    assert done.returncode != 0
    assert "DITORCH_STRICT is 'yes', expected 0 or 1" in done.stderr


STEP = """
import sys, torch, ditorch
import transformers

sizes = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=64, head_dim=16,
)
experts = dict(num_experts_per_tok=2, num_experts=4, num_local_experts=4, moe_intermediate_size=32)
family, attention = sys.argv[1:]
if family in ("Mixtral", "Qwen3Moe"):
    sizes |= experts
torch.manual_seed(0)
config = getattr(transformers, f"{family}Config")(**sizes, attn_implementation=attention)
model = getattr(transformers, f"{family}ForCausalLM")(config).to("device").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)
tokens = torch.randint(0, 256, (2, 32)).to("device")
targets = tokens.clone()
targets[0, :9] = -100
losses = []
for _ in range(3):
    loss = model(input_ids=tokens, labels=targets).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses, ditorch.fallback_counts())
"""


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("Llama", "eager"),
        ("Mixtral", "sdpa"),
        pytest.param("Qwen3", "sdpa", marks=pytest.mark.long),
        pytest.param("Qwen3Moe", "eager", marks=pytest.mark.long),
    ],
)
def test_the_host_computes_nothing_of_a_training_step(family: str, attention: str) -> None:
    def losses(chip: str | None, **extra: str) -> list[float]:
        code = f"import sys; sys.argv[1:] = {[family, attention]}\n{STEP}"
        done = run_python(code, chip, **extra)
        assert done.returncode == 0, done.stderr
        found, _, counts = done.stdout.strip().rpartition(" {")
        assert counts == "}"
        return [float(each) for each in found.strip("[]").split(",")]

    found, expected = losses("b-mini", DITORCH_STRICT="1"), losses(None)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[2] < found[0]
