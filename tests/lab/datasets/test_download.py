"""Downloads from a local server: the true formats, broken transfers, wrong checksums, a full disk."""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crashes import crashes, tree
from PIL import Image
from scipy.io import savemat

from gepc.cli.app import run
from gepc.core.errors import InputError, OptionError, StorageError
from gepc.lab.datasets import download
from gepc.lab.datasets.download import FILES, MANUAL, RemoteFile, fetch

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (7, 28, 28), dtype=np.uint8)


def picture() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(stream, format="JPEG")
    return stream.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def cifar(labels: int, count: int) -> bytes:
    return RNG.integers(0, 256, count * (labels + 3072), dtype=np.uint8).tobytes()


def matlab(count: int) -> bytes:
    stream = io.BytesIO()
    savemat(stream, {"X": RNG.integers(0, 256, (32, 32, 3, count), dtype=np.uint8)}, do_compression=True)
    return stream.getvalue()


def contents() -> dict[str, tuple[bytes, ...]]:
    """Data set -> its files, small, in the formats of the real ones."""
    batches = {f"cifar-10-batches-bin/data_batch_{n}.bin": cifar(1, 2) for n in range(1, 6)}
    return {
        "cifar10": (tar({**batches, "cifar-10-batches-bin/test_batch.bin": cifar(1, 3)}),),
        "cifar100": (tar({"cifar-100-binary/train.bin": cifar(2, 5), "cifar-100-binary/test.bin": cifar(2, 2)}),),
        "svhn": (matlab(6), matlab(4)),
    }


COUNTS = {"cifar10": (10, 3), "cifar100": (5, 2), "svhn": (6, 4)}


@dataclass
class Server:
    """What a server offers and what it was asked for; `cut` breaks that many answers in the middle."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: int = 0
    ranges: bool = True
    asked: list[str | None] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content, asked = state.files.get(self.path), self.headers.get("Range")
            state.asked.append(asked)
            if content is None:
                self.send_error(404)
                return
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and state.ranges else 0
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            broken, state.cut = state.cut > 0, max(0, state.cut - 1)
            self.wfile.write(content[start : start + (len(content) - start) // 2] if broken else content[start:])

        def log_message(self, *_: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    state.address = f"http://127.0.0.1:{listening.server_port}"
    yield state
    listening.shutdown()
    thread.join()
    listening.server_close()


@pytest.fixture
def offered(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server with all data sets, whose checksums are known."""
    monkeypatch.setattr(download, "CHUNK", 1024)
    for name, found in contents().items():
        files = []
        for one, content in zip(FILES[name], found, strict=True):
            path = f"/{name}/{one.name}"
            server.files[path] = content
            known = {"md5": hashlib.md5(content, usedforsecurity=False).hexdigest(), "size": len(content)}
            files.append(replace(one, url=server.address + path, **known))
        monkeypatch.setitem(FILES, name, tuple(files))
    return server


@pytest.mark.parametrize("name", FILES)
def test_a_data_set_is_downloaded_once_and_can_be_read(name: str, offered: Server, tmp_path: Path) -> None:
    seen: list[int] = []
    train, test = COUNTS[name]
    assert fetch(name, tmp_path, on_bytes=seen.append) == {"train": train, "test": test}
    assert sum(seen) == sum(one.size for one in FILES[name])
    requests = len(offered.asked)
    assert fetch(name, tmp_path) == {"train": train, "test": test}
    assert len(offered.asked) == requests
    assert not list(tmp_path.rglob("*.part"))


def test_a_broken_transfer_continues(offered: Server, tmp_path: Path) -> None:
    offered.cut = 1
    with pytest.raises(InputError, match=r"cannot be downloaded: .*try again to continue"):
        fetch("cifar10", tmp_path)
    (part,) = tmp_path.glob("*.part")
    kept = part.stat().st_size
    assert 0 < kept < FILES["cifar10"][0].size
    assert fetch("cifar10", tmp_path) == {"train": 10, "test": 3}
    assert offered.asked == [None, f"bytes={kept}-"]


def test_a_server_without_ranges_starts_again(offered: Server, tmp_path: Path) -> None:
    offered.cut, offered.ranges = 1, False
    with pytest.raises(InputError):
        fetch("cifar10", tmp_path)
    assert fetch("cifar10", tmp_path) == {"train": 10, "test": 3}


