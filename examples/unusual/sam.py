"""SAM (Foret et al., ICLR 2021): a step needs the gradient at another point, so it gets the loss as a closure."""

import sys
from collections.abc import Callable
from typing import Any

import gem_client
import torch
from gem_client.torch import Optimizer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Sam:
    """Has `inner` step by the gradient at the worst point at the distance `radius`."""

    def __init__(self, inner: torch.optim.Optimizer, radius: float) -> None:
        self.inner, self.radius = inner, radius
        self.param_groups, self.state_dict, self.zero_grad = inner.param_groups, inner.state_dict, inner.zero_grad

    def step(self, closure: Callable[[], Tensor]) -> Any:
        loss = closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in moved]
        norm = torch.nn.utils.get_total_norm(p.grad for p in moved)
        with torch.no_grad():
            for p in moved:
                p.add_(p.grad, alpha=float(self.radius / norm))
        closure()
        with torch.no_grad():
            for p, value in zip(moved, before, strict=True):
                p.copy_(value)
        self.inner.step()
        return loss


torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

with gem_client.connect("127.0.0.1:50051") as session:
    optimizer = Optimizer(Sam(torch.optim.AdamW(model.named_parameters(), lr=0.003), 0.05), session)  # type: ignore[arg-type]
    for epoch in range(4):
        for inputs, targets in DataLoader(data, 64, shuffle=True):

            def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
        print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
    optimizer.load_final()
