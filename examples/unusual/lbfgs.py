"""LBFGS: a step evaluates its closure up to 20 times, and is one commit. Each worker has points of its own on one curve."""

import sys

import gem_client
import torch
from gem_client.torch import Optimizer
from torch import Tensor, nn

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
inputs = 6 * torch.rand(256, 1) - 3
targets = torch.sin(2 * inputs)
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))


def closure() -> Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


with gem_client.connect("127.0.0.1:50051") as session:
    inner = torch.optim.LBFGS(model.named_parameters(), line_search_fn="strong_wolfe")
    optimizer = Optimizer(inner, session)
    for step in range(10):
        loss = optimizer.step(closure)
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    optimizer.load_final()
