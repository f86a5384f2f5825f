"""gem-train --new: a task to begin with."""

from __future__ import annotations

import importlib.util
import shlex
from keyword import iskeyword
from pathlib import Path

from gem_worker.tasks import TaskError

TEMPLATE = Path(__file__).parents[1] / "tasks" / "template.py"
_CLASS = "Sine"


def write_task(path: Path) -> str:
    """Writes a task that runs as it is, for the user to change, and returns its name, as --task takes it.

    Raises:
        TaskError: The file exists or can't be written, or gem-train could not import it from this folder.
    """
    parts = path.with_suffix("").parts
    if path.suffix != ".py" or not all(part.isidentifier() and not iskeyword(part) for part in parts):
        raise TaskError(
            f"--new {shlex.quote(str(path))}: gem-train imports tasks as modules, from the folder that it starts in: go there, "
            "and give a name such as my_task.py"
        )
    if not path.exists() and not Path(parts[0]).is_dir() and importlib.util.find_spec(parts[0]) is not None:
        raise TaskError(f"--new {path} would hide the installed module {parts[0]!r}: give another name, such as my_task.py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE.read_text(encoding="utf-8"))
    except FileExistsError:
        raise TaskError(f"--new {path}: the file exists already, and stays as it is: give another name") from None
    except OSError as error:
        raise TaskError(f"can't write {path}: {error.strerror}") from None
    return f"{'.'.join(parts)}:{_CLASS}"
