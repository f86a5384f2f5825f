"""A small transformer that predicts the next character."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # 96: a line's end, and what ASCII prints
CONTEXT = 32  # characters that the model sees
_REPLACEMENT = CHARACTERS.index("?")  # stands for every other character
_POSITION_DEVIATION = 0.02


def encode(text: str) -> Tensor:
    """The tokens of a text: uint8, shape (len(text),). A character that is not in `CHARACTERS` becomes "?"."""
    if not text:
        return torch.empty(0, dtype=torch.uint8)
    table = torch.full((256,), _REPLACEMENT, dtype=torch.uint8)
    table[list(CHARACTERS.encode())] = torch.arange(len(CHARACTERS), dtype=torch.uint8)
    return table[torch.frombuffer(bytearray(text.encode("latin-1", "replace")), dtype=torch.uint8).long()]


def decode(tokens: Tensor) -> str:
    """The text of tokens, shape (n,)."""
    return "".join(CHARACTERS[token] for token in tokens.tolist())


class Block(nn.Module):
    """Causal self-attention, then a perceptron; each is added to what comes in, which it sees normalised."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.perceptron_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Shape (batch, characters, width), as the result."""
        batch, length, width = hidden.shape
        together = self.queries_keys_values(self.attention_norm(hidden))
        queries, keys, values = together.view(batch, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = hidden + self.down(functional.gelu(self.up(self.perceptron_norm(hidden))))
        return result


class CharacterTransformer(nn.Module):
    """Predicts each next character from at most `CONTEXT` before it. The default has 1,090,848 parameters.

    Args:
        width: Numbers that stand for one character inside the model; a multiple of `heads`.
        layers: Blocks, one after the other.
        heads: Of each block's attention.
    """

    def __init__(self, width: int = 208, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(CHARACTERS), width)
        self.positions = nn.Parameter(_POSITION_DEVIATION * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each next character, shape (batch, n, 96), of integer tokens, shape (batch, n) with n <= CONTEXT."""
        hidden = self.characters(tokens.long()) + self.positions[: tokens.shape[1]]
        logits: Tensor = self.scores(self.norm(self.blocks(hidden)))
        return logits
