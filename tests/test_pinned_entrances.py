"""What must not change at the entrances: tables, maps, scenes, answers of the service and results of the library.

Everything goes through the command line, the HTTP service or top-level names of `gepc`, so that modules may move
without a change here. The saved detectors and the expected answers are in `tests/data/pinned/entrances`; all of them
were written by running version 0.2.0:

    python tests/test_pinned_entrances.py

That writes only what is missing. To pin another behaviour deliberately, delete a file or folder first.

The networks of the saved detectors compute in float64, so that numbers of threads, batches and machines do not matter.
Scores and p-values agree to a relative 1e-6 and maps to 1e-5; everything that is not a number agrees exactly. The
detector of the preset `inspect` is fitted here with the default precision, float32, and agrees to 1e-4.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import processes
import pytest
import torch
from PIL import Image

import gepc

FOLDER = Path(__file__).parent / "data" / "pinned" / "entrances"
SCORES, MAPS, SINGLE = 1e-6, 1e-5, 1e-4  # relative tolerances; the last is that of float32
NEAR_ZERO = 1e-9
SIZE = (40, 36)  # of the files, which is not the 32x32 that the detectors see
POINTS = ((0, 0), (7, 19), (16, 16), (31, 31))
SHARDED = ("score", "plus", "mixed", "--shard-size", "3")

Pixels = npt.NDArray[np.uint8]

DETECTORS = {
    "plus": ("normal", "--method", "gepc+"),
    "msma": ("normal", "--method", "msma"),
    "grouped": ("groups", "--method", "msma", "--set", "keep=2", "--groups", "folder"),
}
"""The saved detectors: for each the arguments of `gepc fit`."""


# --- images ----------------------------------------------------------------------------------------------------------


def pictures(count: int, seed: int, size: tuple[int, int] = SIZE, blur: int = 4) -> Pixels:
    """Coloured noise (N, H, W, 3), smooth unless `blur` is 0; the same on every machine."""
    field = np.random.default_rng(seed).integers(0, 256, (count, *size, 3)).astype(np.float64)
    for _ in range(blur):
        field = (field + np.roll(field, 1, 1) + np.roll(field, 1, 2) + np.roll(field, (1, 1), (1, 2))) / 4
    low, high = field.min((1, 2, 3), keepdims=True), field.max((1, 2, 3), keepdims=True)
    return np.floor(255 * (field - low) / (high - low)).astype(np.uint8)


def marked(picture: Pixels, top: int, left: int, side: int) -> Pixels:
    """The picture with a square of noise, which is a defect."""
    found = picture.copy()
    noise = np.random.default_rng(99).integers(0, 2, (side, side, 1)) * 255
    found[top : top + side, left : left + side] = noise.astype(np.uint8)
    return found


def as_png(pixels: npt.NDArray[Any]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def mixed_files() -> dict[str, bytes]:
    """Files of one size: colour, grey, RGBA and 16 bit; a damaged one; and a text that has the name of an image."""
    first, second, third, fourth, fifth = pictures(5, seed=10)
    alpha = np.linspace(0, 255, SIZE[0] * SIZE[1]).astype(np.uint8).reshape(*SIZE, 1)
    deep = third[:, :, 0].astype(np.uint16) * 257 - third[:, :, 1] // 2
    return {
        "broken.png": as_png(first)[:200],
        "colour.png": as_png(first),
        "deep.png": as_png(np.clip(deep, 0, 65535).astype(np.uint16)),
        "flat.png": as_png(np.full_like(first, 130)),
        "grey.png": as_png(second[:, :, 0]),
        "marked.png": as_png(marked(fifth, 10, 8, 12)),
        "noise.png": as_png(pictures(1, seed=11, blur=0)[0]),
        "rgba.png": as_png(np.concatenate([fourth, alpha], axis=2)),
        "text.png": b"This is a text and no image.\n",
    }


def make_images(place: Path) -> None:
    """Write all images that the cases below use."""
    files = {f"mixed/{name}": data for name, data in mixed_files().items()}
    files |= {f"normal/{index:02d}.png": as_png(one) for index, one in enumerate(pictures(60, seed=0))}
    for label, seed, blur in (("day", 1, 4), ("night", 2, 2)):
        usual, new = pictures(30, seed, blur=blur), pictures(4, seed + 100, blur=blur)
        files |= {f"groups/{label}/{index:02d}.png": as_png(one) for index, one in enumerate(usual)}
        files |= {f"new/{label}/{index}.png": as_png(one) for index, one in enumerate(new)}
    files["new/night/broken.png"] = files["mixed/broken.png"]
    files["new/day/4.png"] = as_png(pictures(1, seed=12, blur=2)[0])  # usual at night only
    parts = pictures(44, seed=3, size=(96, 64))
    files |= {f"parts/{index:02d}.png": as_png(one) for index, one in enumerate(parts[:40])}
    files |= {f"inspected/{index}.png": as_png(one) for index, one in enumerate(parts[40:])}
    files["inspected/defect.png"] = as_png(marked(parts[40], 30, 20, 16))
    (scene,) = pictures(1, seed=4, size=(160, 192))
    files["scene.png"] = as_png(marked(scene, 70, 110, 30))
    for name, data in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


# --- entrances -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, so that paths in results are relative."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def command(place: Path, *arguments: object) -> str:
    """`python -m gepc` in the folder `place` and in this process, which spares the import of torch; what it prints."""
    out, err, given = io.StringIO(), io.StringIO(), ["gepc", *map(str, arguments)]
    printed = contextlib.ExitStack()
    printed.enter_context(contextlib.redirect_stdout(out))
    printed.enter_context(contextlib.redirect_stderr(err))
    with inside(place), mock.patch.object(sys, "argv", given), printed, pytest.raises(SystemExit) as ended:
        runpy.run_module("gepc", run_name="__main__")
    assert ended.value.code == 0, err.getvalue()
    return out.getvalue()


def table(text: str) -> list[dict[str, Any]]:
    """The rows of a CSV file, with numbers as numbers."""
    return [{name: value(cell) for name, cell in row.items()} for row in csv.DictReader(io.StringIO(text))]


def value(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def statistics(field: npt.NDArray[Any], points: Sequence[tuple[int, int]] = POINTS) -> dict[str, Any]:
    """What is pinned of a map."""
    pixels = {f"{line},{column}": float(field[line, column]) for line, column in points}
    return {"shape": list(field.shape), "mean": float(field.mean()), "max": float(field.max()), "pixels": pixels}


def score_plus(place: Path) -> Any:
    """`gepc score` with gepc+ at 32x32."""
    return table(command(place, "score", "plus", "mixed"))


def score_msma(place: Path) -> Any:
    """`gepc score` with msma at 32x32."""
    return table(command(place, "score", "msma", "mixed"))


def score_shards(place: Path) -> Any:
    """`gepc score` in shards of three images."""
    command(place, *SHARDED, "--out", "whole.csv")
    return table((place / "whole.csv").read_text())


def maps(place: Path) -> Any:
    """`gepc map`: metadata, regions in both formats, and the maps."""
    command(place, "map", "plus", "mixed", "--out", "maps")
    metadata = json.loads((place / "maps" / "metadata.json").read_text())
    fields = {entry["map"]: np.load(place / "maps" / entry["map"]) for entry in metadata["images"] if entry["map"]}
    coco = json.loads((place / "maps" / "regions.json").read_text())
    for annotation in coco["annotations"]:
        del annotation["segmentation"]  # the box; it was an outline in 0.2
    return {
        "metadata": metadata,
        "regions": table((place / "maps" / "regions.csv").read_text()),
        "coco": coco,
        "maps": {name: {"dtype": str(field.dtype), **statistics(field)} for name, field in fields.items()},
    }


def scene(place: Path) -> Any:
    """`gepc scene` on 160x192 pixels with tiles that overlap, the last ones by more."""
    options = ("--stride", "24", "--control", "tile")
    command(place, "scene", "plus", "scene.png", "--out", "scanned", *options)
    found = place / "scanned"
    summary = json.loads((found / "scene.json").read_text())
    summary["counts"].pop("detections", None)  # newer than the pins
    summary["options"]["map_format"] = "npy"  # the pinned version had others, too
    kept = ("options", "counts", "grid", "network_passes", "calibration_images", "guarantee", "warning", "map_scale")
    points = ((0, 0), (24, 24), (85, 125), (100, 140), (159, 191))
    return {
        "summary": {name: summary[name] for name in kept},
        "tiles": table((found / "tiles.csv").read_text()),
        "regions": table((found / "regions.csv").read_text()),
        "map": statistics(np.load(found / "map.npy"), points),
    }


def service(place: Path) -> Any:
    """`/v1/score` on two images and a damaged one, with maps; the drawn maps as the mean of their opacity."""
    from starlette.testclient import TestClient

    from gepc.serve import Settings, create_app

    files = mixed_files()
    form = [("images", (name, files[name], "image/png")) for name in ("colour.png", "broken.png", "marked.png")]
    with TestClient(create_app(place / "plus", Settings()), base_url="http://127.0.0.1:8000") as client:
        response = client.post("/v1/score", files=form, data={"map": "true"})
    assert response.status_code == 200, response.text
    answer = response.json()
    del answer["detector"]  # a hash of the folder
    for result in answer["results"]:
        if result["map"] is not None:
            data = base64.b64decode(result["map"].removeprefix("data:image/png;base64,"))
            heat = np.asarray(Image.open(io.BytesIO(data)))
            result["map"] = {"shape": list(heat.shape), "opacity": round(float(heat[..., 3].mean()), 1)}
    return answer


# the network, the combination and the settings of `inspect` that version 0.2 takes by default
RULE = ("--backbone", "photos-tiny", "--set", "calibration=parts:narrow=level_knn")
EARLIER = ("--set", "levels=[0.998]", "--set", "positions=gaussian")


def inspect(place: Path) -> Any:
    """`gepc fit` and `gepc score` with the preset `inspect` on images of one size."""
    description = json.loads(
        command(place, "fit", "parts", "--out", "inspector", "--preset", "inspect", *RULE, *EARLIER, "--json")
    )
    del description["fitted"]["parts"]  # since 0.3
    facts = {name: description[name] for name in ("method", "fitted", "cost", "guarantee")}
    return {"detector": facts, "rows": table(command(place, "score", "inspector", "inspected", "--alpha", "0.1"))}


def library(place: Path) -> Any:
    """`results`, `p_value` and `predict` of a detector with groups, which are the names of folders."""
    good = [f"new/{label}/{index}.png" for label in ("day", "night") for index in range(4)]
    with inside(place):
        detector = gepc.load_detector("grouped")
        fields = ("index", "name", "score", "p_value", "error")
        results = [
            {name: getattr(result, name) for name in fields} for result in detector.results("new", groups="folder")
        ]
        labels = [path.split("/")[1] for path in good]
        return {
            "results": [{name: None if one != one else one for name, one in result.items()} for result in results],
            "p_value": detector.p_value(good, groups="folder").tolist(),
            "p_value of labels": detector.p_value(good, groups=labels).tolist(),
            "p_value of swapped labels": detector.p_value(good, groups=labels[::-1]).tolist(),
            "random ties": detector.p_value(good, groups="folder", ties="random").tolist(),
            "predict": detector.predict("new", alpha=0.1, groups="folder", on_error="row").tolist(),
            "predict_fdr": detector.predict("new", fdr=0.5, groups="folder", on_error="row").tolist(),
            "guarantee": str(detector.guarantee(0.1)),
        }


ENTRANCES: Mapping[str, tuple[Callable[[Path], Any], float]] = {
    "score_plus": (score_plus, SCORES),
    "score_msma": (score_msma, SCORES),
    "score_shards": (score_shards, SCORES),
    "maps": (maps, MAPS),
    "scene": (scene, MAPS),
    "service": (service, SCORES),
    "inspect": (inspect, SINGLE),
    "library": (library, SCORES),
}
"""For each file of expected answers what finds them, and the relative tolerance."""


# --- tests -----------------------------------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any, tolerance: float, where: str) -> None:
    """Compare nested answers: numbers to a relative tolerance, everything else exactly."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for name, one in expected.items():
            assert_same(found[name], one, tolerance, f"{where}/{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, one in enumerate(expected):
            assert_same(found[index], one, tolerance, f"{where}/{index}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=tolerance, abs=NEAR_ZERO), where
    else:
        assert (type(found), found) == (type(expected), expected), where


def expected_answers(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def make_place(place: Path) -> None:
    """Images and copies of the saved detectors."""
    make_images(place)
    for name in DETECTORS:
        shutil.copytree(FOLDER / name, place / name)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("entrances")
    make_place(root)
    return root


@pytest.mark.parametrize("name", ENTRANCES)
def test_the_entrance_answers_as_before(name: str, place: Path) -> None:
    if name == "service":
        pytest.importorskip("fastapi", reason="serving needs gepc[serve]")
    answer, tolerance = ENTRANCES[name]
    assert_same(json.loads(json.dumps(answer(place))), expected_answers(name), tolerance, name)


def die_at_third_rename() -> None:
    """kill -9 before the third file gets its final name: the second shard, after the description and the first."""
    rename, count = os.replace, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal count
        count += 1
        if count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.replace = replace  # type: ignore[assignment]


def test_an_interrupted_table_is_the_uninterrupted_one_to_the_byte(place: Path, tmp_path: Path) -> None:
    command(place, *SHARDED, "--out", "uninterrupted.csv")
    resumed = (*SHARDED, "--out", "resumed.csv")
    killed = processes.gepc(place, *resumed, outputs=tmp_path, before=die_at_third_rename)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (place / "resumed.csv").exists()
    finished = processes.gepc(place, *resumed, outputs=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "1 of 3 shards are finished" in finished.stderr
    content = (place / "resumed.csv").read_bytes()
    assert content == (place / "uninterrupted.csv").read_bytes()
    assert_same(table(content.decode()), expected_answers("score_shards"), SCORES, "resumed")


# --- writing the data ------------------------------------------------------------------------------------------------


def main() -> None:
    """Fit the detectors and write the answers that are missing."""
    torch.set_num_threads(1)  # as in the tests
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_images(place)
        for detector, (images, *options) in DETECTORS.items():
            if not (FOLDER / detector).exists():
                precise = ("--backbone", "photos-tiny", "--dtype", "float64", "--set", "size=32")
                command(place, "fit", images, "--out", FOLDER / detector, *precise, *options)
            shutil.copytree(FOLDER / detector, place / detector)
        for entrance, (answer, _) in ENTRANCES.items():
            path = FOLDER / f"{entrance}.json"
            if not path.exists():
                path.write_text(json.dumps(answer(place), indent=1) + "\n")


if __name__ == "__main__":
    main()
