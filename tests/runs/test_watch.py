"""Each file of a watched folder is scored once and becomes one row, also across crashes."""

import csv
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from toys import as_uint8, pictures, toy_detector

from gepc.conformal.monitor import Monitor
from gepc.core.errors import InputError, OptionError, ValueRangeWarning
from gepc.images.decoder import DecoderProcess
from gepc.runs.watch import COLUMNS, Watch


@pytest.fixture(scope="module")
def detector():
    return toy_detector().fit(pictures(60))


@pytest.fixture
def clock(monkeypatch):
    """The clock that watches measure by."""
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr("gepc.runs.watch.time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def _drop(folder: Path, count: int, first: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for index, picture in enumerate(as_uint8(pictures(count, seed=100 + first))):
        Image.fromarray(picture).save(folder / f"{first + index:03d}.png")


def _watch(detector, folder, log) -> Watch:
    return Watch(folder, detector.fitted, {"": Monitor(detector, seed=0)}, log, settle=0.0, patience=0.0)


def _rows(log: Path) -> list[dict[str, str]]:
    with open(log, newline="", encoding="utf-8") as handle:
        return list(csv.DictReader(handle))


def test_every_file_becomes_one_row_with_the_detectors_score(detector, tmp_path):
    _drop(tmp_path / "in", 5)
    watch = _watch(detector, tmp_path / "in", tmp_path / "log.csv")
    assert len(list(watch.step())) == 5
    _drop(tmp_path / "in", 3, first=5)
    assert len(list(watch.step())) == 3
    assert list(watch.step()) == []
    rows = _rows(tmp_path / "log.csv")
    paths = sorted((tmp_path / "in").iterdir())
    assert sorted(row["path"] for row in rows) == [str(path) for path in paths]
    by_path = {row["path"]: float(row["score"]) for row in rows}
    expected = detector.score(paths)
    assert np.allclose([by_path[str(path)] for path in paths], expected, rtol=1e-9)


def test_a_crash_loses_and_repeats_nothing(detector, tmp_path):
    """Kill the watch after every possible number of rows, with a row cut short; the log ends up the same."""
    folder = tmp_path / "in"
    _drop(folder, 6)
    for age, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, (time.time() - 100 + age,) * 2)
    whole = _watch(detector, folder, tmp_path / "whole.csv")
    list(whole.step())
    expected = _rows(tmp_path / "whole.csv")
    for survived in range(6):
        log = tmp_path / f"log{survived}.csv"
        steps = _watch(detector, folder, log).step()
        for _ in range(survived):
            next(steps)
        steps.close()
        with open(log, "ab") as handle:
            handle.write(b"in/00")  # the row that was being written
        list(_watch(detector, folder, log).step())
        found = _rows(log)
        assert [row["path"] for row in found] == [row["path"] for row in expected]
        for column in ("score", "p_value", "log10_capital"):
            assert np.allclose(*([float(row[column]) for row in rows] for rows in (found, expected)), rtol=1e-5)


def test_the_monitor_is_taken_up_where_it_was(detector, tmp_path):
    _drop(tmp_path / "in", 4)
    first = _watch(detector, tmp_path / "in", tmp_path / "log.csv")
    list(first.step())
    again = _watch(detector, tmp_path / "in", tmp_path / "log.csv")
    assert again.monitors[""].scores == first.monitors[""].scores
    assert again.monitors[""].log_capital == first.monitors[""].log_capital


def test_a_file_that_is_still_arriving_is_left_for_later(detector, tmp_path, clock):
    _drop(tmp_path / "in", 2)
    first, second = sorted((tmp_path / "in").iterdir())
    half = second.read_bytes()[:60]
    whole = second.read_bytes()
    second.write_bytes(half)
    watch = Watch(
        tmp_path / "in", detector.fitted, {"": Monitor(detector)}, tmp_path / "log.csv", settle=60.0, patience=600.0
    )
    assert list(watch.step()) == []
    clock.now += 61
    assert [row.result.name for row in watch.step()] == [str(first)]
    second.write_bytes(whole)
    assert list(watch.step()) == []
    clock.now += 61
    assert [row.result.name for row in watch.step()] == [str(second)]


