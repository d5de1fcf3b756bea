"""What all commands share: the version, the help, and error messages that name command-line options."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import gepc
from gepc.cli.app import _flags as flags
from gepc.cli.app import app, run, text_table
from gepc.core.errors import AdviceWarning, InputError, OptionError, raising

pytestmark = pytest.mark.usefixtures("trusted")

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def net(tmp_path: Path, tiny_net: object) -> Path:
    from diffusers import DDPMScheduler

    tiny_net.save_pretrained(tmp_path / "net")  # type: ignore[attr-defined]
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(tmp_path / "net")
    return tmp_path / "net"


def test_the_version(capsys: Captured) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"gepc {gepc.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["sar"]])
def test_no_command_shows_the_help(arguments: list[str], capsys: Captured) -> None:
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert "Usage" in shown.out
    assert shown.err == ""


def test_ctrl_c_says_how_to_go_on(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gepc.lab.selfcheck.run_checks", press)
    assert run(["selfcheck"]) == 130
    assert capsys.readouterr().err == "stopped; the same command continues an unfinished run\n"


def test_commands_are_listed_in_the_order_of_use(capsys: Captured) -> None:
    assert run(["--help"]) == 0
    listed = re.findall(r"^│ (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert listed[:9] == ["demo", "selfcheck", "fit", "score", "report", "map", "scene", "watch", "serve"]
    assert listed[9:13] == ["info", "convert", "export", "train"]
    assert listed[13:] == ["bench", "ablate", "reproduce", "symmetries", "data", "sar"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_commands(shell: str) -> None:
    """What a shell asks for when the user presses the tab key after `gepc s`."""
    asked = {"_GEPC_COMPLETE": f"complete_{shell}", "COMP_WORDS": "gepc s", "COMP_CWORD": "1"}
    typed = {"_TYPER_COMPLETE_ARGS": "gepc s", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'gepc'; from gepc.cli import main; main()"]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **asked, **typed})
    for name in ("score", "scene", "serve", "selfcheck", "sar"):
        assert name in found.stdout
    assert "fit" not in found.stdout.split()


def every_command() -> list[tuple[str, object]]:
    root = typer.main.get_command(app)
    sar = root.commands["sar"].commands  # type: ignore[attr-defined]
    found = {**root.commands, **{f"sar {name}": command for name, command in sar.items()}}  # type: ignore[attr-defined]
    return sorted(found.items())


@pytest.mark.parametrize(
    ("name", "command"), every_command(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_option_has_a_help_text_that_is_a_sentence(name: str, command: object) -> None:
    for parameter in command.params:  # type: ignore[attr-defined]
        if parameter.name == "help":
            continue
        text = parameter.help
        assert text, f"{name} {parameter.name}"
        assert text.endswith((".", "...", ".)")), f"{name} {parameter.name}: {text}"


def test_methods_and_presets_are_listed(capsys: Captured) -> None:
    assert run(["info", "--methods"]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == gepc.list_detectors()
    assert re.search(r"^gepc\+ +.*fast", "\n".join(lines), re.MULTILINE)


def test_info_without_a_source_says_what_to_give(capsys: Captured) -> None:
    assert run(["info"]) == 2
    assert "give --methods" in capsys.readouterr().err


def test_an_option_of_the_library_is_named_as_the_command_line_spells_it(
    net: Path, tmp_path: Path, capsys: Captured
) -> None:
    """The library names `size` and `resize` without Python syntax; the command line adds how to give them."""
    from PIL import Image

    (tmp_path / "mixed").mkdir()
    for index in range(12):
        Image.new("RGB", (16 + 4 * (index % 2), 16), (20 * index, 0, 0)).save(tmp_path / "mixed" / f"{index:02d}.png")
    options = ["--backbone", str(net), "--set", "levels=0.9", "--set", "keep=1", "--set", "resize=exact"]
    assert run(["fit", str(tmp_path / "mixed"), "--out", str(tmp_path / "det"), *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("(on the command line: --set size=..., --set resize=...)")
    assert "size=" not in error.partition(" (on the command line")[0]


@pytest.mark.parametrize(
    ("message", "options", "arguments", "added"),
    [
        ("give `groups`", ("groups",), ["score", "det", "x"], " (on the command line: --groups)"),
        ("set `size`", ("size",), ["fit", "x"], " (on the command line: --set size=...)"),
        ("set `size`", ("size", "resize"), ["symmetries", "x"], " (on the command line: --size)"),
        ("choose a class with `class_label`", ("class_label",), ["score", "x"], ""),
        ("choose a class", ("class_label",), ["info", "x"], " (on the command line: --class-label)"),
        ("the `images` are bad", ("images",), ["fit", "images"], ""),
        ("the `stride` is missing", ("stride",), ["sar", "patches"], " (on the command line: --stride)"),
        ("use --alpha for `alpha`", ("alpha",), ["score"], ""),
        ("`alpha` is only a word here", (), ["score"], ""),
    ],
)
def test_only_options_of_the_command_are_named(
    message: str, options: tuple[str, ...], arguments: list[str], added: str
) -> None:
    assert flags(OptionError(message, options=options), arguments) == added
    assert flags(AdviceWarning(message, options=options), arguments) == added


def test_an_error_that_is_raised_for_another_one_names_the_same_options() -> None:
    with (
        pytest.raises(InputError, match="photos: set `size`") as caught,
        raising(InputError, "photos: {error}", OptionError),
    ):
        raise OptionError("set `size`", options=("size",))
    assert caught.value.options == ("size",)


def test_tables_are_aligned() -> None:
    assert text_table([("a", 1), ("long", 22)], ("name", "count")) == "name  count\na         1\nlong     22"
    assert text_table([("[bold]", "x"), ("b", "y")]) == "[bold]  x\nb       y"
