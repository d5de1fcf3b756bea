"""The colours of figures and pages, for light and for dark paper."""

from __future__ import annotations

from typing import Any

LIGHT = {
    "paper": "#ffffff",
    "raised": "#f5f6f8",
    "ink": "#1c2127",
    "muted": "#59626e",
    "rule": "#d6dae0",
    "inside": "#2a6a9e",
    "outside": "#b9501b",
    "series1": "#b9501c",
    "series2": "#2e7d4f",
    "series3": "#7a4fa3",
    "series4": "#8a6d00",
    "series5": "#0f7b8a",
    "series6": "#a83266",
}
DARK = {
    "paper": "#14171b",
    "raised": "#1d2126",
    "ink": "#e5e8ec",
    "muted": "#9ea8b4",
    "rule": "#3a414a",
    "inside": "#74b3e3",
    "outside": "#f0935a",
    "series1": "#f0935b",
    "series2": "#6fc494",
    "series3": "#bb98e0",
    "series4": "#d8ba4a",
    "series5": "#5cc4d2",
    "series6": "#ea88b1",
}
SERIES = tuple(LIGHT[name] for name in LIGHT if name.startswith("series"))
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1, 1.5)))


def line_style(position: int) -> dict[str, Any]:
    """How the line of that number is drawn: another colour for each, and other dashes when the colours are used up."""
    return {"color": SERIES[position % len(SERIES)], "linestyle": DASHES[position // len(SERIES) % len(DASHES)]}