@pytest.mark.parametrize("age", [-3600.0, 3600.0])
def test_a_file_time_of_another_clock_does_not_matter(detector, tmp_path, clock, age):
    _drop(tmp_path / "in", 1)
    (path,) = (tmp_path / "in").iterdir()
    os.utime(path, (time.time() - age,) * 2)
    watch = Watch(tmp_path / "in", detector.fitted, {"": Monitor(detector)}, tmp_path / "log.csv", settle=1.0)
    assert list(watch.step()) == []
    clock.now += 2
    assert [row.result.name for row in watch.step()] == [str(path)]


def test_a_damaged_file_is_reported_when_it_has_not_changed_for_a_while(detector, tmp_path, clock):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "cut.png").write_text("not a picture")
    watch = Watch(
        tmp_path / "in", detector.fitted, {"": Monitor(detector)}, tmp_path / "log.csv", settle=1.0, patience=10.0
    )
    for seconds, rows in ((0, 0), (2, 0), (9, 1), (20, 0)):
        clock.now += seconds
        assert len(list(watch.step())) == rows


def test_a_damaged_file_is_a_row_with_the_reason(detector, tmp_path):
    _drop(tmp_path / "in", 2)
    (tmp_path / "in" / "001.png").write_text("not a picture")
    watch = _watch(detector, tmp_path / "in", tmp_path / "log.csv")
    list(watch.step())
    errors = {Path(row["path"]).name: row["error"] for row in _rows(tmp_path / "log.csv")}
    assert errors["000.png"] == ""
    assert "decoded" in errors["001.png"]
    assert len(watch.monitors[""].scores) == 1


def test_every_folder_is_a_stream_of_its_own_for_a_detector_with_groups(tmp_path):
    """Cameras in one detector: a guarantee, a monitor and a drift each; a folder without a group is an error."""
    images = np.concatenate([pictures(40), pictures(40, seed=5)])
    detector = toy_detector(calibration_share=0.5).fit(images, groups=["left"] * 40 + ["right"] * 40)
    root = tmp_path / "in"
    root.mkdir()
    for name, first in (("left", 0), ("right", 10), ("attic", 20)):
        _drop(root / name, 2, first=first)
    monitors = {group: Monitor(detector, 0.1, seed=0, group=group) for group in ("left", "right")}
    watch = Watch(root, detector.fitted, monitors, tmp_path / "log.csv", settle=0.0, patience=0.0)
    rows = {Path(row.result.name).relative_to(root).as_posix(): row for row in watch.step()}
    for name, row in rows.items():
        group = name.split("/")[0]
        if group == "attic":
            assert row.result.error == "is in the folder 'attic', which is not a group of the detector: left, right"
        else:
            assert row.verdict.p_value == detector.p_value([root / name], groups=[group])[0]
    assert [len(monitor.scores) for monitor in monitors.values()] == [2, 2]
    again = {group: Monitor(detector, 0.1, seed=0, group=group) for group in ("left", "right")}
    resumed = Watch(root, detector.fitted, again, tmp_path / "log.csv", settle=0.0, patience=0.0)
    assert [again[group].scores == monitors[group].scores for group in again] == [True, True]
    assert list(resumed.step()) == []


def test_a_paused_watch_scores_nothing_also_after_a_restart(detector, tmp_path):
    _drop(tmp_path / "in", 2)
    (tmp_path / "log.csv.pause").touch()
    for _ in range(2):
        watch = _watch(detector, tmp_path / "in", tmp_path / "log.csv")
        assert list(watch.step()) == []
    (tmp_path / "log.csv.pause").unlink()
    assert len(list(watch.step())) == 2


