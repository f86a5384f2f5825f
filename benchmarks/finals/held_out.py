"""Two tasks that nothing was tuned on: a recurrent tagger of source text, and a graph network on syntax trees. Both learn from
Python's standard library. They were fixed before the first run."""

from __future__ import annotations

import ast
import io
import keyword
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.versus.models import NOBODY, Batch, Problem

HELD_OUT = 10  # every tenth file is held out
FILES = 150
SCORED = 256  # windows, or graphs
LENGTH = 48  # characters in a window
NODES = 32  # in a graph
MASKED = 0.2  # of a graph's nodes, whose kinds are to be predicted


def _files() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]


class _Files(Problem):
    """A problem whose samples are made of files."""

    def __init__(self) -> None:
        training, held_out = list[Batch](), list[Batch]()
        for number, file in enumerate(_files()):
            (training if number % HELD_OUT else held_out).extend(self._of_file(file.read_text(errors="replace")))
        spread = torch.linspace(0, len(held_out) - 1, SCORED).long().tolist()
        super().__init__(_stacked(training), _stacked([held_out[each] for each in spread]))

    def _of_file(self, text: str) -> Iterator[Batch]:
        """Its samples, each with its target."""
        raise NotImplementedError


def _stacked(samples: list[Batch]) -> Batch:
    inputs, targets = zip(*samples, strict=True)
    return torch.stack(inputs), torch.stack(targets)


class Tagger(_Files):
    """Tags each character with the kind of its token: a bidirectional GRU, 60,426 parameters."""

    KINDS = ("space", "name", "keyword", "number", "string", "operator", "comment", "call", "attribute", "definition")

    def _of_file(self, text: str) -> Iterator[Batch]:
        kinds = self._tagged(text)
        codes = torch.tensor([min(ord(each), 127) for each in text])
        for begin in range(0, len(text) - LENGTH, LENGTH):
            yield codes[begin : begin + LENGTH], kinds[begin : begin + LENGTH]

    def _tagged(self, text: str) -> Tensor:
        kinds = torch.zeros(len(text), dtype=torch.long)
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()]
        for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
            begin = starts[token.start[0] - 1] + token.start[1]
            end = starts[token.end[0] - 1] + token.end[1]
            kinds[begin:end] = self.KINDS.index(_kind(before, token, after))
        return kinds

    def _make(self) -> nn.Module:
        return _Gru(len(self.KINDS))


def _kind(before: Any, token: Any, after: Any) -> str:
    plain = {tokenize.NUMBER: "number", tokenize.STRING: "string", tokenize.OP: "operator", tokenize.COMMENT: "comment"}
    if token.type != tokenize.NAME:
        return plain.get(token.type, "space")
    if keyword.iskeyword(token.string):
        return "keyword"
    if before is not None and before.string in ("def", "class"):
        return "definition"
    if after is not None and after.string == "(":
        return "call"
    return "attribute" if before is not None and before.string == "." else "name"


class _Gru(nn.Module):
    def __init__(self, kinds: int) -> None:
        super().__init__()
        self._embedding = nn.Embedding(128, 32)
        self._gru = nn.GRU(32, 80, batch_first=True, bidirectional=True)
        self._out = nn.Linear(160, kinds)

    def forward(self, codes: Tensor) -> Tensor:
        out: Tensor = self._out(self._gru(self._embedding(codes))[0])
        return out


class Trees(_Files):
    """Predicts the kinds of hidden nodes of a syntax tree: a graph network of four rounds of messages, 83,717 parameters.

    A sample has the kinds of up to 32 nodes, 20 % of them hidden, and the place of each node's parent.
    """

    def __init__(self) -> None:
        names = sorted(name for name, kind in vars(ast).items() if isinstance(kind, type) and issubclass(kind, ast.AST))
        self._kinds = {name: number + 2 for number, name in enumerate(names)}  # 0: no node, 1: hidden
        super().__init__()

    def _of_file(self, text: str) -> Iterator[Batch]:
        random = torch.Generator().manual_seed(len(text))
        for function in ast.walk(ast.parse(text)):
            if isinstance(function, ast.FunctionDef):
                yield self._graph(function, random)

    def _graph(self, root: ast.AST, random: torch.Generator) -> Batch:
        nodes, parents, place = [root], [0], 0
        while place < len(nodes) and len(nodes) < NODES:
            for child in ast.iter_child_nodes(nodes[place]):
                if len(nodes) < NODES and not isinstance(child, ast.Load | ast.Store | ast.Del):
                    nodes.append(child)
                    parents.append(place)
            place += 1
        kinds = torch.zeros(NODES, dtype=torch.long)
        kinds[: len(nodes)] = torch.tensor([self._kinds[type(node).__name__] for node in nodes])
        hidden = (torch.rand(NODES, generator=random) < MASKED) & (kinds > 0)
        hidden[-1 if len(nodes) == NODES else len(nodes) - 1] = True  # at least one
        target = torch.where(hidden, kinds, NOBODY)
        tree = torch.zeros(NODES, dtype=torch.long)
        tree[: len(nodes)] = torch.tensor(parents)
        return torch.stack([torch.where(hidden, 1, kinds), tree]), target

    def _make(self) -> nn.Module:
        return _Messages(len(self._kinds) + 2)


class _Messages(nn.Module):
    def __init__(self, kinds: int, width: int = 64, rounds: int = 4) -> None:
        super().__init__()
        self._embedding = nn.Embedding(kinds, width)
        self._rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(rounds)
        )
        self._norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(rounds))
        self._out = nn.Linear(width, kinds)

    def forward(self, graphs: Tensor) -> Tensor:
        kinds, parents = graphs[:, 0], graphs[:, 1]
        there = (kinds > 0).unsqueeze(-1)
        state = self._embedding(kinds) * there
        place = parents.unsqueeze(-1).expand_as(state)
        for messages, norm in zip(self._rounds, self._norms, strict=True):
            of_parents = state.gather(1, place)
            of_children = torch.zeros_like(state).scatter_add(1, place, state * there)
            state = norm(state + messages(torch.cat([state, of_parents, of_children], -1)))
        out: Tensor = self._out(state)
        return out
