"""Run folders and logs: identity, one writer, and what a crash leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gepc.core.errors import InputError, StorageError
from gepc.core.run_folder import RowLog, RunFolder, storage_errors

IDENTITY = {"detector": "0" * 64, "scene": {"height": 5, "width": 7}}


def new(path: Path) -> RunFolder:
    return RunFolder(path, r"piece-\d|work", "give another place")


def test_a_run_is_resumed_with_its_own_layout(tmp_path: Path) -> None:
    run = new(tmp_path / "run")
    with run.held():
        assert run.begin(IDENTITY, {"size": 3})["size"] == 3
        (run.path / ".piece-1.abc.part").touch()
        assert run.begin(IDENTITY, {"size": 9})["size"] == 3
        assert not list(run.path.glob(".*.part"))
        assert json.loads((run.path / "run.json").read_text()) == {"schema": 1, **IDENTITY, "size": 3}


def test_another_identity_is_refused_by_name(tmp_path: Path) -> None:
    new(tmp_path).begin(IDENTITY)
    before = (tmp_path / "run.json").read_bytes()
    for changes, message in (
        ({"scene": {"height": 5, "width": 8}}, "scene width was 7 and is 8 now; give another place"),
        ({"detector": "1" * 64}, r"detector was 000000000000\.\.\. and is 111111111111\.\.\. now"),
        ({"more": 1}, "has no 'more'"),
    ):
        with pytest.raises(InputError, match=message):
            new(tmp_path).begin({**IDENTITY, **changes})
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_restart_deletes_pieces_and_nothing_else(tmp_path: Path) -> None:
    run = new(tmp_path)
    run.begin(IDENTITY)
    (tmp_path / "piece-1").touch()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "file").touch()
    (tmp_path / "letter.txt").touch()
    run.begin({**IDENTITY, "more": 1}, restart=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.txt", "run.json"]


def test_a_folder_with_other_files_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    for restart in (False, True):
        with pytest.raises(InputError, match="not empty and contains no run"):
            new(tmp_path).begin(IDENTITY, restart=restart)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    (tmp_path / "run.json").write_text(json.dumps({"schema": 0}))
    with pytest.raises(InputError, match="not a run of this version; give another place"):
        new(tmp_path).begin(IDENTITY)


def test_one_process_holds_a_folder_and_leaves_no_empty_one(tmp_path: Path) -> None:
    with new(tmp_path / "run").held(), pytest.raises(InputError, match="another process"), new(tmp_path / "run").held():
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"), new(tmp_path / "file").held():
        pass
    with pytest.raises(StorageError, match="cannot write"), new(tmp_path / "file" / "run").held():
        pass


ROWS = st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.integers().map(str)))


@given(rows=ROWS, cut=st.integers(0, 30))
def test_a_log_cut_anywhere_keeps_its_whole_rows(
    rows: list[tuple[str, str]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log = RowLog(tmp_path_factory.mktemp("log") / "log.csv", ("name", "number"))
    log.recover()
    sizes = [log.path.stat().st_size, *(log.append([row]) for row in rows)]
    content = log.path.read_bytes()
    kept = content[: max(0, len(content) - cut)]
    log.path.write_bytes(kept)
    whole = sum(size <= len(kept) for size in sizes[1:])
    log.recover(sizes[whole] if len(kept) >= sizes[0] else 0)
    assert [tuple(row.values()) for row in log.rows()] == rows[:whole]


def test_a_log_without_a_known_size_ends_with_its_last_whole_row(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "log.csv", ("name", "number"))
    log.recover()
    log.append([("a", "1"), ("b", "2")])
    with open(log.path, "ab") as handle:
        handle.write(b"c,")
    log.recover()
    assert [row["name"] for row in log.rows()] == ["a", "b"]
    log.path.write_bytes(b"name,nu")  # killed while the header was written
    log.recover()
    assert log.path.read_bytes() == b"name,number\r\n"


def test_a_log_that_is_another_file_or_too_short_is_left_alone(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "log.csv", ("name", "number"))
    log.path.write_bytes(b"one line")
    with pytest.raises(InputError, match="is not a log of this kind"):
        log.recover()
    assert log.path.read_bytes() == b"one line"
    log.path.write_bytes(b"name,number\r\n")
    with pytest.raises(InputError, match="rows are missing"):
        log.recover(100)


def test_a_damaged_row_in_the_middle_of_a_log_is_named(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "log.csv", ("name", "number"))
    log.path.write_bytes(b"name,number\r\na,1\r\nb\r\nc,3\r\n")
    with pytest.raises(InputError, match=r"log\.csv, row 3 is damaged; remove it, or give another file"):
        list(log.rows())


def test_pieces_without_a_description_are_no_run_and_a_restart_discards_them(tmp_path: Path) -> None:
    (tmp_path / "piece-1").touch()
    with pytest.raises(InputError, match=r"holds pieces of a run and no run\.json; give another place"):
        new(tmp_path).begin(IDENTITY)
    new(tmp_path).begin(IDENTITY, restart=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_an_error_that_names_its_file_already_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"^cannot write b: full$"), storage_errors(tmp_path):
        raise StorageError("cannot write b: full")
    with pytest.raises(StorageError, match=f"cannot write {tmp_path}: full"), storage_errors(tmp_path):
        raise OSError(28, "full")


def test_a_log_that_ends_within_quotes_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('a,b\n1,"2\n')
    with pytest.raises(InputError, match=r"is damaged .*remove the row"):
        list(RowLog(tmp_path / "log.csv", ("a", "b")).rows())
