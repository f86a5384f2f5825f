"""Runs the three loops of this folder, each with a server of its own if it needs one, and draws their curves (curves.png)."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib
import torch

matplotlib.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RUNS: dict[str, tuple[str, str, bool]] = {
    "plain, seed 1": ("plain.py", "1", False),
    "plain, seed 2": ("plain.py", "2", False),
    "plain": ("plain.py", "0", False),
    "AdamW on the worker": ("with_gem.py", "0", True),
    "AdamW on the server": ("on_server.py", "0", True),
}
STYLES = [("tab:gray", "-", 1), ("tab:gray", "-", 1), ("tab:blue", "-", 8), ("tab:orange", "-", 4), ("black", ":", 2)]


def losses(script: str, seed: str, needs_server: bool) -> list[float]:
    """The held-out loss after each epoch of a loop."""
    command = [str(Path(sys.executable).with_name("gem-server")), "--until-stopped", "--metrics-listen", ""]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL) if needs_server else None
    sys.argv, printed = [script, seed], io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(HERE / script))
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed.getvalue())]


def main() -> None:
    torch.set_num_threads(1)  # the model is small
    curves = {name: losses(*run) for name, run in RUNS.items()}
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for (name, curve), (colour, line, width) in zip(curves.items(), STYLES, strict=True):
        axes.plot(range(1, len(curve) + 1), curve, line, color=colour, linewidth=width, label=name)
        apart = max(abs(one - other) for one, other in zip(curve, curves["plain"], strict=True))
        print(f"{name:<20} last loss {curve[-1]:.4f}, at most {apart:.4f} from plain")
    axes.set(xlabel="epoch", ylabel="held-out loss", yscale="log", title="Digits, one worker")
    axes.legend()
    figure.savefig(HERE / "curves.png", dpi=120)


if __name__ == "__main__":
    main()
