"""Sparse embeddings: ratings as products of a user's and a film's vector. SparseAdam steps only the rows in the batch.

A commit is dense all the same: it takes as long as for a model without sparse gradients.
"""

import gem_client
import torch
from gem_client.torch import Optimizer, ShardSampler
from torch import Tensor, nn
from torch.utils.data import TensorDataset

USERS, FILMS, RANK, RATINGS = 200, 100, 4, 4096
torch.manual_seed(0)
users, films = torch.randint(USERS, (RATINGS,)), torch.randint(FILMS, (RATINGS,))
tastes, traits = torch.randn(USERS, RANK), torch.randn(FILMS, RANK)
data = TensorDataset(users, films, (tastes[users] * traits[films]).sum(dim=1))


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(USERS, RANK, sparse=True), nn.Embedding(FILMS, RANK, sparse=True)

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        return torch.sum(self.users(users) * self.films(films), dim=1)


model = Factors()
with gem_client.connect("127.0.0.1:50051") as session:
    optimizer = Optimizer(torch.optim.SparseAdam(list(model.named_parameters()), lr=0.05), session)
    sampler = ShardSampler(session, data)
    for epoch in sampler.epochs():
        for users, films, ratings in epoch.loader():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(users, films), ratings)
            loss.backward()
            optimizer.step(loss=loss)
        optimizer.finish()
        print(f"epoch {epoch} loss {loss.item():.6f}", flush=True)
    optimizer.load_final()
