"""Training steps of a model of transformers, which a device with all kernels computes alone.

They have documents kept apart, dropout, a loss scale, clipping and AdamW.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

STEPS = 4  # the last one with dropout

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
scaler = torch.amp.GradScaler("device", init_scale=2.0**8, growth_interval=2)
tokens = torch.randint(0, 256, (2, 32)).to("device")
documents = torch.cat([torch.arange(20), torch.arange(12)]).expand(2, 32).to("device")
targets = tokens.clone()
targets[0, :9] = -100

def step():
    loss = model(input_ids=tokens, labels=targets, position_ids=documents).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.item()

losses = [step() for _ in range(3)]
for layer in model.model.layers:  # other elements are dropped than the CPU drops
    layer.self_attn.attention_dropout = 0.1
dropped = step()
assert dropped < losses[0]
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
