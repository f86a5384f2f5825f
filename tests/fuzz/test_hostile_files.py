"""The folder of hostile files: each is rejected with an error that says what is wrong with it."""

from __future__ import annotations

import re

import pytest
from fuzz.targets import TARGETS
from hostile_files.make import CASES, FILES, FOLDER


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_refused_for_what_is_wrong_with_it(name: str) -> None:
    expected = CASES[name]()
    with pytest.raises(expected.error, match=re.escape(expected.says)):
        TARGETS[name.partition("/")[0]].run((FOLDER / name).read_bytes())


def test_the_files_are_those_that_the_script_writes() -> None:
    """If a format has changed: `python -m hostile_files.make` in tests/."""
    assert [name for name, case in CASES.items() if (FOLDER / name).read_bytes() != case().content] == []


def test_every_file_in_the_folder_is_tried() -> None:
    found = {f"{path.parent.name}/{path.name}" for folder in FILES for path in (FOLDER / folder).iterdir()}
    assert found == set(CASES)
