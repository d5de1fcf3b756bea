"""`gepc score` on many images: killed at any moment, resumed, refused, merged; by one process or by two."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import processes
import pytest
from PIL import Image
from toys import as_uint8, pictures

pytestmark = pytest.mark.usefixtures("trusted")

COUNT = 10


@pytest.fixture(scope="module")
def place(tmp_path_factory, plain_net):
    """A backbone, a detector, ten images (one damaged, one twice), and the table of an undisturbed run."""
    from diffusers import DDPMScheduler

    import gepc

    root = tmp_path_factory.mktemp("engine")
    plain_net.save_pretrained(root / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(root / "net")
    backbone = gepc.load_backbone(root / "net")
    gepc.GEPC(backbone, levels=(0.99, 0.9), keep=1, group=("flip_x",)).fit(pictures(66, 16, seed=0)).save(root / "det")
    (root / "new").mkdir()
    for index, picture in enumerate(as_uint8(pictures(COUNT - 2, 16, seed=1))):
        Image.fromarray(picture).save(root / "new" / f"{index}.png")
    shutil.copy(root / "new" / "0.png", root / "new" / "same.png")
    (root / "new" / "broken.png").write_bytes((root / "new" / "0.png").read_bytes()[:60])
    return root


@pytest.fixture(scope="module")
def expected(place) -> str:
    """The table as standard output shows it."""
    done = processes.gepc(place, "score", "det", "new", "--alpha", "0.1", outputs=place.with_name("printed"))
    assert done.returncode == 0, done.stderr
    assert len(rows(done.stdout)) == COUNT
    return done.stdout


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def assert_same_table(text: str, expected: str) -> None:
    found, wanted = rows(text), rows(expected)
    assert [(r["path"], r["alarm"], r["error"]) for r in found] == [(r["path"], r["alarm"], r["error"]) for r in wanted]
    for column in ("score", "p_value"):
        numbers = ([float(row[column] or "nan") for row in table] for table in (found, wanted))
        np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-5)


def killed(place: Path, arguments: list[str], interfere: Callable[[], None]) -> None:
    """Run the command line in a process of its own, which `interfere` will kill."""
    done = processes.gepc(place, *arguments, outputs=place.with_name("printed"), before=interfere)
    assert done.returncode == -signal.SIGKILL, done.stderr


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_rename(number: int, before: bool) -> Callable[[], None]:
    """kill -9 just before or just after the number-th file gets its final name."""

    def interfere() -> None:
        rename, count = os.replace, 0

        def replace(source: object, target: object) -> None:
            nonlocal count
            count += 1
            if count == number and before:
                die()
            rename(source, target)
            if count == number:
                die()

        os.replace = replace

    return interfere


def half_written() -> None:
    """kill -9 in the middle of the second shard's bytes."""
    write = Path.write_bytes

    def write_half(path: Path, content: bytes) -> int:
        if path.name.startswith(".shard-00001"):
            write(path, content[: len(content) // 2])
            die()
        return write(path, content)

    Path.write_bytes = write_half


# run.json, three shards and the table get their names in this order
@pytest.mark.parametrize(
    "interfere",
    [at_rename(number, before) for number in range(1, 6) for before in (True, False)] + [half_written],
)
def test_killed_at_any_moment_no_row_is_lost_or_repeated(place, gepc, expected, interfere):
    out = place / "scores.csv"
    command = ["score", "det", "new", "--out", "scores.csv", "--shard-size", "4", "--alpha", "0.1"]
    killed(place, command, interfere)
    finished = {path.name: path.stat().st_mtime_ns for path in place.glob("scores.csv.parts/shard-*.csv")}
    if out.exists():
        assert_same_table(out.read_text(), expected)
    code, _, err = gepc(*command)
    assert code == 0, err
    assert (f"{len(finished)} of 3 shards are finished" in err) == bool(finished)
    assert_same_table(out.read_text(), expected)
    assert not (place / "scores.csv.parts").exists()
    for path in (out, *place.glob(".scores.csv.*.part")):
        path.unlink()


def test_a_real_process_killed_after_its_first_shard(place, gepc, expected):
    arguments = ["score", "det", "new", "--out", "real.csv", "--shard-size", "1", "--batch-size", "1", "--alpha", "0.1"]
    process = processes.start(place, *arguments, outputs=place.with_name("printed"))
    first = place / "real.csv.parts" / "shard-00000.csv"
    while not first.exists() and process.is_alive():
        time.sleep(0.001)
    process.kill()
    process.join()
    code, _, err = gepc(*arguments)
    assert code == 0, err
    assert_same_table((place / "real.csv").read_text(), expected)
    (place / "real.csv").unlink()


def test_resuming_scores_only_what_is_missing(place, gepc, expected, monkeypatch):
    from gepc.detector import stream

    command = ["score", "det", "new", "--out", "some.csv", "--shard-size", "4", "--alpha", "0.1"]
    killed(place, command, at_rename(3, before=False))  # two of three shards
    looked_at = []
    judge = stream.score_chunk

    def counting(fitted, chunk, *others, **options):
        looked_at.append(len(chunk))
        return judge(fitted, chunk, *others, **options)

    monkeypatch.setattr(stream, "score_chunk", counting)
    assert gepc(*command)[0] == 0
    assert sum(looked_at) == 2
    assert_same_table((place / "some.csv").read_text(), expected)


def test_a_changed_list_is_refused(place, gepc, expected):
    command = ["score", "det", "new", "--out", "list.csv", "--shard-size", "4", "--alpha", "0.1"]
    killed(place, command, at_rename(2, before=False))
    shutil.copy(place / "new" / "1.png", place / "new" / "z.png")
    try:
        code, _, err = gepc(*command)
        assert code == 2
        assert "list.csv.parts holds a run with other parameters: count was 10 and is 11 now; restart" in err
        code, _, err = gepc(*command, "--restart")
        assert code == 0, err
        assert len(rows((place / "list.csv").read_text())) == COUNT + 1
    finally:
        (place / "new" / "z.png").unlink()


def test_a_run_over_addresses_is_resumed(place, gepc, expected):
    command = ["score", "det", f"file://{place}/new", "--out", "far.csv", "--shard-size", "4", "--alpha", "0.1"]
    killed(place, command, at_rename(2, before=False))
    code, _, err = gepc(*command)
    assert code == 0, err
    assert "1 of 3 shards are finished" in err
    assert_same_table((place / "far.csv").read_text().replace(f"file://{place}/", ""), expected)


def test_another_detector_is_refused(place, gepc):
    import gepc as library

    killed(place, ["score", "det", "new", "--out", "d.csv", "--shard-size", "4"], at_rename(2, before=False))
    backbone = library.load_backbone(place / "net")
    other = library.GEPC(backbone, levels=(0.99, 0.9), keep=1, group=("flip_x",), seed=5)
    other.fit(pictures(66, 16, seed=0)).save(place / "other")
    code, _, err = gepc("score", "other", "new", "--out", "d.csv")
    assert code == 2
    assert "d.csv.parts holds a run with other parameters: detector was " in err
    assert err.endswith("; restart to discard its shards, or give another folder (on the command line: --restart)\n")
    shutil.rmtree(place / "d.csv.parts")


def test_shards_are_kept_and_merged_on_demand(place, gepc, expected):
    code, out, err = gepc("score", "det", "new", "--shards", "parts", "--shard-size", "3")
    assert (code, out) == (0, ""), err
    assert "10 images in 4 shards in parts" in err
    assert sorted(path.name for path in (place / "parts").glob("shard*")) == [f"shard-0000{i}.csv" for i in range(4)]
    for name in ("all.csv", "all.parquet"):
        assert gepc("score", "det", "new", "--shards", "parts", "--out", name, "--alpha", "0.1")[0] == 0
    assert_same_table((place / "all.csv").read_text(), expected)

    import pyarrow.parquet as pq

    found = pq.read_table(place / "all.parquet")
    assert found.column_names == ["path", "score", "p_value", "alarm", "error"]
    table = found.to_pylist()
    assert [row["path"] for row in table] == [row["path"] for row in rows(expected)]
    assert [row["alarm"] for row in table] == [{"": None}.get(r["alarm"], r["alarm"] == "true") for r in rows(expected)]
    assert (place / "parts").exists()


def test_nothing_but_speed_depends_on_how(place, gepc, expected):
    for options in (["--batch-size", "3"], ["--shard-size", "1"]):
        code, out, err = gepc("score", "det", "new", "--alpha", "0.1", *options)
        assert code == 0, err
        assert_same_table(out, expected)


@contextlib.contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    """A disk that takes no more: writing beyond `limit` bytes fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_what_is_finished(place, gepc, expected):
    command = ["score", "det", "new", "--out", "full.csv", "--shard-size", "4", "--alpha", "0.1"]
    killed(place, command, at_rename(3, before=False))
    with small_files_only(100):
        code, _, err = gepc(*command)
    assert code == 2
    assert "cannot write full.csv.parts/shard-00002.csv" in err
    assert "2 of 3 shards are finished; free some space and run it again" in err
    with small_files_only(300):  # room for the last shard, not for the table
        code, _, err = gepc(*command)
    assert code == 2
    assert "cannot write full.csv:" in err
    assert "All scores are kept in full.csv.parts: free disk space and run the same command again" in err
    assert not (place / "full.csv").exists()
    assert gepc(*command)[0] == 0
    assert_same_table((place / "full.csv").read_text(), expected)


def temporary_files_in(folder: Path) -> None:
    tempfile.tempdir = str(folder)


def test_standard_output_that_takes_no_more_loses_no_score(place, gepc, expected, monkeypatch, tmp_path):
    """In a process of its own, which writes what is left in its buffer when it ends."""
    command = ["score", "det", "new", "--alpha", "0.1"]
    printed = tmp_path / "printed"
    printed.mkdir()
    (printed / "stdout").symlink_to("/dev/full")
    process = processes.start(place, *command, outputs=printed, before=lambda: temporary_files_in(tmp_path))
    process.join()
    assert process.exitcode == 2
    (sentence,) = (printed / "stderr").read_text().strip().splitlines()  # older versions of rich add an empty line
    (kept,) = tmp_path.glob("gepc-*/run")
    assert "cannot write to standard output: No space left on device. Finished shards are kept" in sentence
    assert f"with --shards {kept} and --out FILE" in sentence
    monkeypatch.setattr("gepc.detector.stream.score_chunk", None)  # nothing is left to be scored
    code, _, err = gepc(*command, "--shards", kept, "--out", "rescued.csv")
    assert code == 0, err
    assert_same_table((place / "rescued.csv").read_text(), expected)


def test_standard_output_leaves_nothing_behind(place, gepc, expected, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert gepc("score", "det", "new", "--alpha", "0.1").stdout == expected
    assert gepc("score", "det", "new", "--alpha", "7").returncode == 2
    assert list(tmp_path.iterdir()) == []


def at_removal(number: int) -> Callable[[], None]:
    """kill -9 when the number-th file of the run is to be removed."""

    def interfere() -> None:
        unlink, removed = Path.unlink, 0

        def counting(path: Path, missing_ok: bool = False) -> None:
            nonlocal removed
            removed += not path.name.startswith(".")
            if removed == number:
                die()
            unlink(path, missing_ok)

        Path.unlink = counting

    return interfere


# three shards and run.json
@pytest.mark.parametrize("number", range(1, 5))
def test_killed_while_a_run_is_thrown_away(place, gepc, expected, number):
    command = ["score", "det", "new", "--out", "away.csv", "--shard-size", "4", "--alpha", "0.1"]
    killed(place, command, at_removal(number))  # after merging
    assert_same_table((place / "away.csv").read_text(), expected)
    killed(place, [*command, "--restart"], at_removal(number))  # what is left of it, and the new one if need be
    for again in ([*command, "--restart"], command):
        code, _, err = gepc(*again)
        assert code == 0, err
    assert_same_table((place / "away.csv").read_text(), expected)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--out", "det/detector.json/x.csv"], "cannot write det/detector.json/x.csv: "),
        (["--shards", "x", "--out", "det/detector.json/x.csv"], "cannot write det/detector.json/x.csv: "),
        (["--out", "new"], "new is a folder; --out is a file, such as new/scores.csv"),
        (["--shards", "det/detector.json/x"], "cannot write det/detector.json/x: "),
        (["--out", "x.csv", "--engine", "spark"], "unknown engine 'spark'"),
        (["--out", "x.xlsx"], "tables are CSV or Parquet"),
        (["--shards", "new"], "contains no run"),
    ],
)
def test_bad_requests_write_nothing(place, gepc, options, sentence):
    before = sorted(path.name for path in place.iterdir())
    code, _, err = gepc("score", "det", "new", *options)
    assert code == 2
    assert sentence in err
    assert sorted(path.name for path in place.iterdir()) == before


def test_parquet_without_its_library(place, gepc, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = gepc("score", "det", "new", "--out", "x.parquet")
    assert code == 2
    assert "[parquet]" in err
    assert not list(place.glob("x.parquet*"))


def test_a_second_command_is_kept_out_of_a_run(gepc, place) -> None:
    from gepc.core.files import only_writer

    parts = place / "held.csv.parts"
    parts.mkdir()
    with only_writer(parts):
        code, _, err = gepc("score", "det", "new", "--out", "held.csv", "--alpha", "0.1")
    assert code == 2
    assert "another process is writing into" in err
    assert not (place / "held.csv").exists()
    code, _, err = gepc("score", "det", "new", "--out", "held.csv", "--alpha", "0.1")
    assert code == 0, err
    assert not parts.exists()


def test_a_run_that_came_to_nothing_leaves_no_folder(gepc, place) -> None:
    code, _, _ = gepc("score", "det", "new", "--out", "none.csv", "--alpha", "7")
    assert code == 2
    assert not (place / "none.csv.parts").exists()
