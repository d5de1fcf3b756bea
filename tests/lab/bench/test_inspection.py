"""The benchmark of inspection: own folders and public benchmarks, and figures that mean what they say."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from diffusers import DDPMScheduler
from PIL import Image
from toys import LEVELS, as_uint8, pictures, toy_network

from gepc.cli.app import run
from gepc.core.errors import InputError, OptionError
from gepc.core.files import read_json
from gepc.lab.bench.inspection import (
    COUNTS,
    METRICS,
    PUBLISHED,
    InspectionProtocol,
    f1_max,
    fit_part,
    inspect,
    measure_part,
    read_categories,
    run_inspection,
)
from gepc.lab.bench.protocol import load_inspection
from gepc.lab.metrics import region_overlap

OPTIONS = {"levels": LEVELS[:1], "resize": "stretch", "size": 16}
PROTOCOL = InspectionProtocol(options=OPTIONS, test_images=4)


def save(path: Path, pixels: npt.NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def defects(count: int, value: int = 255) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
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


def own(root: Path) -> Path:
    """Good images, and two kinds of defects: with masks beside the images, and as in MVTec AD."""
    good(root / "good", 40)
    for index, (image, mask) in enumerate(defects(8)):
        if index < 4:
            save(root / "beside" / f"{index}.bmp", image)
            save(root / "beside" / f"{index}.png", mask)
        else:
            save(root / "test" / "apart" / f"{index}.png", image)
            save(root / "ground_truth" / "apart" / f"{index}_mask.png", mask)
    return root


OWN = {"beside": "beside", "apart": "test/apart"}
KINDS = ("cut", "dent")


def mvtec(root: Path, test: str = "test", truth: str = "ground_truth", kinds: tuple[str, ...] = KINDS) -> Path:
    for category in ("bolt", "tile"):
        good(root / category / "train" / "good", 28)
        good(root / category / test / "good", 6)
        for kind in kinds:
            for index, (image, mask) in enumerate(defects(4)):
                save(root / category / test / kind / f"{index:03d}.png", image)
                save(root / category / truth / kind / f"{index:03d}_mask.png", mask)
    return root


def visa(root: Path) -> Path:
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
    (root / "split_csv").mkdir()
    with (root / "split_csv" / "1cls.csv").open("w", newline="") as handle:
        csv.writer(handle).writerows([("object", "split", "label", "image", "mask"), *rows])
    return root


def counts(root: Path) -> tuple[str, list[tuple[str, int, int, int]]]:
    name, parts = read_categories(root)
    return name, [(one.name, len(one.fit), len(one.good), len(one.defective[one.name])) for one in parts]


def test_each_public_benchmark_is_read_as_it_is_distributed(tmp_path: Path) -> None:
    first = mvtec(tmp_path / "ad")
    (first / "license.txt").write_text("")
    assert counts(first) == ("MVTec AD", [("bolt", 28, 6, 8), ("tile", 28, 6, 8)])
    second = mvtec(tmp_path / "ad2", "test_public", "test_public/ground_truth", ("bad",))
    assert counts(second) == ("MVTec AD 2", [("bolt", 28, 6, 4), ("tile", 28, 6, 4)])
    assert counts(visa(tmp_path / "visa")) == ("VisA", [("candle", 25, 5, 4)])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no category of MVTec AD 2, MVTec AD, VisA"):
        read_categories(tmp_path)
    root = mvtec(tmp_path / "ad")
    (root / "tile/ground_truth/cut/001_mask.png").unlink()
    with pytest.raises(InputError, match=r"tile lacks 1 of its images and masks, first .*001_mask\.png"):
        read_categories(root)
    shutil.rmtree(root / "tile/test")
    with pytest.raises(InputError, match="tile needs good images to fit on, good and defective ones to test"):
        read_categories(root)
    (tmp_path / "visa").mkdir()
    table = visa(tmp_path / "visa") / "split_csv" / "1cls.csv"
    (tmp_path / "visa/candle/Data/Images/Normal/007.JPG").unlink()
    with pytest.raises(InputError, match=r"candle lacks 1 of its images and masks, first .*007\.JPG"):
        read_categories(tmp_path / "visa")
    table.write_text("object,split\ncandle,train\n")
    for gone in (False, True):
        if gone:
            table.unlink()  # another division of the images would be another benchmark
        with pytest.raises(InputError, match=r"1cls\.csv is not the table of VisA"):
            read_categories(tmp_path / "visa")


def test_own_folders_are_divided_by_the_seed(tmp_path: Path) -> None:
    data = own(tmp_path)
    protocol = InspectionProtocol("good", OWN, fit_images=28, skip_images=4)
    _, (part,) = protocol.parts(data)
    assert (len(part.fit), len(part.good), part.images) == (28, 8, 44)
    assert not set(part.fit) & set(part.good)
    assert [path.suffix for path, _ in part.defective["beside"]] == [".bmp"] * 4  # masks are no images
    _, (fewer,) = InspectionProtocol("good", OWN, fit_images=28, test_images=3, test_good_images=5).parts(data)
    assert (len(fewer.good), len(fewer.defective["apart"])) == (5, 3)
    for count in (40, None):
        with pytest.raises(InputError, match="lower fit_images"):
            InspectionProtocol("good", OWN, fit_images=count).parts(data)
    _, (apart,) = InspectionProtocol("good", OWN, test_good="beside").parts(data)
    assert (len(apart.fit), len(apart.good)) == (40, 4)
    with pytest.raises(
        InputError, match=r"has a mask; that of part\.jpg is part\.png or .* ground_truth/good/part_mask"
    ):
        InspectionProtocol("good", {"none": "good"}, fit_images=28).parts(data)
    with pytest.raises(InputError, match="nowhere is not a folder"):
        InspectionProtocol("good", {"none": "nowhere"}, fit_images=28).parts(data)
    with pytest.raises(InputError, match="no key `good`"):
        InspectionProtocol(defects=OWN, fit_images=28).parts(data)


def test_protocols_are_recognised() -> None:
    tiles, public = load_inspection("tiles"), load_inspection("mvtec")
    assert tiles is not None
    assert public is not None
    assert set(tiles.defects) == {"blowhole", "break", "crack", "fray", "uneven"}
    assert not public.defects
    assert load_inspection("quick") is None


@pytest.mark.parametrize("make", [own, mvtec, visa])
def test_defects_are_noticed_and_a_second_run_resumes(tmp_path: Path, make: Any) -> None:
    root, out, seen = make(tmp_path / "data"), tmp_path / "out", list[int]()
    layout = {"good": "good", "defects": OWN, "fit_images": 28} if make is own else {}
    protocol = InspectionProtocol(options=OPTIONS, test_images=4, **layout)
    table = run_inspection(protocol, toy_network(image_size=None), root, out, seen.append)
    assert table.header[1 : 1 + len(COUNTS) + len(METRICS)] == (*COUNTS, *METRICS)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    for row in rows.values():
        assert all(0.6 < float(row[metric]) <= 1.0 for metric in METRICS[:6])
    assert list(rows)[-1] == "mean"
    if make is own:
        assert set(rows) == {*OWN, "mean"}
        assert rows["apart"]["found at 0.1"] == pytest.approx(1.0)  # an engineer asks for the defects that are found
        assert rows["apart"]["found at 0.05"] is None  # for which there are too few calibration images
    network = toy_network(image_size=None)
    assert run_inspection(protocol, network, root, out) == table
    assert network.forward_count == 0
    with pytest.raises(InputError, match="holds a run with other settings"):
        run_inspection(InspectionProtocol(options=OPTIONS, seed=1, **layout), network, root, out)


def test_no_image_is_used_to_fit_and_to_test(tmp_path: Path) -> None:
    data = own(tmp_path)
    (data / "beside").rename(data / "good" / "beside")  # folders are read with all that is below them
    kinds = {"beside": "good/beside"}
    for given in ({"fit_images": 40}, {"test_good": "good"}):
        with pytest.raises(InputError, match="is in a folder to fit on and in one to test with"):
            InspectionProtocol("good", kinds, **given).parts(data)


def test_folders_of_a_protocol_are_not_ignored_without_kinds_of_defects() -> None:
    for given in ({"good": "good"}, {"test_good": "good"}, {"skip_images": 5}):
        with pytest.raises(OptionError, match="need `defects`"):
            InspectionProtocol(**given)


def test_a_kind_of_defect_without_a_usable_mask_is_named(tmp_path: Path) -> None:
    data = own(tmp_path)
    _, (part,) = InspectionProtocol("good", {"beside": "beside"}, fit_images=28, options=OPTIONS).parts(data)
    fitted = fit_part(PROTOCOL, part, toy_network(image_size=None))
    for _, mask in part.defective["beside"]:
        save(mask, np.zeros((16, 16), dtype=np.uint8))
    with pytest.raises(InputError, match="beside: no mask covers a part of its image"):
        measure_part(fitted, part)


def test_masks_are_bright_or_numbered_and_unusable_ones_are_left_out(tmp_path: Path) -> None:
    data = own(tmp_path)
    protocol = InspectionProtocol("good", OWN, fit_images=28, options=OPTIONS)
    _, (part,) = protocol.parts(data)
    fitted = fit_part(protocol, part, toy_network(image_size=None))
    path, mask = part.defective["beside"][0]
    expected = np.asarray(Image.open(mask)) > 0
    faded = np.where(expected, 200, 60).astype(np.uint8)  # as scans have it
    for pixels in (faded, expected.astype(np.uint8)):
        save(mask, pixels)
        assert (inspect(fitted, path, mask, lambda _: None).mask == expected).all()
    save(mask, np.zeros((16, 16), dtype=np.uint8))
    assert measure_part(fitted, part)["beside"]["defective"] == 3
    save(mask, np.zeros((8, 8), dtype=np.uint8))
    with pytest.raises(InputError, match=r"has \(8, 8\) pixels, its image \(16, 16\)"):
        measure_part(fitted, part)


@pytest.mark.parametrize("other", ["time", "files"])
def test_results_with_another_conditioning_or_of_other_files_are_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    values = {**dict.fromkeys(COUNTS, 1), **dict.fromkeys(METRICS, 0.5)}
    monkeypatch.setattr("gepc.lab.bench.inspection.fit_part", lambda *_: None)
    monkeypatch.setattr("gepc.lab.bench.inspection.measure_part", lambda _, part, *__: {part.name: values})
    root, network = visa(tmp_path / "data"), toy_network(image_size=None)
    network.sha256 = "the same weights"
    table = run_inspection(PROTOCOL, network, root, tmp_path / "out")
    assert run_inspection(PROTOCOL, network, root, tmp_path / "out") == table
    if other == "time":
        monkeypatch.setattr(network, "settings", lambda: {"time_scale": 4.0})
    else:
        shutil.copy(root / "candle/Data/Images/Anomaly/000.JPG", root / "candle/Data/Images/Normal/000.JPG")
    with pytest.raises(InputError, match="holds a run with other settings or files"):
        run_inspection(PROTOCOL, network, root, tmp_path / "out")


def test_published_rows_are_beside_all_categories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**dict.fromkeys(COUNTS, 1), **dict.fromkeys(METRICS, 0.5)}
    root = mvtec(tmp_path / "data", kinds=("cut",))
    for number in range(13):
        (root / f"copy{number:02d}").symlink_to(root / "bolt")
    monkeypatch.setattr("gepc.lab.bench.inspection.fit_part", lambda *_: None)
    monkeypatch.setattr("gepc.lab.bench.inspection.measure_part", lambda _, part, *__: {part.name: values})
    table = run_inspection(PROTOCOL, toy_network(image_size=None), root, tmp_path / "out")
    assert [row[0] for row in table.rows[-3:]] == ["mean", *PUBLISHED]
    assert table.rows[-2][table.header.index("AU-PRO")] == 0.934


def test_region_overlap_takes_images_of_several_sizes() -> None:
    masks = [np.eye(4, dtype=bool), np.pad(np.ones((2, 3), dtype=bool), 2)]
    assert region_overlap([mask.astype(float) for mask in masks], masks) == pytest.approx(1.0)
    assert region_overlap([-mask.astype(float) for mask in masks], masks) == pytest.approx(0.0)


def test_the_largest_f1_is_over_all_thresholds() -> None:
    assert f1_max([0.0, 1.0], [2.0, 3.0]) == 1.0
    assert f1_max([0.0, 2.5], [2.0, 3.0]) == pytest.approx(0.8)  # all above 1: precision 2/3, recall 1
    assert f1_max([1.0, 1.0], [1.0]) == pytest.approx(0.5)


def test_the_command_writes_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], plain_net: Any) -> None:
    root = visa(tmp_path / "visa")
    plain_net.save_pretrained(tmp_path / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(tmp_path / "net")
    words = ["bench", "mvtec", "--data", str(root), "--out", str(tmp_path / "out"), "--backbone", str(tmp_path / "net")]
    words += ["--set", "test_images=2", "--set", "test_good_images=2"]
    sized = ["--set", "size=16", "--set", "options={resize: stretch}"]  # a key of the method is an option of it
    assert run([*words, *sized, "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
    assert run([*words, "--methods", "msma"]) == 2
    assert "--methods does not go with a benchmark of inspection" in capsys.readouterr().err
    assert run([*words, "--set", "sise=16"]) == 2
    assert "has no option 'sise'; did you mean 'size'?" in capsys.readouterr().err
    words += sized
    assert run(words) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert "| candle | 25 | 2 | 2 |" in printed.out
    assert "25 good images to fit on, 2 to test with, 2 with defects" in printed.err
    results = read_json(tmp_path / "out" / "results.json")
    assert [row["defects"] for row in results["tables"][0]["rows"]] == ["candle", "mean"]
    assert (tmp_path / "out" / "tables" / "categories.csv").is_file()


@pytest.mark.parametrize(
    "option", [{"fit_images": 0}, {"test_images": 0}, {"test_good_images": 0}, {"skip_images": -1}]
)
def test_numbers_of_images_are_checked(option: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"protocol: .* at least"):
        InspectionProtocol(**option)  # type: ignore[arg-type]
