"""Commands that end at any file operation: what is there is whole, and the same command completes.

The detector needs no network pass, so that a copy of this process can run it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from crashes import crashes, tree
from PIL import Image
from toys import as_uint8, pictures

import gepc
import gepc.cli
from gepc.cli.app import run

NETWORK = "photos-tiny"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with images, one of them damaged, and a detector with maps but without passes."""
    monkeypatch.chdir(tmp_path)
    for name, count, seed in (("normal", 40, 0), ("new", 3, 1)):
        (tmp_path / name).mkdir()
        for number, pixels in enumerate(as_uint8(pictures(count, 16, seed=seed))):
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    (tmp_path / "new" / "3.png").write_bytes(b"not an image")
    gepc.create_detector(gepc.load_backbone(NETWORK, device="cpu"), "rx", size=16).fit("normal").save("det")
    return tmp_path


def test_score(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["score", "det", "new", "--out", "out/scores.csv", "--shard-size", "2", "--alpha", "0.1"]
    assert run(arguments) == 0
    expected = tree(place / "out")
    assert list(expected) == ["scores.csv"]
    shutil.rmtree("out")
    seen = 0
    for _ in crashes(lambda: run(arguments)):
        seen += 1
        table = place / "out" / "scores.csv"
        assert not table.exists() or table.read_bytes() == expected["scores.csv"]
        assert run(arguments) == 0
        assert tree(place / "out") == expected
        shutil.rmtree("out")
    assert seen > 8


def test_map(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`metadata.json` says whether the run is finished, and the same command writes over what a crash has left."""
    arguments = ["map", "det", "new/0.png", "--out", "out", "--alpha", "0.1"]
    assert run(arguments) == 0
    expected = tree(place / "out")
    shutil.rmtree("out")
    seen = 0
    for _ in crashes(lambda: run(arguments)):
        seen += 1
        left = tree(place / "out") if (place / "out").exists() else {}
        described = left.pop("metadata.json", None)
        assert all(expected[name] == content for name, content in left.items())
        if described == expected["metadata.json"]:
            assert {**left, "metadata.json": described} == expected
        else:
            assert described is None or json.loads(described) == {"finished": False, "images": []}
        assert run(arguments) == 0
        assert tree(place / "out") == expected
        shutil.rmtree("out")
    assert seen > 8


def test_watch(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every file gets one row, whenever the process ended."""
    arguments = ["watch", "det", "new", "--out", "out/log.csv", "--once", "--alpha", "0.1"]
    seen = 0
    for _ in crashes(lambda: run(arguments)):
        seen += 1
        assert run(arguments) == 0
        rows = (place / "out" / "log.csv").read_text().splitlines()[1:]
        assert sorted(row.split(",")[0] for row in rows) == [f"new/{number}.png" for number in range(4)]
        shutil.rmtree("out")
    assert seen > 3
