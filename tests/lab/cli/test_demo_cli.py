"""`gepc demo` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest
from pages import ReadPage, outside_references

from gepc.cli import options
from gepc.cli.app import run


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a very small random backbone."""
    import torch
    from diffusers import DDPMScheduler, UNet2DModel

    root = tmp_path_factory.mktemp("demo")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = UNet2DModel(
            block_out_channels=(4, 4),
            layers_per_block=1,
            norm_num_groups=2,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
            add_attention=False,
        )
    net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    return root


@pytest.fixture(scope="module")
def finished(place) -> processes.Finished:
    return processes.gepc(place, "demo", "--quick", "--backbone", "net", "--out", "out", outputs=place / "printed")


def test_it_ends_well_and_says_where_the_report_is(finished, place):
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.endswith(f"report: {Path('out') / 'report.html'}\n")
    assert "32 photographs of 384x128 pixels" in finished.stderr
    assert "Traceback" not in finished.stderr
    names = ["boxes.png", "demo.json", "demo.md", "report.html"]
    assert sorted(path.name for path in (place / "out").iterdir()) == names


def test_the_tables_on_the_terminal_are_those_in_the_report(finished, place):
    html = (place / "out" / "report.html").read_text(encoding="utf-8")
    assert outside_references(ReadPage(html)) == []
    lines = finished.stdout.splitlines()
    assert lines[0].split()[:2] == ["thing", "result"]
    shown = [line for line in lines if line.startswith(("coin", "brick", "grass", "moon", "page", "closer"))]
    assert len(shown) == 6
    for line in shown:
        for cell in line.split("  "):
            assert cell.strip() in html
    assert str(place) not in html


def test_the_tables_are_in_a_file_too(finished, place):
    things, textures = json.loads((place / "out" / "demo.json").read_text())["tables"]
    assert len(things["rows"]) == 6
    assert [row["against"] for row in textures["rows"]] == ["brick", "grass", "moon", "page", "closer gravel"]


def test_a_demo_may_be_written_over_and_other_files_stay(finished, place, monkeypatch):
    """Without running it again: the check comes before the backbone is loaded, which fails here."""
    monkeypatch.chdir(place)
    (place / "out" / "mine.txt").write_text("keep")
    assert run(["demo", "--out", "out", "--backbone", "./nowhere"]) == 2
    assert (place / "out" / "mine.txt").read_text() == "keep"
    assert (place / "out" / "report.html").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert run(["demo", "--out", str(tmp_path)]) == 2
    assert "contains no earlier demo" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_in_the_way_is_left_alone(tmp_path, capsys):
    (tmp_path / "taken").write_text("mine")
    assert run(["demo", "--out", str(tmp_path / "taken")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "taken").read_text() == "mine"


def test_an_unknown_backbone_is_one_sentence_and_leaves_nothing(tmp_path, capsys):
    assert run(["demo", "--out", str(tmp_path / "out"), "--backbone", "celeba32-tni"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        (["demo", "--out", "out"], "the demo needs jinja2 and skimage"),
        (["bench", "quick", "--data", ".", "--out", "out"], "the report needs jinja2"),
    ],
)
def test_a_missing_extra_is_named_before_any_work(monkeypatch, tmp_path, capsys, command, needed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_spec", lambda name: None if name in ("jinja2", "skimage") else object())
    assert run(command) == 2
    assert f"{needed}; install with: pip install" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["ablate", "tiles", "--out", "out"], "run it with `gepc bench`"),
        (["reproduce", "radar", "--data", ".", "--out", "out", "--light"], "do not go with the protocol radar"),
        (["reproduce", "quick", "--data", ".", "--out", "file/out", "--light"], "cannot write file/out"),
        (["bench", "quick", "--data", ".", "--out", "file/out"], "cannot write file/out"),
        (["symmetries", "nothing", "--out", "file"], "file is a file"),
        (["score", "det", "photos", "--actors", "4"], "need --engine ray"),
        (["fit", "nothing", "--out", "."], "give a folder by its name"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(monkeypatch, tmp_path, capsys, command, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert run(command) == 2
    assert words in capsys.readouterr().err


def test_the_command_that_repeats_a_run_holds_no_place():
    from gepc.lab.cli.evaluate import _demo_command

    assert _demo_command(Path("/somewhere/else/demo"), False, "photos-small") == "gepc demo --out demo"
    assert _demo_command(Path("a b"), True, "my net") == "gepc demo --out 'a b' --quick --backbone 'my net'"


def test_help_shows_an_example(capsys):
    assert run(["demo", "--help"]) == 0
    assert "gepc demo --out demo --quick" in capsys.readouterr().out
