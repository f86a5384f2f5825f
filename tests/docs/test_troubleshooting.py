"""The messages that the troubleshooting page quotes are messages of the code. No error of the SDK is missing from the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from gem_api import errors
from gem_api.errors import GemError
from kit.pages import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
ROOMS = ("proto", "server", "client_sdk", "worker")
FEWEST_WORDS = 3  # shorter quotes are names of settings, files and states
VALUE = "…"  # stands for a value, on the page and in the messages read from the code
FORMAT = re.compile(r"%(?:\.\d+)?[sdrfg]")


def text_of(node: ast.AST) -> str | None:
    """The text of a literal, with VALUE in place of each value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return FORMAT.sub(VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)  # type: ignore[misc]
    return None


def literals(tree: ast.AST) -> Iterator[str]:
    """The texts in a module that may be messages: its docstrings are not."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in docstrings and (text := text_of(node)) is not None:
            yield text


@cache
def messages() -> tuple[str, ...]:
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py")) if not file.stem.endswith("_pb2")]
    return tuple(text for file in files for text in literals(ast.parse(file.read_text(encoding="utf-8"))))


def quotes(page: str) -> list[str]:
    """The messages that a page quotes: code in the bold heads of its lists, but for commands."""
    heads = re.findall(r"^- \*\*(.+?)\*\*: ", page, re.MULTILINE)
    found = [quote for head in heads for quote in re.findall(r"`([^`]+)`", head)]
    return [quote for quote in found if len(quote.split()) >= FEWEST_WORDS and not quote.startswith(("gem-", "docker "))]


def unknown(quoted: list[str]) -> list[str]:
    """The quotes that are in no message of the code."""
    return [quote for quote in quoted if not any(quote in message for message in messages())]


def test_every_quoted_message_is_one_of_the_code() -> None:
    quoted = quotes(PAGE.read_text(encoding="utf-8"))
    assert len(quoted) > 20, "the page's lists were not read"
    assert unknown(quoted) == []


def test_every_error_of_the_sdk_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, GemError)]
    assert [name for name in names if f"`{name}`" not in page] == []
