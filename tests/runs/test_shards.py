"""A run on disk: shards that are whole, resumed exactly, refused where something changed."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from toys import pictures, toy_detector

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.core.tables import unescape_cell
from gepc.detector.storage import detector_digest
from gepc.detector.stream import Result
from gepc.images.sources import ArrayImages, FileImages
from gepc.runs.shards import (
    Identity,
    ScoreRun,
    csv_table,
    format_of,
    list_digest,
    merge,
    open_run,
    parse_shard,
    read_table,
    result_table,
    shard_text,
)

NAMES = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1)
SCORES = st.floats(allow_nan=False, allow_infinity=False)
FILES = FileImages([Path(f"{index}.png") for index in range(7)])


@st.composite
def results(draw: st.DrawFn) -> list[Result]:
    found = []
    for index in range(draw(st.integers(0, 6))):
        error = draw(st.one_of(st.none(), NAMES))
        score, p_value = (math.nan, math.nan) if error else (draw(SCORES), draw(st.floats(0, 1)))
        found.append(Result(index, draw(NAMES), score, p_value, error))
    return found


@given(rows=results())
def test_every_digit_and_letter_comes_back(rows: list[Result]) -> None:
    found = parse_shard(shard_text(rows))
    np.testing.assert_equal([vars(row) for row in found], [vars(row) for row in rows])


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    rows = [Result(0, name, 1.0, 0.5)]
    assert parse_shard(shard_text(rows)) == rows
    with result_table(tmp_path / "scores.csv") as append:
        append(rows, [True])
    assert "'caf\\udce9.png,1,0.5,true," in (tmp_path / "scores.csv").read_text(encoding="utf-8")
    assert list_digest(FileImages([Path(name)])) != list_digest(FileImages([Path("caf.png")]))


def test_shards_cover_the_list_once() -> None:
    for count in range(12):
        shards = ScoreRun(Path("run"), count, 5).shards
        assert [index for shard in shards for index in range(shard.start, shard.stop)] == list(range(count))


def test_a_shard_with_a_missing_or_repeated_row_is_never_written(tmp_path: Path) -> None:
    run = ScoreRun(tmp_path, 4, 2)
    rows = [Result(index, "x", 0.0, 1.0) for index in (0, 1)]
    for wrong in (rows[:1], [*rows, rows[0]], rows[::-1]):
        with pytest.raises(ValueError, match="once each"):
            run.write(run.shards[0], wrong)
    assert list(tmp_path.iterdir()) == []


def identity(**changes: object) -> Identity:
    facts = {"detector": "d", "images": "i", "count": 7, "groups": None, **changes}
    return Identity(**facts)  # type: ignore[arg-type]


def test_a_run_is_taken_up_with_its_own_sizes(tmp_path: Path) -> None:
    first = open_run(tmp_path / "run", identity(), 3)
    first.write(first.shards[1], [Result(index, f"{index}.png", 0.0, 1.0) for index in (3, 4, 5)])
    (tmp_path / "run" / ".shard-00002.csv.abc.part").write_text("half")
    second = open_run(tmp_path / "run", identity(), 100)
    assert [shard.number for shard in second.pending()] == [0, 2]
    assert not list((tmp_path / "run").glob(".*.part"))
    assert len(open_run(tmp_path / "run", identity(), restart=True).pending()) == 1


def test_urls_have_the_digest_of_their_names() -> None:
    urls = [f"s3://bucket/{index}.png" for index in range(3)]
    assert list_digest(FileImages(urls)) == list_digest(FileImages(list(urls)))
    assert list_digest(FileImages(urls)) != list_digest(FileImages(urls[::-1]))


def test_a_run_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    """It has a list of files besides `run.json`, which is deleted with the run."""
    shard = "index,path,score,p_value,error\r\n" + "".join(f"{index},{index}.png,0.5,1.0,\r\n" for index in range(3))
    facts = {"schema": 1, "detector": "d", "images": "i", "count": 7, "groups": None, "shard_size": 3, "format": "csv"}
    (tmp_path / "run.json").write_text(json.dumps({**facts, "versions": {}}))
    (tmp_path / "images.json").write_text(json.dumps(FILES.names))
    (tmp_path / "shard-00000.csv").write_text(shard, newline="")
    run = open_run(tmp_path, identity())
    assert [shard.number for shard in run.pending()] == [1, 2]
    assert parse_shard(run.path(run.shards[0]).read_text())[2] == Result(2, "2.png", 0.5, 1.0)
    open_run(tmp_path, identity(), restart=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"detector": "other"}, "detector was 'd' and is 'other' now"),
        ({"images": "other"}, "images was 'i' and is 'other' now"),
        ({"count": 8, "images": "other"}, "count was 7 and is 8 now"),
        ({"groups": "g"}, "groups was None and is 'g' now"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    open_run(tmp_path / "run", identity())
    with pytest.raises(InputError, match=f"{sentence}; restart"):
        open_run(tmp_path / "run", identity(**changes))


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(InputError, match="contains no run"):
        open_run(tmp_path, identity())
    for text, sentence in (("{", "readable JSON"), ("[]", "not a run"), ('{"schema": 1}', "has no 'detector'")):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(InputError, match=sentence):
            open_run(tmp_path, identity())


def test_shards_whose_run_is_lost_are_thrown_away_when_told(tmp_path: Path) -> None:
    open_run(tmp_path, identity())
    (tmp_path / "shard-00000.csv").touch()
    (tmp_path / "run.json").unlink()
    with pytest.raises(InputError, match=r"pieces of a run and no run\.json; restart"):
        open_run(tmp_path, identity())
    (tmp_path / "shard-notes.txt").touch()
    with pytest.raises(InputError, match="contains no run"):
        open_run(tmp_path, identity(), restart=True)
    (tmp_path / "shard-notes.txt").unlink()
    assert len(open_run(tmp_path, identity(), restart=True).pending()) == 1


@given(rows=results())
@example(rows=[Result(0, "a\rb.png", 1.0, 0.5), Result(1, "a\nb.png", math.nan, math.nan, "cut\rshort")])
def test_a_table_for_standard_output_keeps_every_name(rows: list[Result]) -> None:
    """Names may hold line ends of any kind."""
    text = io.StringIO(newline="")
    csv_table(text, "\n")(rows, [False] * len(rows))
    found = list(csv.reader(io.StringIO(text.getvalue(), newline="")))
    assert [unescape_cell(row[0]) for row in found[1:]] == [row.name for row in rows]
    assert text.getvalue().count("\n") == len(rows) + 1
    assert text.getvalue().startswith("path,score,p_value,alarm,error\n")


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    run = ScoreRun(tmp_path, 2, 2)
    rows = [Result(index, "x", 0.0, 1.0) for index in (0, 1)]
    run.write(run.shards[0], rows)
    whole = run.path(run.shards[0]).read_bytes()
    for damaged in (whole[: len(whole) // 2], b""):
        run.path(run.shards[0]).write_bytes(damaged)
        with pytest.raises(InputError, match=r"shard-00000.*delete it"):
            list(run.results())
    run.path(run.shards[0]).write_text(shard_text(rows[:1]), newline="")
    with pytest.raises(InputError, match="needs the rows 0 to 1, once each"):
        list(run.results())


def test_merging_decides_over_all_rows(tmp_path: Path) -> None:
    run = ScoreRun(tmp_path / "run", 5, 2)
    errors = {3: "damaged"}
    for shard in run.shards:
        indices = range(shard.start, shard.stop)
        run.write(shard, [Result(i, f"{i}.png", float(i), i / 10, errors.get(i)) for i in indices])
    seen: list[np.ndarray] = []

    def decide(p_values: np.ndarray, scores: np.ndarray) -> np.ndarray:
        seen.append(p_values)
        return p_values <= 0.2

    with open(tmp_path / "out.csv", "w") as handle:
        summary = merge(run, decide, csv_table(handle, "\n"))
    np.testing.assert_equal(seen[0], [0.0, 0.1, 0.2, np.nan, 0.4])
    assert summary == (3, 1)
    assert (tmp_path / "out.csv").read_text().splitlines()[2:5] == [
        "1.png,1,0.1,true,",
        "2.png,2,0.2,true,",
        "3.png,,,,damaged",
    ]


@pytest.mark.parametrize("name", ["table.csv", "table.parquet"])
def test_a_table_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    failed = Result(1, "b.png", math.nan, math.nan, "is damaged")
    rows = [Result(0, "=a.png", 1.5, 0.25), failed, Result(2, "c", 2.0, 1.0)]
    for alarms in ([True, None, False], [None, None, None]):
        with result_table(tmp_path / name) as append:
            append(rows, alarms)
        found = read_table(tmp_path / name)
        np.testing.assert_equal([vars(result) for result, _ in found], [vars(row) for row in rows])
        assert [alarm for _, alarm in found] == alarms


def test_reasons_are_kept_in_shards_and_written_on_request(tmp_path: Path) -> None:
    row = Result(0, "a.png", 1.5, 0.25, None, {"texture and noise": 0.0123456789, "output": 0.001})
    (found,) = parse_shard(shard_text([row]))
    assert found.evidence == {"texture and noise": 0.0123456789}
    text = io.StringIO(newline="")
    csv_table(text, "\n", explain=True)([found], [True])
    assert text.getvalue().splitlines() == [
        "path,score,p_value,alarm,error,reason",
        "a.png,1.5,0.25,true,,texture and noise (0.0123)",
    ]
    with result_table(tmp_path / "table.parquet", explain=True) as append:
        append([found], [True])
    import pyarrow.parquet as pq

    assert pq.read_table(tmp_path / "table.parquet").to_pylist()[0]["reason"] == "texture and noise (0.0123)"


def test_what_changes_a_score_changes_the_digest(detector: gepc.GEPC) -> None:
    same = toy_detector().fit(pictures(40, seed=1))
    same.batch_size = 3
    assert detector_digest(same.fitted) == detector_digest(detector.fitted)
    for other in (
        toy_detector(seed=1).fit(pictures(40, seed=1)),
        toy_detector(keep=1).fit(pictures(40, seed=1)),
        toy_detector().fit(pictures(40, seed=2)),
    ):
        assert detector_digest(other.fitted) != detector_digest(detector.fitted)
    images = pictures(3)
    assert list_digest(ArrayImages(images)) != list_digest(ArrayImages(images[::-1]))
    assert list_digest(FILES) != list_digest(FileImages(FILES.paths[::-1]))


def test_the_format_is_what_the_name_says() -> None:
    assert [format_of(name) for name in ("a.csv", "a.txt", "a.parquet", "a.PQ")] == ["csv", "csv", "parquet", "parquet"]
    with pytest.raises(OptionError, match=r"tables are CSV or Parquet, not \.xlsx"):
        format_of("a.xlsx")
