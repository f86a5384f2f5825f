"""The best model so far: once an epoch one worker validates θ, and saves it if it is better than the one in the file."""

import os
from pathlib import Path

import gem_client
import torch
from gem_client.torch import Optimizer, ShardSampler
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

HELD_OUT = 360


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def keep_if_best(session: gem_client.Session, file: Path) -> None:
    """Another worker may have saved the last one: so the file has its loss."""
    tensors = session.layout.split(session.read())
    evaluated.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
    with torch.no_grad():
        loss = nn.functional.cross_entropy(evaluated(inputs[:HELD_OUT]), targets[:HELD_OUT]).item()
    session.report_evaluation(loss, version=session.read_version)
    print(f"version {session.read_version} loss {loss:.6f}", flush=True)
    if not file.exists() or loss < torch.load(file)["loss"]:
        torch.save({"loss": loss, "model": evaluated.state_dict()}, "unfinished.pt")
        os.replace("unfinished.pt", file)  # at once: nobody reads half a file


torch.manual_seed(0)
digits = load_digits()
inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
model, evaluated = network(), network()
with gem_client.connect("127.0.0.1:50051") as session:
    optimizer = Optimizer(torch.optim.AdamW(model.named_parameters(), lr=0.1), session)
    best = Path(f"best-{session.run_id}.pt")
    sampler = ShardSampler(session, TensorDataset(inputs[HELD_OUT:], targets[HELD_OUT:]))
    for epoch in sampler.epochs():
        for batch, labels in epoch.loader():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), labels)
            loss.backward()
            optimizer.step(loss=loss)
        optimizer.finish()
        if session.is_first:
            keep_if_best(session, best)
    optimizer.load_final()
    if session.is_first:  # the last to leave; on several machines the file is in a folder that they share
        keep_if_best(session, best)  # the final θ
        model.load_state_dict(torch.load(best)["model"])
