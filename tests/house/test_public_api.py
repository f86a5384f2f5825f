"""Everything that a user imports is documented: the API reference is generated from these docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType

import gem_client
import gem_client.torch
import pytest

MODULES = [gem_client, gem_client.torch]
# `connect` and `ShardSampler.loader` make these; users do not call the constructors.
MADE_BY_OTHERS = {"gem_client.Session", "gem_client.torch.Loader"}


def members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """(dotted name, object) of every public name of a module, and of every public method and property of its classes."""
    for name in module.__all__:
        value = getattr(module, name)
        yield f"{module.__name__}.{name}", value
        if inspect.isclass(value):
            for base in value.__mro__:
                if base.__module__.startswith("gem_"):
                    yield from ((f"{module.__name__}.{name}.{key}", getattr(base, key)) for key in vars(base) if key[0] != "_")


def is_documentable(value: object) -> bool:
    return inspect.isclass(value) or isinstance(value, property) or inspect.isfunction(value) or inspect.ismethod(value)


def undocumented_parameters(value: object, text: str) -> list[str]:
    """Parameters that the docstring does not mention. A lone parameter may be described without its name."""
    if isinstance(value, property) or (inspect.isclass(value) and issubclass(value, Exception)) or not callable(value):
        return []
    if inspect.isclass(value):
        text += inspect.getdoc(value.__init__) or ""
    names = [name for name in inspect.signature(value).parameters if name not in ("self", "args", "kwargs", *declared(value))]
    return [name for name in names if len(names) > 1 and not re.search(rf"\b{name}\b", text)]


def declared(value: object) -> set[str]:
    """The fields of a dataclass whose help lies in their own declaration."""
    return {each.name for each in fields(value) if "declaration" in each.metadata} if is_dataclass(value) else set()


PUBLIC = {name: value for module in MODULES for name, value in members(module) if is_documentable(value)}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_a_docstring_that_mentions_its_parameters(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert text, f"{name} has no docstring"
    if like := re.search(r"The arguments are those of `(\w+)`|^Like `(\w+)`", text):
        text += inspect.getdoc(PUBLIC[f"{name.rpartition('.')[0]}.{like[1] or like[2]}"]) or ""
    if name not in MADE_BY_OTHERS:
        assert undocumented_parameters(PUBLIC[name], text) == [], name
