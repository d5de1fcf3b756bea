"""One HTML page from a template: a single file that loads nothing from the network, for phone, desk and printer.

A template extends `page.html`, sets `title`, `headings` and `footer`, and fills the blocks `lead` and `main` with the
macros of `blocks.html`. Text is escaped; the filter `inline` marks `code` and **strong** words as in Markdown.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image, fromarray

from gepc._version import __version__
from gepc.core.errors import GepcError, raising
from gepc.core.palette import DARK, LIGHT

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
FOOTER = f"Made by gepc {__version__}. This page is a single file and loads nothing from the network."


@dataclass(frozen=True)
class Picture:
    """A figure of a page, and a description for those who cannot see it."""

    figure: Figure
    alt: str


def render(template: str, **context: Any) -> str:
    """Render a page: a template that extends `page.html`, with the variables of `context`."""
    with raising(GepcError, "a report needs jinja2; install it with: pip install 'gepc[report]'", ImportError):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    loader = FileSystemLoader(FOLDER)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"inline": inline, "jpeg_url": jpeg_url, "svg_url": svg_url}
    found.globals |= {"light": LIGHT, "dark": DARK, "footer": FOOTER}
    return found.get_template(template).render(context) + "\n"


def inline(text: str) -> Markup:
    """Escaped text with `code` and **strong** words marked."""
    from markupsafe import Markup, escape

    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))  # noqa: S704


def data_url(kind: str, content: bytes) -> str:
    """The address of an image that lies inside the page."""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def jpeg_url(picture: Image | npt.NDArray[np.uint8]) -> str:
    """A photograph at its full size, as `data_url`."""
    target = io.BytesIO()
    fromarray(np.asarray(picture)).save(target, "JPEG", quality=90)
    return data_url("jpeg", target.getvalue())


def svg_url(figure: Figure) -> str:
    """A figure on white, as `data_url`; equal figures have equal addresses."""
    import matplotlib

    target = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "gepc"}):
        figure.savefig(target, format="svg", facecolor="white", metadata={"Date": None})
    return data_url("svg+xml", target.getvalue())
