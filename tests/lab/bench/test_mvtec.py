"""The benchmarks of industrial inspection, on small folders of the same layouts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from toys import LEVELS, as_uint8, pictures, toy_network

from gepc.cli.app import run
from gepc.core.errors import InputError
from gepc.core.files import read_json
from gepc.lab.bench.mvtec import METRICS, InspectionProtocol, f1_max, read_categories, run_categories

OPTIONS = {"levels": LEVELS[:1], "resize": "stretch", "size": 16}
PROTOCOL = InspectionProtocol(options=OPTIONS, test_images=4)


def save(path: Path, pixels: npt.NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def defects(count: int, value: int) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Smooth images with a square of noise, and their masks with that value inside."""
    rng, found = np.random.default_rng(0), []
    for index, image in enumerate(as_uint8(pictures(count, 16, seed=1, contrast=0.2))):
        mask = np.zeros((16, 16), dtype=np.uint8)
        mask[5:10, 3 + index % 4 : 8 + index % 4] = value
        image[mask > 0] = rng.integers(0, 256, (int((mask > 0).sum()), 3))
        found.append((image, mask))
    return found


def good(folder: Path, count: int, suffix: str = ".png") -> None:
    for index, image in enumerate(as_uint8(pictures(count, 16, contrast=0.2))):
        save(folder / f"{index:03d}{suffix}", image)


KINDS = ("cut", "dent")


def mvtec(root: Path, test: str = "test", truth: str = "ground_truth", kinds: tuple[str, ...] = KINDS) -> Path:
    for category in ("bolt", "tile"):
        good(root / category / "train" / "good", 28)
        good(root / category / test / "good", 6)
        for kind in kinds:
            for index, (image, mask) in enumerate(defects(4, 255)):
                save(root / category / test / kind / f"{index:03d}.png", image)
                save(root / category / truth / kind / f"{index:03d}_mask.png", mask)
    return root


def visa(root: Path, table: bool = True) -> Path:
    images, masks = root / "candle/Data/Images", root / "candle/Data/Masks/Anomaly"
    good(images / "Normal", 30, ".JPG")
    rows = [
        ("candle", "test" if index < 5 else "train", "normal", f"candle/Data/Images/Normal/{index:03d}.JPG", "")
        for index in range(30)
    ]
    for index, (image, mask) in enumerate(defects(4, 1)):  # VisA numbers the kinds of defects
        save(images / "Anomaly" / f"{index:03d}.JPG", image)
        save(masks / f"{index:03d}.png", mask)
        place = f"candle/Data/Images/Anomaly/{index:03d}.JPG"
        rows.append(("candle", "test", "anomaly", place, f"candle/Data/Masks/Anomaly/{index:03d}.png"))
    if table:
        (root / "split_csv").mkdir()
        with (root / "split_csv" / "1cls.csv").open("w", newline="") as handle:
            csv.writer(handle).writerows([("object", "split", "label", "image", "mask"), *rows])
    return root


def counts(root: Path) -> tuple[str, list[tuple[str, int, int, int]]]:
    name, categories = read_categories(root)
    return name, [(one.name, len(one.fit), len(one.good), len(one.defective)) for one in categories]


def test_each_benchmark_is_read_as_it_is_distributed(tmp_path: Path) -> None:
    first = mvtec(tmp_path / "ad")
    (first / "license.txt").write_text("")
    assert counts(first) == ("MVTec AD", [("bolt", 28, 6, 8), ("tile", 28, 6, 8)])
    second = mvtec(tmp_path / "ad2", "test_public", "test_public/ground_truth", ("bad",))
    assert counts(second) == ("MVTec AD 2", [("bolt", 28, 6, 4), ("tile", 28, 6, 4)])
    assert counts(visa(tmp_path / "visa")) == ("VisA", [("candle", 25, 5, 4)])
    assert counts(visa(tmp_path / "plain", table=False)) == ("VisA", [("candle", 27, 3, 4)])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no category of MVTec AD 2, MVTec AD, VisA"):
        read_categories(tmp_path)
    root = mvtec(tmp_path / "ad")
    (root / "tile/ground_truth/cut/001_mask.png").unlink()
    with pytest.raises(InputError, match=r"tile: 1 masks are missing, first .*001_mask\.png"):
        read_categories(root)
    (tmp_path / "visa").mkdir()
    table = visa(tmp_path / "visa") / "split_csv" / "1cls.csv"
    table.write_text("object,split\ncandle,train\n")
    with pytest.raises(InputError, match=r"1cls\.csv is not the table of VisA"):
        read_categories(tmp_path / "visa")


@pytest.mark.parametrize("make", [mvtec, visa])
def test_defects_are_noticed_and_a_second_run_resumes(tmp_path: Path, make: Any) -> None:
    root, out, seen = make(tmp_path / "data"), tmp_path / "out", list[int]()
    table = run_categories(PROTOCOL, toy_network(image_size=None), root, out, seen.append)
    assert table.header[-5:] == METRICS
    for row in table.rows:
        assert all(0.7 < value <= 1.0 for value in row[-5:])
    assert table.rows[-1][0] == "mean"
    network = toy_network(image_size=None)
    assert run_categories(PROTOCOL, network, root, out) == table
    assert network.forward_count == 0
    with pytest.raises(InputError, match="holds a run with other settings"):
        run_categories(InspectionProtocol(options=OPTIONS), network, root, out)


def test_the_largest_f1_is_over_all_thresholds() -> None:
    assert f1_max([0.0, 1.0], [2.0, 3.0]) == 1.0
    assert f1_max([0.0, 2.5], [2.0, 3.0]) == pytest.approx(0.8)  # all above 1: precision 2/3, recall 1
    assert f1_max([1.0, 1.0], [1.0]) == pytest.approx(0.5)


def test_the_command_writes_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = visa(tmp_path / "visa")
    words = ["bench", "mvtec", "--data", str(root), "--out", str(tmp_path / "out")]
    words += ["--set", "test_images=2", "--set", "options={size: 16, resize: stretch}"]
    assert run(words) == 0, capsys.readouterr().err
    assert "| candle | 25 | 2 | 2 |" in capsys.readouterr().out
    results = read_json(tmp_path / "out" / "results.json")
    assert [row["category"] for row in results["tables"][0]["rows"]] == ["candle", "mean"]
    assert (tmp_path / "out" / "tables" / "categories.csv").is_file()
