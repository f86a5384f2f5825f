"""A worker that trains a model with BatchNorm in mixed precision, with a GradScaler."""

import argparse

import gem_client
import torch
from gem_client.torch import Optimizer, ShardSampler, update_statistics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

HELD_OUT = 360


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", help="address of gem-server")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if there is one")
    parser.add_argument("--scale", type=float, default=2.0**16, help="the GradScaler's first scale; one too large overflows")
    options = parser.parse_args()
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    data = TensorDataset(inputs[HELD_OUT:], targets[HELD_OUT:])
    model = make_model().to(device)
    scaler = torch.amp.GradScaler(device, init_scale=options.scale)

    with gem_client.connect(options.server) as session:
        optimizer = Optimizer(torch.optim.AdamW(model.named_parameters(), lr=0.003), session)
        sampler = ShardSampler(session, data)
        while not sampler.complete:
            for batch, labels in sampler.loader():
                optimizer.zero_grad()
                with torch.autocast(device, torch.float16):
                    loss = nn.functional.cross_entropy(model(batch.to(device)), labels.to(device))
                scaler.scale(loss).backward()
                scale = scaler.get_scale()
                scaler.step(optimizer, loss=loss)
                scaler.update()
                if scaler.get_scale() < scale:  # an overflow: the scaler made no step
                    optimizer.skip()
            optimizer.finish()
        optimizer.load_final()
        print(f"skipped {session.skipped} batches that overflowed")

    # The server has no statistics of BatchNorm, and this worker's belong to θ as it was on the way.
    update_statistics(model, DataLoader(data, 256))
    model.eval()
    with torch.no_grad():
        right = model(inputs[:HELD_OUT].to(device)).argmax(dim=1).cpu() == targets[:HELD_OUT]
    print(f"accuracy {right.float().mean().item():.4f}")


if __name__ == "__main__":
    main()
