"""A file is whole or absent: whatever goes wrong while writing, what was there stays and nothing is left beside it."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from gepc.core import files
from gepc.core.errors import InputError, StorageError
from gepc.core.files import (
    LOCK,
    check_free,
    digest,
    only_writer,
    read_json,
    replacing,
    replacing_folder,
    restore_folder,
    sha256,
    write_json,
    write_text,
)


def test_a_file_replaces_the_old_one_and_makes_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.txt"
    write_text(path, "first")
    write_text(path, "zweiter, größer")
    assert path.read_text(encoding="utf-8") == "zweiter, größer"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("failure", [ValueError("x"), KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_failure_while_writing_leaves_the_old_file(tmp_path: Path, failure: BaseException) -> None:
    """Disk errors become a `StorageError` that names the final file; others pass."""
    path = tmp_path / "a.txt"
    path.write_text("old")
    expected = StorageError if isinstance(failure, OSError) else type(failure)

    def write_and_fail() -> None:
        with replacing(path) as draft:
            draft.write_text("half")
            raise failure

    with pytest.raises(expected) as caught:
        write_and_fail()
    if expected is StorageError:
        assert str(caught.value) == f"cannot write {path}: No space left on device; the file is as it was before"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_rename_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"cannot write .*file/a\.txt"):
        write_text(tmp_path / "file" / "a.txt", "y")


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    """Even when the writer made its draft private."""
    with replacing(tmp_path / "a") as draft:
        draft.write_text("x")
        draft.chmod(0o600)
    (tmp_path / "plain").write_text("x")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "plain")}
    assert len(modes) == 1


def test_json_comes_back(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": "ü"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert list(read_json(tmp_path / "a.json")) == ["b", "a"]


@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe\x00"])
def test_broken_json_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=r"a\.json is not a readable JSON file"):
        read_json(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"b\.json does not exist"):
        read_json(tmp_path / "b.json")


def test_the_hash_is_of_all_bytes_in_order(tmp_path: Path) -> None:
    first, second = b"a" * (1 << 20) + b"b", b"c"
    (tmp_path / "1").write_bytes(first)
    (tmp_path / "2").write_bytes(second)
    assert sha256(tmp_path / "1", tmp_path / "2") == hashlib.sha256(first + second).hexdigest()


SECOND_WRITER = """
import pathlib, sys
from gepc.core.files import only_writer
with only_writer(pathlib.Path(sys.argv[1])):
    pass
