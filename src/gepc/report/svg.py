"""A matplotlib figure as SVG inside a page: the page's fonts and colours, no reference to anything outside."""

from __future__ import annotations

import io
import re
from html import escape
from typing import TYPE_CHECKING

from gepc.core.palette import LIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NOTHING_ABOUT_THE_FILE = {"Creator": None, "Date": None, "Format": None, "Type": None}


def inline_svg(figure: Figure, prefix: str, alt: str) -> str:
    """The figure as an `<svg>` element with `alt` as its description.

    Every id begins with `prefix`, so that several figures live in one page. Colours of the palette become CSS
    variables (`--ink`), text stays text in the page's font.
    """
    text = _element(_as_svg(figure, prefix))
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return _describe(_own_ids(text, prefix), alt)


def _as_svg(figure: Figure, salt: str) -> str:
    import matplotlib

    target = io.StringIO()
    settings = {"image.composite_image": False, "svg.fonttype": "none", "svg.hashsalt": salt}
    with matplotlib.rc_context({**settings, "savefig.facecolor": "none"}):
        figure.savefig(target, format="svg", metadata=_NOTHING_ABOUT_THE_FILE)
    return target.getvalue()


def _element(text: str) -> str:
    """The element alone: no XML header, namespaces, metadata, global style or fixed size; text in the page's font."""
    text = text[text.index("<svg") :].strip()
    head, rest = text.split(">", 1)
    head = re.sub(r"\s+(xmlns(:\w+)?|width|height|version)=\"[^\"]*\"", "", head)
    rest = re.sub(r"<(metadata|style)\b.*?</\1>", "", rest, flags=re.DOTALL).replace("xlink:href", "href")
    rest = re.sub(r"(font-family: )[^;\"]+", r"\1var(--sans)", rest)
    rest = re.sub(r"(font: [^;\"]*?px) [^;\"]+", r"\1 var(--sans)", rest)
    return f"{head}>{rest}"


def _own_ids(text: str, prefix: str) -> str:
    """Ids that something in the figure refers to get the prefix, the others go."""
    used = set(re.findall(r"#([^\")]+)[\")]", text))
    text = re.sub(r" id=\"([^\"]+)\"", lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text)
    return re.sub(r"(href=\"|url\()#", rf"\g<1>#{prefix}-", text)


def _describe(text: str, alt: str) -> str:
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)
