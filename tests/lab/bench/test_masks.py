"""The benchmark with masks: division of the images, masks in two layouts, and figures that mean what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image
from toys import LEVELS, as_uint8, pictures, toy_network

from gepc.core.errors import InputError, OptionError
from gepc.core.files import read_json
from gepc.lab.bench.masks import MaskProtocol, run_masks, write_masks
from gepc.lab.bench.protocol import load_mask_protocol
from gepc.lab.metrics import region_overlap

OPTIONS = {"levels": LEVELS[:1], "resize": "stretch", "size": 16}


def save(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Smooth images of 16x16, some with a patch of noise; masks beside them, or as in MVTec AD."""
    rng = np.random.default_rng(0)
    for index, image in enumerate(as_uint8(pictures(40, 16, contrast=0.2))):
        save(tmp_path / "good" / f"{index}.png", image)
    for index, image in enumerate(as_uint8(pictures(8, 16, seed=1, contrast=0.2))):
        mask = np.zeros((16, 16), dtype=np.uint8)
        mask[5:10, 3 + index % 4 : 8 + index % 4] = 255
        image[mask > 0] = rng.integers(0, 256, (int((mask > 0).sum()), 3))
        kind = "beside" if index < 4 else "apart"
        if kind == "beside":
            save(tmp_path / kind / f"{index}.bmp", image)
            save(tmp_path / kind / f"{index}.png", mask)
        else:
            save(tmp_path / "test" / kind / f"{index}.png", image)
            save(tmp_path / "ground_truth" / kind / f"{index}_mask.png", mask)
    return tmp_path


def test_the_maps_point_at_what_the_masks_show(data: Path) -> None:
    defects = {"beside": "beside", "apart": "test/apart"}
    protocol = MaskProtocol("good", defects, options=OPTIONS, fit_images=28, skip_images=4)
    fitting, testing = protocol.divide(data)
    assert (len(fitting), len(testing)) == (28, 8)
    assert not set(fitting) & set(testing)
    found = run_masks(protocol, toy_network(image_size=None), data)
    tables = write_masks(found, protocol, data / "out", "gepc bench ...")
    assert read_json(data / "out" / "results.json")["about"]["protocol"]["fit_images"] == 28
    rows = {row[0]: dict(zip(tables[0].header, row, strict=True)) for row in tables[0].rows}
    assert set(rows) == {"beside", "apart", "mean"}
    for row in rows.values():
        assert float(row["pixel AUROC"]) > 0.7
        assert float(row["image AUROC"]) > 0.8
    assert rows["mean"]["images"] == 8
    assert [row[0] for row in tables[1].rows] == ["sum", "error", "activations"]


def test_a_protocol_is_checked(data: Path) -> None:
    tiles = load_mask_protocol("tiles")
    assert tiles is not None
    assert set(tiles.defects) == {"blowhole", "break", "crack", "fray", "uneven"}
    assert load_mask_protocol("quick") is None
    with pytest.raises(OptionError, match="at least one folder"):
        MaskProtocol("good", {})
    with pytest.raises(InputError, match="lower fit_images"):
        MaskProtocol("good", {"beside": "beside"}, fit_images=40).divide(data)
    with pytest.raises(InputError, match="has a mask"):
        MaskProtocol("good", {"none": "good"}).defective(data)


def test_region_overlap_takes_images_of_several_sizes() -> None:
    masks = [np.eye(4, dtype=bool), np.pad(np.ones((2, 3), dtype=bool), 2)]
    assert region_overlap([mask.astype(float) for mask in masks], masks) == pytest.approx(1.0)
    assert region_overlap([-mask.astype(float) for mask in masks], masks) == pytest.approx(0.0)
