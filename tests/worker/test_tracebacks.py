"""What users are shown of a traceback: their own code."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
from gem_worker.launcher.tracebacks import same_failure, users_frames
from gem_worker.tasks import load_task

TASK = """
import torch


class Broken:
    def __init__(self, data):
        self.scale = torch.ones(2) @ torch.ones(3)
"""


def test_of_a_log_only_the_users_part_of_the_last_traceback_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        load_task("broken_task:Broken", None)
    beneath_this_test = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    failure = "".join(traceback.format_exception(RuntimeError, caught.value, beneath_this_test))
    assert "gem_worker" in failure
    older = "Traceback (most recent call last):\nValueError: old\n"
    log = f"{older}2026-01-01T00:00:00Z [error] failed\n{failure}2026-01-01T00:00:01Z [info]\n"
    shown = users_frames(log).splitlines()
    assert shown[0] == f'  File "{tmp_path / "broken_task.py"}", line 7, in __init__'
    assert shown[1].strip() == "self.scale = torch.ones(2) @ torch.ones(3)"
    assert shown[-1].startswith("RuntimeError: ")
    assert "gem_worker" not in "\n".join(shown)


def test_a_failure_inside_a_library_is_shown_whole() -> None:
    failure = f'Traceback (most recent call last):\n  File "{sys.modules["gem_worker"].__file__}", line 1, in f\nKeyError: 1\n'
    assert users_frames(failure) == failure.partition("\n")[2].rstrip()
    assert users_frames("2026-01-01T00:00:00Z [info] all is well\n") == ""


def test_failures_are_the_same_at_the_same_line_whatever_the_message() -> None:
    one = '  File "a.py", line 1, in f\n    x()\nValueError: batch 3'
    assert same_failure(one, one.replace("batch 3", "batch 4"))
    assert not same_failure(one, one.replace("line 1", "line 2"))
    assert not same_failure(one, one.replace("ValueError", "KeyError"))
    assert not same_failure(one, "")
