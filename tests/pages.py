"""Reading a report as a browser would: tags, ids, references, text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class ReadPage(HTMLParser):
    """What a page holds; `unclosed` are tags that were never closed, or not in order."""

    html: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    unclosed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[str] = []
        self.feed(self.html)
        self.close()
        self.unclosed += self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            self.unclosed.append(tag)

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "title") and data.strip():
            self.text.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def outside_references(page: ReadPage) -> list[str]:
    """Everything in the page that a browser would fetch from elsewhere, or that could run."""
    found = [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "object", "embed", "form")]
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            if name.startswith("on"):
                found.append(f"{tag} {name}")
            if name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
                fetched = tag != "a" and not (value or "").startswith(("data:image/", "#"))
                found += [f"{tag} {name}={value}"] if fetched else []
    found += re.findall(r"@import[^;]*|url\((?!#)[^)]*\)", page.html)
    return found