def test_a_mask_beside_its_image_is_not_scored(detector, tmp_path):
    _drop(tmp_path / "in", 2)
    (tmp_path / "in" / "001_mask.png").write_bytes((tmp_path / "in" / "001.png").read_bytes())
    watch = _watch(detector, tmp_path / "in", tmp_path / "log.csv")
    with pytest.warns(UserWarning, match=r"in: masks beside images are skipped, such as .*001_mask\.png$"):
        list(watch.step())
    assert [Path(row["path"]).name for row in _rows(tmp_path / "log.csv")] == ["000.png", "001.png"]
    list(watch.step())  # what was said once is not said again
    Image.fromarray(as_uint8(pictures(1))[0]).save(tmp_path / "in" / "000.jpg")
    with pytest.warns(UserWarning, match=r"masks beside images are skipped, such as .*000\.png$"):
        list(watch.step())


def test_a_file_is_decoded_once(detector, tmp_path, monkeypatch):
    decoded = []
    read_file = DecoderProcess.read_file
    monkeypatch.setattr(DecoderProcess, "read_file", lambda *given: (decoded.append(given[1]), read_file(*given))[1])
    _drop(tmp_path / "in", 3)
    list(_watch(detector, tmp_path / "in", tmp_path / "log.csv").step())
    assert sorted(decoded) == sorted(map(str, (tmp_path / "in").iterdir()))


def test_floats_that_may_be_in_another_range_are_told_of(detector, tmp_path):
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "empty.npy", np.zeros((0, 8)))
    np.save(tmp_path / "in" / "picture.npy", as_uint8(pictures(1))[0] / 255.0)
    with pytest.warns(ValueRangeWarning, match="float images without a negative value"):
        rows = list(_watch(detector, tmp_path / "in", tmp_path / "log.csv").step())
    assert sorted(row.result.error is None for row in rows) == [False, True]


def test_a_name_that_is_not_text(detector, tmp_path):
    _drop(tmp_path / "in", 1)
    (path,) = (tmp_path / "in").iterdir()
    path.rename(path.with_name(os.fsdecode(b"caf\xe9.png")))
    assert len(list(_watch(detector, tmp_path / "in", tmp_path / "log.csv").step())) == 1
    assert "caf\\udce9.png," in (tmp_path / "log.csv").read_text(encoding="utf-8")
    assert list(_watch(detector, tmp_path / "in", tmp_path / "log.csv").step()) == []


def test_another_file_is_not_taken_for_a_log(detector, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "table.csv").write_text("a,b\r\n1,2\r\n")
    with pytest.raises(InputError, match=r"table\.csv is not a log"):
        _watch(detector, tmp_path / "in", tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == "a,b\n1,2\n"
    (tmp_path / "note.csv").write_text("one line")
    with pytest.raises(InputError, match=r"note\.csv is not a log"):
        _watch(detector, tmp_path / "in", tmp_path / "note.csv")
    assert (tmp_path / "note.csv").read_text() == "one line"
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder cannot be read: Is a directory; give another file"):
        _watch(detector, tmp_path / "in", tmp_path / "folder")
    for name in ("log.xlsx", "log.parquet"):
        with pytest.raises(OptionError if name == "log.xlsx" else InputError, match="give a name that ends in"):
            _watch(detector, tmp_path / "in", tmp_path / name)


def test_the_log_starts_with_its_columns(detector, tmp_path):
    (tmp_path / "in").mkdir()
    _watch(detector, tmp_path / "in", tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text().strip() == ",".join(COLUMNS)


def test_every_row_says_when_the_file_was_scored(detector, tmp_path):
    from datetime import datetime, timedelta, timezone

    _drop(tmp_path / "in", 2)
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    list(_watch(detector, tmp_path / "in", tmp_path / "log.csv").step())
    rows = _rows(tmp_path / "log.csv")
    assert len(rows) == 3
    for row in rows:
        scored = datetime.fromisoformat(row["time"])
        assert scored.utcoffset() == timedelta(0)
        assert abs(datetime.now(timezone.utc) - scored) < timedelta(minutes=5)


def test_files_that_vanish_are_forgotten(detector, tmp_path, clock):
    _drop(tmp_path / "in", 3)
    watch = Watch(tmp_path / "in", detector.fitted, {"": Monitor(detector, seed=0)}, tmp_path / "log.csv", settle=5.0)
    assert list(watch.step()) == []
    for path in (tmp_path / "in").iterdir():
        path.unlink()
    assert list(watch.step()) == []
    assert not watch._arriving
