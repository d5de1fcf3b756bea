"""The colours of figures and pages, for light and for dark paper."""

from typing import Any

_COLOURS = {
    "paper": ("#ffffff", "#14171b"),
    "raised": ("#f5f6f8", "#1d2126"),
    "ink": ("#1c2127", "#e5e8ec"),
    "muted": ("#59626e", "#9ea8b4"),
    "rule": ("#d6dae0", "#3a414a"),
    "inside": ("#2a6a9e", "#74b3e3"),
    "outside": ("#b9501b", "#f0935a"),
    "series1": ("#b9501c", "#f0935b"),
    "series2": ("#2e7d4f", "#6fc494"),
    "series3": ("#7a4fa3", "#bb98e0"),
    "series4": ("#8a6d00", "#d8ba4a"),
    "series5": ("#0f7b8a", "#5cc4d2"),
    "series6": ("#a83266", "#ea88b1"),
}
LIGHT, DARK = ({name: shades[paper] for name, shades in _COLOURS.items()} for paper in (0, 1))
SERIES = tuple(LIGHT[name] for name in LIGHT if name.startswith("series"))
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)), (0, (5, 1.5, 1, 1.5)))


def line_style(position: int) -> dict[str, Any]:
    """How the line of that number is drawn: another colour for each, and other dashes when the colours are used up."""
    return {"color": SERIES[position % len(SERIES)], "linestyle": DASHES[position // len(SERIES) % len(DASHES)]}
