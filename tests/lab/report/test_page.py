"""A page is one file: it holds what it was given, escaped, and refers to nothing outside."""

from __future__ import annotations

import base64
import re
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from pages import ReadPage, outside_references

from gepc.core.palette import DARK, LIGHT
from gepc.core.tables import ResultTable
from gepc.detector import plots
from gepc.detector.plots import histogram
from gepc.lab.report import page as report_page
from gepc.lab.report.page import Picture, inline, render, svg_url

NASTY = '"><script>alert(1)</script><img src=x onerror="alert(2)">&amp;\'</svg>'


def _histogram(name: str = "moon"):
    return histogram(np.linspace(-6, -4, 20), np.linspace(-5, 90, 20), -4.2, ("gravel", name))


TEMPLATE = """
{%- extends "page.html" %}
{% import "blocks.html" as blocks %}
{% set title = "Title " ~ name %}
{% set headings = ["One", "Two", "Three"] %}
{% block lead %}Lead {{ name }}{% endblock %}
{% block main %}
{% for heading in headings %}
{% call blocks.section(headings, heading) %}
<p>{{ ("About " ~ name ~ ". With `code` and **strong** words.")|inline }}</p>
{{ blocks.facts([(name, "is " ~ name)]) }}
{{ blocks.code("gepc demo " ~ name) }}
{{ blocks.table(table) }}
{{ blocks.pictures([picture, patch], "Caption of " ~ name) }}
{% endcall %}
{% endfor %}
{% endblock %}
"""


def _render(name: str = "moon") -> str:
    """The template above beside those of the package."""
    rows, blank = ((name, "0.987"), ("brick", "0.654")), np.zeros((8, 8, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        for template in report_page.FOLDER.glob("*.html"):
            shutil.copy(template, folder)
        (Path(folder) / "test.html").write_text(TEMPLATE)
        with mock.patch.object(report_page, "FOLDER", Path(folder)):
            return render(
                "test.html",
                name=name,
                table=ResultTable("t", f"Table of {name}", ("against", "AUROC"), rows, f"Note on {name}."),
                picture=Picture(_histogram(name), f"Scores of {name}"),
                patch=Picture(plots.maps([blank], [blank[..., 0]], [name], 1.0), f"Patch of {name}"),
            )


@pytest.fixture(scope="module")
def page() -> ReadPage:
    return ReadPage(_render())


def test_it_refers_to_nothing_outside(page):
    assert outside_references(page) == []
    assert "http" not in page.html.replace("http-equiv", "")


def test_the_browser_is_told_to_fetch_nothing(page):
    (policy,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_it_is_well_formed_html(page):
    assert page.html.startswith("<!DOCTYPE html>\n<html lang=")
    assert page.unclosed == []


def test_it_holds_everything_it_was_given(page):
    text = " ".join(page.text)
    for wanted in (
        "About moon.",
        "Lead moon",
        "is moon",
        "0.987",
        "0.654",
        "gepc demo moon",
        "Note on moon.",
        "Caption",
    ):
        assert wanted in text
    assert "<code>code</code> and <strong>strong</strong>" in page.html


def test_ids_are_unique_and_every_inner_link_has_a_target(page):
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    inner = re.findall(r"href=\"#([^\"]+)\"|url\(#([^)]+)\)", page.html)
    assert {first or second for first, second in inner} <= set(ids)


def test_tables_have_headers_with_a_scope(page):
    assert {header.get("scope") for header in page.all("th")} == {"col", "row"}


def test_figures_have_a_description_and_headings_go_down_one_by_one(page):
    assert len(page.all("img")) == 6
    assert all(image["alt"] and image["src"].startswith("data:image/svg+xml;base64,") for image in page.all("img"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_every_colour_has_a_light_and_a_dark_form(page):
    assert LIGHT.keys() == DARK.keys()
    used = set(re.findall(r"var\(--(\w+)", page.html)) - {"sans", "mono"}
    assert used <= LIGHT.keys()
    assert "@media screen and (prefers-color-scheme: dark)" in page.html


def test_no_two_names_of_the_palette_have_one_colour():
    assert len(set(LIGHT.values())) == len(LIGHT)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "muted", "inside", "outside"])
def test_text_has_enough_contrast(colours, name):
    """WCAG 2 AA: 4.5 to 1."""

    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for paper in ("paper", "raised"):
        low, high = sorted([luminance(colours[name]), luminance(colours[paper])])
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_names_are_text_and_never_markup():
    page = ReadPage(_render(NASTY))
    assert outside_references(page) == []
    assert page.unclosed == []
    assert {image["src"].partition(",")[0] for image in page.all("img")} == {"data:image/svg+xml;base64"}
    assert NASTY in " ".join(page.text)


def test_marks_are_made_of_escaped_text():
    assert str(inline("`<b>` & **<i>**")) == "<code>&lt;b&gt;</code> &amp; <strong>&lt;i&gt;</strong>"
    assert str(inline("one * two ` three ** four")) == "one * two ` three ** four"


def test_a_figure_in_a_page_is_an_svg_file_on_white():
    svg = base64.b64decode(svg_url(_histogram()).partition(",")[2]).decode()
    assert svg.startswith("<?xml")
    assert "fill: #ffffff" in svg


def test_the_same_page_is_the_same_bytes():
    assert _render() == _render()
