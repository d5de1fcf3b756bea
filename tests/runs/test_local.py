"""Scoring in one process gives the rows of `Detector.results`, whatever the batches, shards and readers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import pictures, toy_detector

import gepc
from gepc.conformal.p_values import group_labels
from gepc.detector.stream import Result
from gepc.images.sources import ArrayImages, Images, open_images
from gepc.runs.shards import Identity, ScoreRun, open_run, score_shards


def new_run(place: Path, detector: gepc.GEPC, images: Images, shard_size: int = 4) -> ScoreRun:
    return open_run(place, Identity.of(detector.fitted, images), shard_size)


def rows(run: ScoreRun) -> list[Result]:
    return [result for results in run.results() for result in results]


def assert_same(found: list[Result], expected: list[Result]) -> None:
    assert [(r.index, r.name, r.error) for r in found] == [(r.index, r.name, r.error) for r in expected]
    for column in ("score", "p_value"):
        np.testing.assert_allclose(
            [getattr(r, column) for r in found], [getattr(r, column) for r in expected], rtol=1e-5, atol=1e-5
        )


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shard_size=st.integers(1, 13), batch_size=st.integers(1, 8))
def test_batches_and_shards_change_no_row(
    detector: gepc.GEPC, folder: Path, tmp_path_factory: pytest.TempPathFactory, shard_size: int, batch_size: int
) -> None:
    images = open_images(folder)
    expected = list(detector.results(images))
    run = new_run(tmp_path_factory.mktemp("run") / "run", detector, images, shard_size)
    score_shards(run, run.pending(), replace(detector.fitted, batch_size=batch_size), images)
    assert_same(rows(run), expected)
    assert run.pending() == []


def test_bad_files_are_rows_with_reasons(detector: gepc.GEPC, folder: Path, tmp_path: Path) -> None:
    images = open_images(folder)
    (folder / "day" / "3.png").unlink()  # gone since it was listed
    (folder / "day" / "new.png").write_bytes((folder / "day" / "1.png").read_bytes())  # come since
    run = new_run(tmp_path / "run", detector, images)
    score_shards(run, run.pending(), detector.fitted, images)
    errors = {Path(row.name).name: row.error for row in rows(run) if row.error is not None}
    assert sorted(errors) == ["3.png", "cut.png", "empty.png"]
    assert errors["3.png"] == "does not exist"
    assert errors["empty.png"].startswith("is not an image")
    assert errors["cut.png"].startswith("is damaged or cut short")
    assert len(rows(run)) == len(images) == 12


def test_reading_in_processes_gives_the_same_rows(detector: gepc.GEPC, folder: Path, tmp_path: Path) -> None:
    images = open_images(folder)
    expected = list(detector.results(images))
    run = new_run(tmp_path / "run", detector, images)
    score_shards(run, run.pending(), detector.fitted, images, workers=2)
    assert_same(rows(run), expected)


def test_arrays_keep_their_numbers(detector: gepc.GEPC, tmp_path: Path) -> None:
    images = ArrayImages(pictures(7, seed=3))
    run = new_run(tmp_path / "run", detector, images, shard_size=3)
    score_shards(run, run.pending(), detector.fitted, images)
    assert [row.name for row in rows(run)] == [str(index) for index in range(7)]
    assert_same(rows(run), list(detector.results(images)))


def test_groups_follow_their_images(folder: Path, tmp_path: Path) -> None:
    detector = toy_detector().fit(pictures(40, seed=1), groups=["day", "night"] * 20)
    images = open_images(folder)
    labels = group_labels("folder", images, np.arange(len(images)))
    run = open_run(tmp_path / "run", Identity.of(detector.fitted, images, labels), 5)
    score_shards(run, run.pending(), detector.fitted, images, labels)
    assert_same(rows(run), list(detector.results(images, groups="folder")))
    assert Identity.of(detector.fitted, images, labels) != Identity.of(detector.fitted, images)
