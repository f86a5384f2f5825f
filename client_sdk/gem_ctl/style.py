"""The style of all figures: the report's, those of `gem-train` and of the documentation."""

from __future__ import annotations

from typing import Any

# Colours that people with any colour vision can tell apart, each with a contrast of at least 3:1 on white.
BLUE, RED, ORANGE, TEAL, VIOLET, GREY = COLOURS = ("#1f4e79", "#c0392b", "#d87d00", "#1a9a9a", "#b45bc9", "#444444")
PALE = "#6c93ba"  # for what lies behind a blue line
STYLE: Any = {
    "font.size": 10, "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "legend.frameon": False, "lines.linewidth": 1.6, "lines.markersize": 5,
    "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
