"""One worker of a run, trained by Lightning: a small transformer learns the next character of the standard library's sources.

python examples/lightning/train.py 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gem_client
import pytorch_lightning as pl
import torch
from gem_client.lightning import GemCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, random_split

MODULES = ("argparse", "dataclasses", "textwrap", "traceback")
CONTEXT = 64  # characters that the model sees
CHARACTERS = 128  # ASCII


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text, and the same windows one character later: int64, shape (CONTEXT,) each."""

    def __init__(self) -> None:
        sources = (find_spec(name) for name in MODULES)
        text = "".join(Path(str(spec.origin)).read_text(encoding="utf-8") for spec in sources if spec)
        self._codes = torch.tensor([code for code in text.encode() if code < CHARACTERS])

    def __len__(self) -> int:
        return (len(self._codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * CONTEXT
        return self._codes[begin : begin + CONTEXT], self._codes[begin + 1 : begin + CONTEXT + 1]


class CharacterTransformer(pl.LightningModule):  # type: ignore[misc]
    """Two layers of causal self-attention. Nothing here knows of a server."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(CHARACTERS, width), nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.to_logits = nn.Linear(width, CHARACTERS)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        length = inputs.shape[1]
        hidden = self.characters(inputs) + self.positions(torch.arange(length, device=inputs.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        logits = self.to_logits(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="the server's address, host:port")
    parser.add_argument(
        "--checkpoints", default="build/lightning", help="folder for ModelCheckpoint (default: build/lightning)"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="pytorch_lightning")  # hints about loaders and loggers
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)

    pl.seed_everything(0)
    training, validation = random_split(Text(), [0.9, 0.1])  # the same split for all workers, by the seed
    with gem_client.connect(options.address) as session:
        gem = GemCallback(session)
        checkpoint = pl.callbacks.ModelCheckpoint(options.checkpoints, session.name)
        trainer = pl.Trainer(
            callbacks=[gem, checkpoint],
            max_epochs=-1,
            gradient_clip_val=1.0,
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stdout.isatty(),
        )
        trainer.fit(CharacterTransformer(), gem.loader(training), DataLoader(validation, batch_size=64))
    print(
        f"validation loss {trainer.callback_metrics['validation_loss']:.3f} after {trainer.global_step} steps of this worker: "
        f"{checkpoint.best_model_path}"
    )


if __name__ == "__main__":
    main()
