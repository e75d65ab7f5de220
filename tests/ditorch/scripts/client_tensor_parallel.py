"""A model of transformers over the ranks of torchrun: prints its device, backend and losses."""

import json
import os
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import ditorch  # noqa: F401

folder = sys.argv[1]
if "RANK" not in os.environ:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    parallel = {}
else:
    parallel = {"tp_plan": "auto"}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **parallel)
tokens = torch.arange(24).reshape(2, 12).to(model.device)
losses = []
for _ in range(2):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
    losses.append(loss.item())
backend = torch.distributed.get_backend() if parallel else None
said = json.dumps([str(model.device), backend, losses])
print(said + "\n", end="", flush=True)  # one write, so that ranks' lines stay apart
