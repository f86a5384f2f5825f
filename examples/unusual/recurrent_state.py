"""A language model whose state goes on from window to window: each worker reads the text in order, from a place of its own."""

import sys

import gem_client
import torch
from gem_client.torch import Optimizer
from torch import nn

SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 0
STREAMS, WINDOW = 8, 16  # texts read side by side; characters in a window
torch.manual_seed(SEED)
text = torch.frombuffer(bytearray("the quick brown fox jumps over the lazy dog. " * 400, "ascii"), dtype=torch.uint8).long()
streams = text.roll(-997 * SEED)[: len(text) // STREAMS * STREAMS].view(STREAMS, -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(128, 32), nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 128)

    def forward(
        self, codes: torch.Tensor, state: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        hidden, state = self.lstm(self.embedding(codes), state)
        return self.head(hidden), tuple(part.detach() for part in state or ())


model = Model()
with gem_client.connect("127.0.0.1:50051") as session:
    optimizer = Optimizer(torch.optim.AdamW(model.named_parameters(), lr=0.003), session)
    state: tuple[torch.Tensor, ...] | None = None  # this worker's own: the server knows nothing of it
    for begin in range(0, streams.shape[1] - WINDOW - 1, WINDOW):
        window = streams[:, begin : begin + WINDOW + 1]
        optimizer.zero_grad()
        scores, state = model(window[:, :-1], state)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(loss=loss)
        if begin // WINDOW % 20 == 0:
            print(f"step {begin // WINDOW} loss {loss.item():.6f}", flush=True)
    optimizer.load_final()
