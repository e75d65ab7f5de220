"""Training steps of a model of transformers, which a device with all kernels computes alone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

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


def losses(
    run: Callable[[str], subprocess.CompletedProcess[str]], family: str, attention: str
) -> list[float]:
    """The loss of each step in the process that `run` starts; the host computed nothing of them."""
    done = run(f"import sys; sys.argv[1:] = {[family, attention]}\n{STEP}")
    assert done.returncode == 0, done.stderr[-3000:]
    found, _, counts = done.stdout.strip().rpartition(" {")
    assert counts == "}"
    return [float(each) for each in found.strip("[]").split(",")]
