"""One HTML page from plain sections: a single file that asks the network for nothing, for phone, desk and printer.

    table = Table("AUROC of each pair", ("against", "AUROC"), [("moon", "0.99")])
    write_page("report.html", Page("Title", "What came out.", [Section("Results", [table])]))

Text is escaped; in prose `code` and **strong** words are marked as in Markdown, and nothing else is.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from gepc.core.errors import GepcError, InputError
from gepc.core.files import write_text
from gepc.core.palette import DARK, LIGHT
from gepc.report.svg import inline_svg

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure


class Block:
    """A part of a section; `kind` names the template's macro that draws it."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class Prose(Block):
    """Paragraphs."""

    kind = "prose"
    paragraphs: Sequence[str]


@dataclass(frozen=True)
class Bullets(Block):
    """A list of sentences."""

    kind = "bullets"
    items: Sequence[str]


@dataclass(frozen=True)
class Facts(Block):
    """Names and what they are: (term, description) pairs."""

    kind = "facts"
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Numbers(Block):
    """The few numbers to remember, in large type: (value, what it is) pairs."""

    kind = "numbers"
    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code(Block):
    """Commands or a program, as it is."""

    kind = "code"
    text: str


@dataclass(frozen=True)
class Table(Block):
    """Rows under headings; the first column names the row, the others hold numbers. `note` stands below."""

    kind = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InputError(
                    f"table {self.caption!r} has {len(self.columns)} columns, a row of it {len(row)} cells"
                )


@dataclass(frozen=True)
class Picture(Block):
    """A matplotlib figure, what it shows for those who cannot see it, a title above and a caption below."""

    kind = "picture"
    figure: Figure
    alt: str
    title: str = ""
    caption: str = ""


@dataclass(frozen=True)
class Pictures(Block):
    """Several pictures side by side where there is room, with a caption for all."""

    kind = "pictures"
    pictures: Sequence[Picture]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A title, a sentence or two that say what came out, and sections; `footer` ends it in small type."""

    title: str
    lead: str
    sections: Sequence[Section]
    footer: str = ""


def render(page: Page) -> str:
    """The page as HTML."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise GepcError("a report needs jinja2; install it with: pip install 'gepc[report]'") from error
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = inline
    numbers = itertools.count(1)

    def svg(picture: Picture) -> Markup:
        return _safe(inline_svg(picture.figure, f"figure-{next(numbers)}", picture.alt))

    html = environment.get_template("template.html").render(page=page, svg=svg, light=LIGHT, dark=DARK)
    return html if html.endswith("\n") else html + "\n"


def write_page(path: str | os.PathLike[str], page: Page) -> None:
    """Write the page, whole or not at all."""
    write_text(path, render(page))


def inline(text: str) -> Markup:
    """Escaped text with `code` and **strong** words marked."""
    from markupsafe import escape

    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return _safe(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))


def _safe(html: str) -> Markup:
    """HTML whose text has been escaped already."""
    from markupsafe import Markup

    return Markup(html)  # noqa: S704
