"""A GAN: two models, so two servers and two sessions. The first deals the data, the second runs until its workers leave."""

import sys

import gem_client
import torch
from gem_client.torch import Optimizer, ShardSampler
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
NOISE = 8
angles = torch.arange(2048) * 2 * torch.pi / 2048
circle = TensorDataset(torch.stack([angles.cos(), angles.sin()], dim=1))


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.named_parameters(), lr=0.001, betas=(0.5, 0.999))


def says(points: torch.Tensor, real: float) -> torch.Tensor:
    """How wrong the discriminator is if these points are real (1) or made (0)."""
    scores = discriminator(points)
    return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


generator, discriminator = network(NOISE, 2), network(2, 1)
with gem_client.connect("127.0.0.1:50051") as first, gem_client.connect("127.0.0.1:50061") as second:
    of_discriminator, of_generator = Optimizer(adam(discriminator), first), Optimizer(adam(generator), second)
    sampler = ShardSampler(first, circle)
    for epoch in sampler.epochs():
        for (points,) in epoch.loader():
            made = generator(torch.randn(len(points), NOISE))
            of_discriminator.zero_grad()
            loss = says(points, 1.0) + says(made.detach(), 0.0)
            loss.backward()
            of_discriminator.step(loss=loss)
            of_generator.zero_grad()
            loss_of_generator = says(made, 1.0)
            loss_of_generator.backward()
            of_generator.step(loss=loss_of_generator)
        of_discriminator.finish()
        radius = made.detach().norm(dim=1).mean()
        print(f"epoch {epoch} loss {loss.item():.6f} {loss_of_generator.item():.6f} radius {radius:.3f}", flush=True)
    for optimizer in (of_discriminator, of_generator):  # every worker in the same order: each waits for the others
        optimizer.load_final()
