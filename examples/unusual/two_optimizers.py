"""Two optimizers for one model: Muon (PyTorch 2.9) for the matrices inside, AdamW for the rest, in one small class."""

import sys
from typing import Any

import gem_client
import torch
from gem_client.torch import Optimizer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Both:
    """Several optimizers as one. Each steps its own parameters."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
named = list(model.named_parameters())
muon = torch.optim.Muon([(name, p) for name, p in named if p.ndim == 2], lr=0.02)
adamw = torch.optim.AdamW([(name, p) for name, p in named if p.ndim != 2], lr=0.003)

with gem_client.connect("127.0.0.1:50051") as session:
    optimizer = Optimizer(Both(muon, adamw), session)  # type: ignore[arg-type]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(part, T_max=4) for part in (muon, adamw)]
    for epoch in range(4):
        for inputs, targets in DataLoader(data, 64, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step(loss=loss)
        for scheduler in schedulers:
            scheduler.step()
        print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
    optimizer.load_final()
