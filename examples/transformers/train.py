"""One worker of a run, trained by Hugging Face's Trainer: a small GPT-2 learns the standard library's sources.

python examples/transformers/train.py 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import gem_client
import torch
import transformers
from gem_client.transformers import GemTrainerMixin
from torch import Tensor
from torch.utils.data import Dataset, random_split

MODULES = ("argparse", "dataclasses", "textwrap", "traceback")
CONTEXT = 64  # characters that the model sees
CHARACTERS = 128  # ASCII


class Text(Dataset[dict[str, Tensor]]):
    """Windows of a text, as the models of `transformers` take them: int64, shape (CONTEXT,)."""

    def __init__(self) -> None:
        sources = (find_spec(name) for name in MODULES)
        text = "".join(Path(str(spec.origin)).read_text(encoding="utf-8") for spec in sources if spec)
        self._codes = torch.tensor([code for code in text.encode() if code < CHARACTERS])

    def __len__(self) -> int:
        return len(self._codes) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._codes[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": window, "labels": window}


class Worker(GemTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """The Trainer, as a worker of a run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address", help="the server's address, host:port")
    parser.add_argument("--output", default="build/transformers", help="folder for the model (default: build/transformers)")
    options = parser.parse_args()

    transformers.set_seed(0)
    split = torch.Generator().manual_seed(0)  # the same for all workers
    training, validation = random_split(Text(), [0.9, 0.1], split)
    shape = transformers.GPT2Config(
        vocab_size=CHARACTERS, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(shape)
    with gem_client.connect(options.address) as session:
        folder = Path(options.output) / session.name
        arguments = transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=32, per_device_eval_batch_size=64, learning_rate=1e-3, weight_decay=0.1,
            warmup_steps=20, logging_steps=20, eval_strategy="steps", eval_steps=100, save_strategy="no", report_to="none",
            disable_tqdm=not sys.stdout.isatty(),
        )  # fmt: skip
        trainer = Worker(session=session, model=model, args=arguments, train_dataset=training, eval_dataset=validation)
        steps = trainer.train().global_step
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model()
    print(f"validation loss {loss:.3f} after {steps} steps of this worker: {folder}")


if __name__ == "__main__":
    main()