def test_a_finished_part_is_checked_and_taken(offered: Server, tmp_path: Path) -> None:
    (one,) = FILES["cifar10"]
    (tmp_path / f"{one.name}.part").write_bytes(offered.files[f"/cifar10/{one.name}"])
    assert fetch("cifar10", tmp_path) == {"train": 10, "test": 3}


def test_a_wrong_checksum_leaves_nothing_behind(
    offered: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = FILES["cifar10"]
    monkeypatch.setitem(FILES, "cifar10", (replace(one, md5="0" * 32),))
    with pytest.raises(InputError, match="is not the expected file, its MD5 is not 000"):
        fetch("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said(offered: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
        with pytest.raises(StorageError, match=r"has 0\.0 GB free, but about"):
            fetch("cifar10", tmp_path)
    assert offered.asked == []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.os, "replace", full)
    with pytest.raises(StorageError, match=r"cannot write .*: No space left on device"):
        fetch("cifar10", tmp_path)


def test_an_archive_is_unpacked_completely_or_not_at_all(
    offered: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "unpack_archive", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(StorageError, match=r"cannot unpack .*cifar-100"):
            fetch("cifar100", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILES["cifar100"][0].name]
    assert fetch("cifar100", tmp_path) == {"train": 5, "test": 2}


def test_a_damaged_archive_is_said(tmp_path: Path) -> None:
    archive = tmp_path / "tiny-imagenet-200.zip"
    archive.write_bytes(b"PK no archive")
    with pytest.raises(InputError, match=r"is damaged: .*remove it and run the command again"):
        download._unpack(archive, tmp_path, "tiny-imagenet-200")


def test_the_command_takes_a_mirror(offered: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = FILES["cifar100"]
    offered.files = {f"/all/{one.name}": offered.files[f"/cifar100/{one.name}"]}
    mirror = ["--mirror", f"{offered.address}/all/"]
    assert run(["data", "get", "cifar100", "--to", str(tmp_path), *mirror]) == 0
    assert capsys.readouterr().out == f"cifar100: 5 training and 2 test images in {tmp_path}\n"
    assert run(["data", "get", "svhn", "--to", str(tmp_path), *mirror]) == 2
    assert "404" in capsys.readouterr().err
    assert run(["data", "get", "cifar1", "--to", str(tmp_path)]) == 2
    assert "did you mean 'cifar1" in capsys.readouterr().err


def test_celeba_is_unpacked_after_its_terms_were_accepted(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"accepting its owners' terms: visit https://mmlab.*img_align_celeba\.zip and"
    ):
        fetch("celeba", tmp_path)
    stream = io.BytesIO()
    Image.new("RGB", (178, 218)).save(stream, format="JPEG")
    archive, partition = MANUAL["celeba"]
    (tmp_path / archive).write_bytes(zipped({f"img_align_celeba/{n}.jpg": stream.getvalue() for n in "abc"}))
    (tmp_path / partition).write_text("a.jpg 0\nb.jpg 0\nc.jpg 2\n")
    assert fetch("celeba", tmp_path) == {"train": 2, "test": 1}


def test_every_file_of_a_data_set_has_an_address_of_its_own() -> None:
    files = [one for found in FILES.values() for one in found]
    assert len({one.name for one in files}) == len(files)
    assert all(isinstance(one, RemoteFile) and len(one.md5) == 32 for one in files)
    with pytest.raises(OptionError, match="unknown data set"):
        fetch("imagenet", Path())


@pytest.mark.parametrize("name", ["svhn", "cifar100"])
def test_a_download_that_ends_at_any_change_is_completed(
    name: str, offered: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Single files, and an archive that is unpacked."""
    monkeypatch.chdir(tmp_path)
    words = ["data", "get", name, "--to", "folder"]
    assert run(words) == 0
    expected = tree(tmp_path / "folder")
    shutil.rmtree("folder")
    seen = 0
    for _ in crashes(lambda: run(words)):
        seen += 1
        found = tree(tmp_path / "folder") if Path("folder").exists() else {}
        whole = {path: content for path, content in found.items() if not path.endswith(".part")}
        assert whole.items() <= expected.items()
        assert run(words) == 0
        assert tree(tmp_path / "folder") == expected
        shutil.rmtree("folder")
    assert seen > 3
