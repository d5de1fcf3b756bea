"""Which window is clutter, which a ship, and which is neither, for which reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from radar_files import speckle, with_ships, write_hrsid

from gepc.core.errors import InputError, OptionError
from gepc.lab.radar.annotations import Box, SceneSet, open_scenes
from gepc.lab.radar.patches import PatchImages, PatchRules, cut, sample, windows

SMALL = PatchRules(size=16)


def folder(root: Path, **pictures: np.ndarray) -> SceneSet:
    root.mkdir(exist_ok=True)
    for name, pixels in pictures.items():
        if pixels.dtype == np.uint8:
            Image.fromarray(pixels).save(root / f"{name}.png")
        else:
            np.save(root / f"{name}.npy", pixels)
    return open_scenes(root)


@given(st.integers(16, 80), st.integers(16, 80), st.integers(8, 16), st.integers(1, 20))
def test_windows_lie_inside_and_miss_at_most_half_a_patch(rows: int, columns: int, size: int, stride: int) -> None:
    found = list(windows(rows, columns, size, stride))
    assert len(set(found)) == len(found)
    assert all(0 <= top <= rows - size and 0 <= left <= columns - size for top, left in found)
    assert rows - size - max(top for top, _ in found) <= size // 2
    assert columns - size - max(left for _, left in found) <= size // 2


def test_clutter_ship_and_the_part_of_a_ship(tmp_path: Path) -> None:
    boxes = [(12, 2, 16, 4), (40, 40, 4, 4)]  # 4 of 16 columns in the first window, 12 in the second
    (tmp_path / "boxes.csv").write_text("file,x,y,width,height\na.png,12,2,16,4\na.png,40,40,4,4\n")
    found = cut(folder(tmp_path, a=with_ships(1, boxes)), SMALL)
    assert [(patch.top, patch.left) for patch in found.ships] == [(0, 16), (32, 32)]
    assert found.ships[0].boxes == (Box(0, 2, 12, 4),)
    assert found.ships[1].boxes == (Box(8, 8, 4, 4),)
    assert found.left_out == {"a smaller share of a ship": 1}
    assert len(found.clutter) == 13
    assert not any(patch.mask().any() for patch in found.clutter)
    quarter = cut(open_scenes(tmp_path), PatchRules(size=16, ship_share=0.25))
    assert (len(quarter.ships), len(quarter.clutter), quarter.left_out) == (3, 13, {})


def test_a_patch_collection_gives_the_pixels_of_its_window(tmp_path: Path) -> None:
    pixels = speckle(3)
    found = cut(folder(tmp_path, a=pixels), SMALL)
    records = PatchImages(found.clutter)
    assert np.array_equal(records[5].pixels, pixels[16:32, 16:32])
    assert records[5].name == "a.png@16,16"


def test_black_borders_and_no_data_are_left_out(tmp_path: Path) -> None:
    dark = speckle(1)
    dark[:, 60:] = 0
    gap = speckle(2).astype(np.float32)
    gap[0, 0] = np.nan
    found = cut(folder(tmp_path, dark=dark, gap=gap), SMALL, value_range=(0.0, 255.0))
    assert found.left_out == {"black border": 4, "no-data pixels": 1}
    assert len(found.clutter) == 12 + 15


def test_an_infinite_pixel_does_not_set_the_scale_of_its_scene(tmp_path: Path) -> None:
    hot = speckle(2).astype(np.float32)
    hot[0, 0] = np.inf
    found = cut(folder(tmp_path, hot=hot), SMALL)
    assert (found.left_out, len(found.clutter)) == ({"no-data pixels": 1}, 15)


@pytest.mark.filterwarnings("error")
def test_the_smallest_patches_are_compared_without_a_warning(tmp_path: Path) -> None:
    assert not cut(folder(tmp_path, a=speckle(1)), PatchRules(size=8)).left_out


def test_copies_are_near_duplicates_and_noise_is_not(tmp_path: Path) -> None:
    noisy = np.clip(speckle(1).astype(int) + np.random.default_rng(0).integers(-1, 2, (64, 64)), 0, 255)
    found = cut(folder(tmp_path, a=speckle(1), b=speckle(2), c=noisy.astype(np.uint8)), PatchRules(size=32))
    assert found.left_out == {"near-duplicate": 4}
    assert {patch.scene.path.stem for patch in found.clutter} == {"a", "b"}


def test_ground_of_the_other_split_is_left_out(tmp_path: Path) -> None:
    splits = {"train": {"P0001_0_64_0_64.jpg": []}, "test": {"P0001_0_64_48_112.jpg": [], "P0002_0_64_48_112.jpg": []}}
    root = write_hrsid(tmp_path, splits)
    train, test = open_scenes(root, "train"), open_scenes(root, "test")
    found = cut(test, SMALL, train.scenes)
    assert found.left_out == {"ground of another split": 4}
    assert len(found.clutter) == 28
    with pytest.raises(InputError, match="images that are in both splits: 2"):
        cut(test, SMALL, test.scenes)


def test_small_scenes_are_counted_and_wrong_sizes_refused(tmp_path: Path) -> None:
    found = cut(folder(tmp_path, a=speckle(1, 12, 40)), SMALL)
    assert (found.left_out, found.clutter) == ({"scene smaller than a patch": 1}, [])
    root = write_hrsid(tmp_path / "wrong", {"test": {"a.jpg": []}})
    Image.fromarray(speckle(0, 64, 48)).save(root / "JPEGImages" / "a.jpg")
    with pytest.raises(InputError, match="has 48x64 pixels, but its annotation says 64x64"):
        cut(open_scenes(root), SMALL)


@given(st.integers(0, 40), st.integers(0, 40))
def test_a_larger_sample_contains_the_smaller(tmp_path_factory: pytest.TempPathFactory, few: int, more: int) -> None:
    root = tmp_path_factory.getbasetemp() / "sample"
    patches = cut(folder(root, a=speckle(1), b=speckle(2)), SMALL).clutter
    small, large = (sample(patches, size) for size in sorted((few, more)))
    assert len(small) == min(few, more, 32)
    assert [patch for patch in large if patch in small] == small


@pytest.mark.parametrize("options", [{"size": 4}, {"stride": 0}, {"ship_share": 0.0}, {"ship_share": 1.5}])
def test_rules_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError):
        PatchRules(**options)  # type: ignore[arg-type]


def test_the_real_hrsid_splits_share_nothing(data_folder: Path) -> None:
    root = data_folder / "HRSID"
    if not root.is_dir():
        pytest.skip("GEPC_DATA holds no HRSID")
    train, test = open_scenes(root, "train"), open_scenes(root, "test")
    assert not {scene.path for scene in train.scenes} & {scene.path for scene in test.scenes}
    found = cut(SceneSet("some", test.scenes[:4]), PatchRules(), train.scenes)
    assert found.clutter
    assert sum(len(scene.ships) for scene in train.scenes) + sum(len(scene.ships) for scene in test.scenes) == 445