"""


def test_only_one_process_writes_and_nothing_is_left(tmp_path: Path) -> None:
    with only_writer(tmp_path):
        found = subprocess.run(
            [sys.executable, "-c", SECOND_WRITER, tmp_path], capture_output=True, text=True, check=False
        )
        assert f"another process is writing into {tmp_path}; wait for it or give another folder" in found.stderr
        with pytest.raises(InputError, match="another process is writing"), only_writer(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    with only_writer(tmp_path):
        pass


def test_a_lock_file_that_a_killed_process_left_does_not_block(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    with only_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_system_that_has_no_locks_at_all_is_used_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(lock: FileLock) -> None:
        raise NotImplementedError

    monkeypatch.setattr(FileLock, "acquire", fail)
    with only_writer(tmp_path):
        (tmp_path / "a.txt").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EACCES])
def test_without_locks_the_folder_is_used_and_without_permission_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(lock: FileLock) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FileLock, "acquire", fail)
    expected = nullcontext() if number == errno.ENOLCK else pytest.raises(StorageError, match="cannot write in")
    with expected, only_writer(tmp_path):
        pass


@pytest.mark.parametrize("failing", [1, 2])
def test_a_folder_that_cannot_take_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Whichever rename fails: that of the old folder, or that of the new one, after which the old one comes back."""
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    place, calls, rename = tmp_path / "det", [0], os.replace
    place.mkdir()
    write_text(place / "a.txt", "old")

    def replace(source: object, target: object) -> None:
        calls[0] += 1
        if calls[0] == failing:
            raise OSError(errno.EACCES, "Permission denied")
        rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", replace)
    refused = pytest.raises(StorageError, match=r"cannot write .*det: Permission denied; what was there is untouched")
    with refused, replacing_folder(place) as draft:
        (draft / "a.txt").write_bytes(b"new")
    assert (place / "a.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]


def test_a_folder_replaces_the_old_one(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with replacing_folder(tmp_path / "det") as draft:
            (draft / "a.txt").write_text(text)
    assert (tmp_path / "det" / "a.txt").read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "det"]


def test_a_folder_that_was_put_aside_comes_back_unless_it_was_replaced(tmp_path: Path) -> None:
    """Also where its name has letters with a meaning in patterns; folders with similar names stay."""
    final = tmp_path / "det[1]"
    for name in (".det[1].0a.old", ".det1.0a.old"):
        (tmp_path / name).mkdir()
    restore_folder(final)
    assert final.is_dir()
    (tmp_path / ".det[1].0b.old").mkdir()
    restore_folder(final)
    assert sorted(tmp_path.iterdir()) == [tmp_path / ".det1.0a.old", final]


@pytest.mark.skipif(sys.platform != "linux", reason="one step on Linux only")
def test_two_folders_exchange_their_names(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / name).mkdir(parents=True)
    if not files._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert (tmp_path / "a" / "b").is_dir()
    assert (tmp_path / "b" / "a").is_dir()
    assert not files._exchange(tmp_path / "a", tmp_path / "c")


def test_results_go_into_a_folder_that_is_free_or_their_own(tmp_path: Path) -> None:
    for name, entry in {"empty": None, "own": "detector.json", "other": "photo.png"}.items():
        (tmp_path / name).mkdir()
        if entry is not None:
            (tmp_path / name / entry).touch()
    for name in ("new", "empty", "own"):
        check_free(tmp_path / name, "detector.json", "detector")
    with pytest.raises(InputError, match="other is not empty and contains no detector; give another folder"):
        check_free(tmp_path / "other", "detector.json", "detector")
    with pytest.raises(InputError, match=r"photo\.png is a file; give a folder"):
        check_free(tmp_path / "other" / "photo.png", "detector.json", "detector")


def test_a_new_folder_that_cannot_take_its_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: object, target: object) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StorageError, match="Permission denied"), replacing_folder(tmp_path / "det"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_digest_is_of_facts_arrays_and_keys_whatever_their_order() -> None:
    """Names, types and shapes of arrays count, and the order of keys; that of names does not."""
    a, b = np.arange(6.0), np.ones((2, 3), dtype=np.float32)
    first = digest({"x": 1, "y": [2]}, {"a": a, "b": b}, [b"k1", b"k2"])
    assert len(first) == 32
    assert digest({"y": [2], "x": 1}, {"b": b, "a": a}, [b"k1", b"k2"]) == first
    assert digest({"x": 1, "y": [2]}, {"a": a[::-1][::-1], "b": np.asfortranarray(b)}, [b"k1", b"k2"]) == first
    others = [
        digest({"x": 1, "y": [3]}, {"a": a, "b": b}, [b"k1", b"k2"]),
        digest({"x": 1, "y": [2]}, {"a": a, "c": b}, [b"k1", b"k2"]),
        digest({"x": 1, "y": [2]}, {"a": a, "b": b.T}, [b"k1", b"k2"]),
        digest({"x": 1, "y": [2]}, {"a": a.astype(np.float32), "b": b}, [b"k1", b"k2"]),
        digest({"x": 1, "y": [2]}, {"a": a, "b": b}, [b"k2", b"k1"]),
        digest({"x": 1, "y": [2]}),
    ]
    assert len({first, *others}) == 7


def test_a_link_keeps_leading_to_what_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "target.csv").write_text("old")
    for name, target in (("link.csv", "target.csv"), ("current", "v1")):
        (tmp_path / name).symlink_to(target)
    write_text(tmp_path / "link.csv", "new")
    with replacing_folder(tmp_path / "current") as draft:
        (draft / "a.txt").write_text("new")
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "current").is_symlink()
    assert (tmp_path / "target.csv").read_text() == (tmp_path / "v1" / "a.txt").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 4


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """As root, renaming a file over a device would remove the device."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe is not a regular file"):
        write_text(tmp_path / "pipe", "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_folder_without_a_name_of_its_own_is_not_replaced(name: str) -> None:
    with pytest.raises(InputError, match="give a folder by its name"), replacing_folder(name):
        pass


def test_a_file_has_one_writer_and_others_are_free(tmp_path: Path) -> None:
    with only_writer(tmp_path, "log.csv"), only_writer(tmp_path, "other.csv"):
        taken = pytest.raises(InputError, match=r"log\.csv; wait for it or give another file")
        with taken, only_writer(tmp_path, "log.csv"):
            pass
    assert not list(tmp_path.iterdir())
