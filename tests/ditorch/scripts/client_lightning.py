"""Lightning's Trainer and Fabric: nothing in it names a device, but for the words it is given."""

import json
import sys

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import ditorch


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        self.losses: list[float] = []
        self.on: set[str] = set()

    def training_step(self, batch, index):
        y = self.layers(batch[0])
        loss = torch.nn.functional.mse_loss(y.float(), batch[1])
        self.losses.append(loss.item())
        self.on |= {str(y.device), str(self.device), str(y.dtype)}
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.1)


options = dict(argument.split("=") for argument in sys.argv[1:])
torch.manual_seed(0)
rows = TensorDataset(torch.randn(12, 4), torch.randn(12, 2))
module = Module()
lightning.Trainer(
    max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, **options,
).fit(module, DataLoader(rows, batch_size=4))  # fmt: skip
fabric = lightning.Fabric()
print(json.dumps([sorted(module.on), module.losses, str(fabric.device), str(ditorch.device)]))
