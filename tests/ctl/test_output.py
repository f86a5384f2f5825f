"""Where the commands that write a file write to: never in place of a link, a pipe or a device."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from gem_ctl.output import is_standard_output, write


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="this system has no /dev/stdout")
def test_a_link_to_standard_output_is_standard_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As /dev/stdout is. Were it replaced, the machine would lose it."""
    link = tmp_path / "stdout"
    link.symlink_to("/dev/stdout")
    assert is_standard_output(link)
    write(link, b"model")
    assert link.is_symlink()
    assert list(tmp_path.iterdir()) == [link]
    assert capfd.readouterr().out == "model"
    assert not is_standard_output(tmp_path / "none")


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "model", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content
    assert list(target.parent.iterdir()) == [target]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write(pipe, b"model")
    reader.join()
    assert read == [b"model"]
    assert pipe.is_fifo()
