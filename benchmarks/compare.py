"""Draws finished runs of gem-train beside each other: `python -m benchmarks.compare OUT.png RUN_FOLDER...`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
from gem_worker.run_folder import RunFolder
from matplotlib import pyplot as plt

_WINDOW = 100  # commits that a point of a curve is the mean of


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(out: Path, runs: tuple[Path, ...]) -> None:
    """Plots the training loss over commits, a panel for each learning rate, and prints the test accuracies."""
    summaries = {path: json.loads(RunFolder(path).summary.read_text()) for path in runs}
    rates = sorted({_rate(summary) for summary in summaries.values()})
    plt.switch_backend("Agg")
    figure, panels = plt.subplots(
        1, len(rates), figsize=(5.5 * len(rates), 4), sharey=True, squeeze=False, constrained_layout=True
    )
    for path, summary in summaries.items():
        axes = panels[0][rates.index(_rate(summary))]
        history = RunFolder(path).history()
        smooth = np.convolve(history["loss"], np.ones(_WINDOW) / _WINDOW, mode="valid")
        label = f"{summary['rule']}: {100 * summary['test_accuracy']:.1f} % test accuracy"
        axes.plot(history["version"][_WINDOW - 1 :], smooth, label=label)
        click.echo(
            f"learning rate {_rate(summary)}, {label}, test loss {summary['test_loss']:.4f}, {summary['commits']} commits"
        )
    for axes, rate in zip(panels[0], rates, strict=True):
        axes.set(title=f"learning rate {rate}", xlabel="commits applied", ylim=(0, 3))
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0][0].set_ylabel(f"training loss, mean of {_WINDOW} commits")
    figure.savefig(out, dpi=120)


def _rate(summary: dict[str, Any]) -> float:
    rate: float = summary["hyperparameters"]["learning_rate"]
    return rate


if __name__ == "__main__":
    main()
