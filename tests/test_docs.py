"""What the pages say about commands and versions is true; `make docs` checks the rest."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
import yaml

import gepc
import gepc.cli  # registers the commands
from gepc.cli.app import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every `$ gepc ...` in a console block, lines that end in a backslash joined."""
    blocks = [
        (page.name, block.replace("\\\n", " "))
        for page in PAGES
        if "_build" not in page.parts
        for block in re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    return [
        (page, line[2:].partition(" #")[0].rstrip())
        for page, block in blocks
        for line in block.splitlines()
        if line.startswith("$ gepc ")
    ]


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 15


def check_command(page: str, line: str) -> None:
    """Fail unless the command exists with the options of the line."""
    command = typer.main.get_command(app)
    _, *words = shlex.split(line)
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, f"{page}: {line}"
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    used = {word.split("=")[0] for word in words if word.startswith("--")}
    assert used <= options, f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_of_the_pages_exists_with_its_options(page: str, line: str) -> None:
    check_command(page, line)


def test_no_sentence_is_read_as_a_comment() -> None:
    """MyST drops a line that begins with a percent sign, as a number with a unit may after a line break."""
    dropped = [
        f"{page.name}: {line}"
        for page in PAGES
        if "_build" not in page.parts
        for line in re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).splitlines()
        if line.lstrip().startswith("%")
    ]
    assert dropped == []


def test_the_badges_are_true() -> None:
    """A badge is a claim: each is compared with what it is about, and there is no other."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    badges = re.findall(r"img\.shields\.io/badge/(\S+?)-blue", (ROOT / "README.md").read_text(encoding="utf-8"))
    (oldest,) = re.findall(r'^requires-python = ">=([\d.]+)"$', project, re.MULTILINE)
    # the first licence is that of the code; weights have their own
    (licence,) = re.findall(r'^license = "([\w.-]+) AND .+"$', project, re.MULTILINE)
    (types,) = re.findall(r"^\[tool\.mypy\]\nstrict = (true|false)$", project, re.MULTILINE)
    expected = [f"python-{oldest}%2B", f"licence-{licence.replace('-', '--')}", "types-mypy%20strict"]
    assert badges == expected
    assert types == "true"


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == gepc.__version__
    assert citation["references"][0]["title"].startswith("GEPC: Group-Equivariant Posterior Consistency")


@pytest.fixture
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figures_of_the_pages_are_those_of_the_stored_tables(figures: ModuleType) -> None:
    entries = yaml.safe_load((ROOT / "docs" / "figures.yaml").read_text(encoding="utf-8"))
    assert figures.problems(entries) == []


def test_a_page_that_states_another_figure_is_found(figures: ModuleType) -> None:
    rank = ["ranks", {"method": "gepc+ fast"}, "average rank", 1]
    entry = {"claim": "a rank", "values": {"fast": rank}, "pages": {"README.md": ["an average rank of {fast}5"]}}
    value = figures.values(entry)["fast"]
    assert figures.problems([entry]) == [f"README.md does not say 'an average rank of {value}5' (a rank)"]


def public(name: str) -> Any:
    """The object of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


CALLABLES = [
    name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^\.\. auto(?:function|class|method):: ([\w.]+)$", page.read_text("utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", CALLABLES)
def test_public_callables_say_what_they_take_and_give_and_show_it(name: str) -> None:
    """Examples run as doctests in `make docs`."""
    described = public(name)
    text, is_class = inspect.getdoc(described) or "", inspect.isclass(described)
    sections = re.findall(r"^(\w[\w ]*)\n-{3,}$", text, re.MULTILINE)
    assert ">>>" in text
    assert is_class or "Returns" in sections or "Yields" in sections
    taken = [parameter for parameter in inspect.signature(described).parameters if parameter != "self"]
    assert not taken or {"Parameters", "Attributes", "Options"} & set(sections)
