"""A training loop as people write it: AdamW, a cosine schedule, no weight decay on biases, clipped gradients."""

import sys

import gem_client.torch
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, HELD_OUT = 12, 64, 360

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
digits = load_digits()
inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
loader = DataLoader(TensorDataset(inputs[HELD_OUT:], targets[HELD_OUT:]), BATCH, shuffle=True)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
weights = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
biases = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.003)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
session = gem_client.connect("127.0.0.1:50051")
optimizer = gem_client.torch.Optimizer(optimizer, session, schedule=scheduler)

for epoch in range(EPOCHS):
    for batch, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        scores = model(inputs[:HELD_OUT])
        held_out = nn.functional.cross_entropy(scores, targets[:HELD_OUT]).item()
        right = (scores.argmax(dim=1) == targets[:HELD_OUT]).float().mean().item()
    print(f"epoch {epoch + 1} loss {held_out:.4f} accuracy {right:.4f}", flush=True)
optimizer.load_final()
