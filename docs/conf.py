"""The documentation site. `make docs` builds it strictly: a warning is an error, and the examples in it are run."""

from __future__ import annotations

import itertools
import re
from html import escape
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.domains.python import PyObject
from sphinx.transforms import SphinxTransform

from gepc import __version__

project = "gepc"
author = "the gepc authors"
release = __version__
version = release

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "results/measured.md", "results/published.md", "results/tables"]  # parts of pages
nb_execution_mode = "off"  # notebooks are stored with their outputs; `make notebooks` runs them
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["katex/katex.min.css", "pages.css"]
html_js_files = [(f"{name}.js", {"defer": "defer"}) for name in ("katex/katex.min", "pages")]
html_title = "gepc"
pygments_dark_style = "a11y-high-contrast-dark"  # furo's own underlines the names of modules
html_favicon = "static/favicon.svg"
html_show_copyright = False
html_show_sphinx = False
html_math_renderer = "katex"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#b9501b", "color-brand-content": "#2a6a9e"},
    "dark_css_variables": {"color-brand-primary": "#f0935a", "color-brand-content": "#74b3e3"},
}

myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"npt.ArrayLike": "ArrayLike", "Array": "Array", "FloatArray": "Array"}
napoleon_custom_sections = [("Fitted state", "params_style"), ("Options", "params_style")]
napoleon_use_ivar = True
strip_signature_backslash = True  # napoleon then keeps the underscore of `levels_`
python_maximum_signature_line_length = 100
default_role = "code"

nitpicky = True
# the types in signatures are numpy's, torch's and our aliases; the cross references that pages make are all checked
nitpick_ignore_regex = [("py:(class|data|obj)", ".*")]

# examples in docstrings may use the names of their modules
doctest_global_setup = "import warnings; warnings.simplefilter('ignore'); from gepc import Group"


ENTRY = re.compile(r"(\*{0,2}[a-zA-Z][\w.]*(?:, \*{0,2}\w+)*) : (.*)")
# what follows the colon is a type, and the description stands below it or is left out, as in numpy's docstrings
TYPE = re.compile(
    r"(?:\{.*\}|\(height, width\)|\(int, int(?:, int)?\)|functions? from .*|mapping\b.*|sequence of \w+"
    r"|(?:\w+ of |bool |float(?:32|64)? )?(?:str|ints?|floats?|bool|ndarray|arrays?|[A-Z]\w+)\b(?: or .*| \(.*)?)"
    r"(?:, optional)?"
)
SYMBOLS = "abar|beta|btilde|eps|float32|mu|pi|rho|sigma|uint8|[b-z]"  # words that keep their small letter
# numpy's types, written out
ARRAY = r"~?(?:numpy\.ndarray|npt\.NDArray)\[(?:[^][]|\[[^][]*\])*\]"
ARRAY_LIKE = r"~?numpy\._typing\._array_like\._Buffer \|.*?_NestedSequence\[complex \| bytes \| str\]"


