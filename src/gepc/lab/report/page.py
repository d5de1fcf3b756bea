"""One HTML page from a template: a single file that loads nothing from the network, for phone, desk and printer.

A template extends `page.html`, sets `title`, `headings` and `footer`, and fills the blocks `lead` and `main` with the
macros of `blocks.html`. Text is escaped; the filter `inline` marks `code` and **strong** words as in Markdown.
"""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gepc._version import __version__
from gepc.core.errors import GepcError, raising
from gepc.core.palette import DARK, LIGHT

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
FOOTER = f"Made by gepc {__version__}. This page is a single file and loads nothing from the network."
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


@dataclass(frozen=True)
class Picture:
    """A figure of a page, and a description for those who cannot see it."""

    figure: Figure
    alt: str


def environment(folder: Path = FOLDER) -> Environment:
    """The jinja2 environment of one page, with the templates of `folder` and of this package."""
    with raising(GepcError, "a report needs jinja2; install it with: pip install 'gepc[report]'", ImportError):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    loader = FileSystemLoader([folder, FOLDER])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    numbers = itertools.count(1)

    def svg(picture: Picture) -> Markup:
        return _safe(inline_svg(picture.figure, f"figure-{next(numbers)}", picture.alt))

    found.filters["inline"] = inline
    found.globals |= {"svg": svg, "light": LIGHT, "dark": DARK, "footer": FOOTER}
    return found


def render(template: Path, **context: Any) -> str:
    """Render a page: a template that extends `page.html`, with the variables of `context`."""
    html = environment(template.parent).get_template(template.name).render(context)
    return html if html.endswith("\n") else html + "\n"


def inline(text: str) -> Markup:
    """Escaped text with `code` and **strong** words marked."""
    from markupsafe import escape

    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return _safe(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))


def _safe(html: str) -> Markup:
    from markupsafe import Markup

    return Markup(html)  # noqa: S704


def inline_svg(figure: Figure, prefix: str, alt: str) -> str:
    """A figure as an `<svg>` element with the description `alt`, in the page's fonts and colours; text remains text.

    Colours of the palette become CSS variables (`--ink`); ids begin with `prefix`, for pages with several figures.
    """
    text = _element(_as_svg(figure, prefix))
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return _own_ids(text, prefix).replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def _as_svg(figure: Figure, salt: str) -> str:
    import matplotlib

    target = io.StringIO()
    settings = {"image.composite_image": False, "svg.fonttype": "none", "svg.hashsalt": salt}
    with matplotlib.rc_context({**settings, "savefig.facecolor": "none"}):
        figure.savefig(target, format="svg", metadata=_NO_METADATA)
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
    """Ids that something in the figure refers to get the prefix, the others are removed."""
    used = set(re.findall(r"#([^\")]+)[\")]", text))
    text = re.sub(r" id=\"([^\"]+)\"", lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", text)
    return re.sub(r"(href=\"|url\()#", rf"\g<1>#{prefix}-", text)
