"""The colours of the page of a run: readable in light and in dark."""

from __future__ import annotations

import re

import pytest
from gem_api.run_page import live_page


def palettes() -> list[dict[str, str]]:
    """The colours by their variables, in light and in dark."""
    blocks = re.findall(r":root \{(.*?)\}", live_page(), re.DOTALL)
    return [dict(re.findall(r"(--\w+): (#\w+);", block)) for block in blocks]


def brightness(colour: str) -> float:
    """The relative luminance of the Web Content Accessibility Guidelines, of #rgb or #rrggbb."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    shares = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((brightness(one), brightness(other)))
    return (high + 0.05) / (low + 0.05)


def test_all_texts_and_lines_have_the_contrast_of_text_in_light_and_in_dark() -> None:
    light, dark = palettes()
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        grounds, inks = (colours["--page"], colours["--card"]), colours.keys() - {"--page", "--card", "--line"}
        assert inks >= {"--text", "--quiet", "--one", "--two", "--bad"}
        assert min(contrast(colours[ink], ground) for ink in inks for ground in grounds) >= 4.5
    assert (brightness(light["--page"]), brightness(dark["--page"])) == pytest.approx((0.9, 0.01), abs=0.1)
