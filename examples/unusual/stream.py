"""A stream: the server deals files, and a worker reads those that it gets. The file of one that dies goes to another."""

import email
from collections.abc import Iterator
from pathlib import Path

import gem_client
import torch
from gem_client.torch import Optimizer, ShardSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

LENGTH = 33
files = sorted(Path(email.__file__).parent.glob("*.py"))  # sorted: the same order in every worker


class Windows(IterableDataset[Tensor]):
    """A file's bytes, in windows. Nothing has to know how many there are."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Tensor]:
        with self.path.open("rb") as file:
            while len(window := file.read(LENGTH)) == LENGTH:
                yield torch.tensor(list(window))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
with gem_client.connect("127.0.0.1:50051") as session:
    optimizer = Optimizer(torch.optim.AdamW(model.named_parameters(), lr=0.01), session)
    sampler = ShardSampler(session, files)
    while not sampler.complete:
        for file in sampler.items():
            for windows in DataLoader(Windows(file), batch_size=64):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
                loss.backward()
                optimizer.step(loss=loss)
            print(f"{file.name} loss {loss.item():.6f}", flush=True)
        optimizer.finish()
    optimizer.load_final()
