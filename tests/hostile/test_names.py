"""Any name that a file system allows, and whatever is not a file: one row each, valid, reversible, never silence."""

from __future__ import annotations

import csv
import io
import os
import shutil
import socket
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from toys import as_uint8, pictures, toy_detector

from gepc.cli.app import run as command_line
from gepc.conformal.monitor import Monitor
from gepc.core.tables import escape_cell, unescape_cell
from gepc.images.decoder import DecoderProcess
from gepc.images.sources import FileImages
from gepc.runs.shards import Identity, open_run, score_shards
from gepc.runs.watch import Watch

NAMES = [b"caf\xe9.png", b"=cmd|' C'!A0.png", b"+1+1.png", b"@SUM(1).png", b"-2.png", b"'quoted.png", b"a\nb\r\n.png"]
NAMES += [b"tab\t.png", b'comma,"quote.png', b"back\\slash\\udce9.png", b"bidi\xe2\x80\xae.png", b"\xe2\x80\xa8.png"]


@pytest.fixture(scope="module")
def detector():
    return toy_detector().fit(pictures(60))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An image under every odd name."""
    place = tmp_path / "in"
    place.mkdir()
    for name, picture in zip(NAMES, as_uint8(pictures(len(NAMES), seed=5)), strict=True):
        Image.fromarray(picture).save(place / "x.png")
        (place / "x.png").rename(place / os.fsdecode(name))
    return place


def add_what_is_no_file(folder: Path) -> dict[str, str]:
    """A pipe, a socket, a device and links in a loop, called like images, and the reasons why they are none."""
    os.mkfifo(folder / "pipe.png")
    (folder / "zeros.png").symlink_to("/dev/zero")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "nowhere.png").symlink_to("gone.png")
    (folder / "again").symlink_to(folder)
    with socket.socket(socket.AF_UNIX) as end:
        here = Path.cwd()
        os.chdir(folder)  # the name of a socket is short
        end.bind("socket.png")
        os.chdir(here)
    reasons = {"pipe.png": "is a named pipe", "zeros.png": "is a device", "nowhere.png": "does not exist"}
    return reasons | {"loop.png": "too many levels of symbolic links", "socket.png": "cannot be read"}


def watching(detector, folder: Path, log: Path) -> Watch:
    return Watch(folder, detector.fitted, {"": Monitor(detector)}, log, settle=0.0, patience=0.0)


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as handle:  # strict: every byte is text
        rows = list(csv.DictReader(handle))
    for row in rows:
        for name in ("path", "error"):
            assert not row[name].startswith(("=", "+", "-", "@", "\t", "\r")), "a spreadsheet would compute this"
            row[name] = unescape_cell(row[name])
    return rows


@given(text=st.text(alphabet=st.characters(), max_size=12) | st.binary(max_size=12).map(os.fsdecode))
@example(text="'")
@example(text="\\")
@example(text="'\\u000a\n")
def test_a_cell_is_one_line_of_text_that_is_no_formula_and_gives_the_name_back(text: str) -> None:
    cell = escape_cell(text)
    assert unescape_cell(cell) == text
    assert cell.encode("utf-8").decode("utf-8").splitlines() == ([cell] if cell else [])
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    written = io.StringIO(newline="")
    csv.writer(written).writerow([cell])
    assert written.getvalue().count("\n") == 1


def test_watching_gives_one_row_for_each_and_goes_on(detector, folder: Path, tmp_path: Path) -> None:
    reasons = add_what_is_no_file(folder)
    log = tmp_path / "log.csv"
    assert len(list(watching(detector, folder, log).step())) == len(NAMES) + len(reasons)
    rows = table(log)
    assert {os.fsencode(Path(row["path"]).name) for row in rows if row["score"]} == set(NAMES)
    for name, reason in reasons.items():
        (row,) = (row for row in rows if Path(row["path"]).name == name)
        assert reason in row["error"]
    again = watching(detector, folder, log)
    assert set(again.done) == {row["path"] for row in rows}
    assert list(again.step()) == []


def test_a_log_that_was_torn_anywhere_is_completed(detector, folder: Path, tmp_path: Path, monkeypatch) -> None:
    decoder = DecoderProcess()
    monkeypatch.setattr("gepc.runs.watch.DecoderProcess", lambda: decoder)
    log, torn = tmp_path / "log.csv", tmp_path / "torn.csv"
    list(watching(detector, folder, log).step())
    whole, expected = log.read_bytes(), table(log)
    for length in range(0, len(whole), 37):
        torn.write_bytes(whole[:length])
        list(watching(detector, folder, torn).step())
        found = table(torn)
        assert [row["path"] for row in found] == [row["path"] for row in expected]
        assert [float(row["score"]) for row in found] == pytest.approx([float(row["score"]) for row in expected])
    decoder.close()


def test_a_file_with_new_content_is_scored_again(detector, folder: Path, tmp_path: Path) -> None:
    """Also one of the same size and time of modification, which was moved over the old one."""
    log = tmp_path / "log.csv"
    list(watching(detector, folder, log).step())
    path = folder / "+1+1.png"
    other = as_uint8(pictures(1, seed=99))[0]
    Image.fromarray(other).save(tmp_path / "other.png")
    before = path.stat()
    shutil.move(tmp_path / "other.png", path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    (row,) = watching(detector, folder, log).step()
    assert row.result.name == str(path)
    assert row.result.score == pytest.approx(float(detector.score([path])[0]))


def test_a_run_that_is_resumed_scores_changed_files_again(detector, tmp_path: Path) -> None:
    for index, picture in enumerate(as_uint8(pictures(9, seed=3))):
        Image.fromarray(picture).save(tmp_path / f"{index}.png")
    images = FileImages([tmp_path / f"{index}.png" for index in range(9)])

    def resumed():
        return open_run(tmp_path / "run", Identity.of(detector.fitted, images), 3, names=images.names)

    run = resumed()
    score_shards(run, run.pending()[:2], detector.fitted, images)
    os.replace(tmp_path / "8.png", tmp_path / "4.png")
    Image.fromarray(as_uint8(pictures(1, seed=8))[0]).save(tmp_path / "8.png")
    run = resumed()
    assert run.outdated == 1
    assert [shard.number for shard in run.pending()] == [1, 2]
    score_shards(run, run.pending(), detector.fitted, images)
    found = [result.score for results in run.results() for result in results]
    assert found == pytest.approx(detector.score(images))
    assert resumed().outdated == 0


def test_the_command_line_writes_a_valid_table(saved: Path, folder: Path, tmp_path: Path, capfd) -> None:
    reasons = add_what_is_no_file(folder)
    options = [str(saved), str(folder), "--backbone", str(saved.parent / "net")]
    assert command_line(["score", *options, "--out", str(tmp_path / "scores.csv")]) == 0
    rows = table(tmp_path / "scores.csv")
    assert {os.fsencode(Path(row["path"]).name) for row in rows if row["score"]} == set(NAMES)
    assert {Path(row["path"]).name for row in rows if row["error"]} == set(reasons)
    assert command_line(["score", *options]) == 0
    assert command_line(["watch", *options, "--out", str(tmp_path / "log.csv"), "--alpha", "0.9", "--once"]) == 0
    assert "Traceback" not in capfd.readouterr().err
