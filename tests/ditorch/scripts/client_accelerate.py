"""A script of accelerate's, as people write it: nothing in it names a device."""

import json
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import ditorch

accelerator = Accelerator(mixed_precision=sys.argv[1])
torch.manual_seed(0)
rows = TensorDataset(torch.randn(24, 4), torch.randn(24, 2))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
loader = DataLoader(rows, batch_size=8 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
scaler = accelerator.scaler
on = {str(loss.device), str(x.device), *(str(p.device) for p in model.parameters())}
said = [sorted(on), losses, bool(scaler and scaler.is_enabled()), str(ditorch.device)]
print(json.dumps(said) + "\n", end="", flush=True)  # one write, so that ranks' lines stay apart
accelerator.end_training()