def _plain_text(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are plain text for people: names end in underscores, norms are |x|, formulas are indented.

    `name : what it is` becomes an entry: of napoleon's list below a heading, of a plain list elsewhere.
    """
    shown: list[str] = []
    headed = entry = formula = example = False
    given = _sentence_returned(_one_name_each(lines) if "Attributes" in lines else list(lines))
    for line, following in zip(given, [*given[1:], ""], strict=True):
        indented = line.startswith("    ")
        example = bool(line.strip()) and (example or line.lstrip().startswith(">>>"))
        if example:  # code is taken as it is, to be run
            shown.append(line)
            continue
        if re.fullmatch(r"-{3,}", line):
            headed = True
        elif headed and re.fullmatch(r"\w+(, \w+)*:", line):
            shown.append(line[:-1])
            continue
        elif found := ENTRY.fullmatch(line):
            entry, formula = True, False
            shown += _entry(found[1], found[2], following, headed)
            continue
        elif indented and entry:
            shown.append(f"    {_escaped(line.strip())}" if headed else f"  {_escaped(line.strip())}")
            continue
        elif indented and not formula and shown and not shown[-1].strip():
            shown += ["::", ""]
            formula = True
        elif line.strip() and not indented:
            formula = False
            if entry:
                shown.append("")
            entry = False
        shown.append(line if formula or re.fullmatch(r"-{3,}", line) else _escaped(line))
    lines[:] = shown


def _entry(name: str, text: str, following: str, headed: bool) -> list[str]:
    """`name : text` as reStructuredText; `following` is the next line."""
    if not headed:
        return ["", f"* **{_escaped(name)}**: {_escaped(text)}"]
    if TYPE.fullmatch(text) and (following.startswith("    ") or not text.endswith(".")):
        return [f"{name} : {text}"]
    return [name, f"    {_escaped(_capital(text))}"]


def _capital(text: str) -> str:
    """The text with a capital letter, unless it begins with a symbol, a name in code or a formula."""
    return text[0].upper() + text[1:] if re.match(rf"(?!(?:{SYMBOLS})\b)[a-z]+(?:-[a-z]+)*[ ,;:.]", text) else text


def _sentence_returned(lines: list[str]) -> list[str]:
    """The section `Returns`, if it is a sentence and not a type, as a field; napoleon would call it a type."""
    if "Returns" not in lines:
        return lines
    start = lines.index("Returns")
    below = list(itertools.takewhile(str.strip, lines[start + 2 :]))
    if any(line.startswith(" ") for line in below) or TYPE.fullmatch(" ".join(below)):
        return lines
    return [*lines[:start], ":returns: " + " ".join(below), *lines[start + 2 + len(below) :]]


def _one_name_each(lines: list[str]) -> list[str]:
    """`a, b : text` as two entries with the same description, which napoleon does by itself for parameters only."""
    shown: list[str] = []
    for start, line in enumerate(lines):
        entry = ENTRY.fullmatch(line)
        if entry is None:
            shown.append(line)
            continue
        below = list(itertools.takewhile(lambda text: text.startswith("    "), lines[start + 1 :]))
        *others, last = entry[1].split(", ")
        for name in others:
            shown += [f"{name} : {entry[2]}", *below]
        shown.append(f"{last} : {entry[2]}")
    return shown


def _escaped(line: str) -> str:
    """The line with the marks of reStructuredText taken literally, outside of `code`."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"(?<=\w)_(?!\w)", r"\\_", re.sub(r"[|*\\]", r"\\\g<0>", part)) for part in parts[::2]]
    return "`".join(parts)


def _formula(writer: Any, node: Any) -> None:
    """Formulas as TeX; KaTeX, which is part of the site, draws them in the browser."""
    tag = "div" if isinstance(node, nodes.math_block) else "span"
    writer.body.append(f'<{tag} class="math notranslate">{escape(node.astext())}</{tag}>')
    raise nodes.SkipNode


def _short(types: str) -> str:
    """Types of numpy by the names that people write."""
    return re.sub(ARRAY, "ndarray", re.sub(ARRAY_LIKE, "ArrayLike", types)).replace("npt.ArrayLike", "ArrayLike")


def _aliases(_app: Any, what: str, _name: str, _obj: Any, _options: Any, *shown: str | None) -> tuple[str | None, ...]:
    """Signatures with short types and without private parameters; all errors have the same one, which is left out."""
    if what == "exception":
        return "", None
    parts = [part and _short(re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", part)) for part in shown]
    parts = [part and part.replace("<factory>", "...").replace("0.3333333333333333", "1 / 3") for part in parts]
    return tuple(part and re.sub(r", _[a-z]\w*: .*\)$", ")", part) for part in parts)


def _short_types(_app: Any, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """The types that napoleon takes from annotations, without the names of their modules."""
    for row, line in enumerate(lines):
        if found := re.match(r"( *:(?:var)?type [^:]+: )(.*)", line):
            lines[row] = found[1] + re.sub(r"(?<![\w.~])(?=(?:[a-z_]\w*\.)+\w)", "~", _short(found[2]))


def _merge(_app: Any, doctree: nodes.document) -> None:
    """Parameters with the same description become one entry, as they are in the docstring."""
    for entries in list(doctree.findall(nodes.bullet_list)):
        if not isinstance(entries.parent.parent, nodes.field):
            continue
        kept, text, place = None, "", 1
        for entry in list(entries):
            paragraph = entry[0]
            description = "".join(part.astext() for part in paragraph[1:])
            if kept is not None and len(entry) == 1 and description == text != "":
                kept[place:place] = [nodes.Text(", "), paragraph[0]]
                place += 2
                entries.remove(entry)
            else:
                kept, text, place = paragraph, description, 1


class NamesInIndex(SphinxTransform):
    """The index lists a formula of the glossary by its name in the code, not as TeX."""

    default_priority = 100

    def apply(self, **_: Any) -> None:
        """Change the entries before they are collected."""
        for node in self.document.findall(addnodes.index):
            node["entries"] = [
                (kind, re.sub(r".*\\.* \((.*)\)$", r"\1", entry), *others) for kind, entry, *others in node["entries"]
            ]


def setup(app: Any) -> None:
    """Draw formulas, and read docstrings as plain text, before napoleon reads their sections; tidy what it makes."""
    app.add_html_math_renderer("katex", (_formula, None), (_formula, None))
    app.connect("autodoc-process-signature", _aliases)
    app.connect("autodoc-process-docstring", _plain_text, priority=100)
    app.connect("autodoc-process-docstring", _short_types, priority=900)
    app.connect("doctree-read", _merge)
    app.add_transform(NamesInIndex)
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
