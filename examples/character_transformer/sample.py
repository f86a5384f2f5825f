"""Prints text that a trained model writes: `python -m examples.character_transformer.sample runs/<id>`."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional

from examples.character_transformer.model import CONTEXT, CharacterTransformer, decode, encode


@torch.no_grad()
def generate(model: CharacterTransformer, prompt: str, length: int, temperature: float, seed: int) -> str:
    """The prompt and `length` characters more, each drawn from softmax(logits / temperature). The prompt has at least one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = encode(prompt)
    for _ in range(length):
        logits = model(tokens[-CONTEXT:].unsqueeze(0))[0, -1]
        drawn = torch.multinomial(functional.softmax(logits / temperature, dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(torch.uint8)])
    return decode(tokens)


def load(file: Path) -> CharacterTransformer:
    """The model in a file that gem-train wrote. Raises OSError, and RuntimeError if it is another model."""
    model = CharacterTransformer()
    model.load_state_dict(load_file(file))
    return model.eval()


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompt", default="\ndef ", show_default="'def ' on a new line", help="What the text begins with.")
@click.option("--length", type=click.IntRange(1), default=500, help="Characters to write.")
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=0.7, help="Below 1: likelier characters.")
@click.option("--seed", type=int, default=0, help="Another seed, another text.")
def main(run: Path, prompt: str, length: int, temperature: float, seed: int) -> None:
    """Prints text written by the model of RUN, the folder that gem-train left."""
    if not prompt:
        raise click.UsageError("--prompt needs at least one character")
    try:
        model = load(run / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise click.ClickException(f"{run} holds no readable model.safetensors ({error}): has its run ended?") from error
    except RuntimeError as error:
        raise click.ClickException(f"the model in {run} is not this example's: {error}") from error
    click.echo(generate(model, prompt, length, temperature, seed).strip("\n"))


if __name__ == "__main__":
    main(prog_name="python -m examples.character_transformer.sample")
