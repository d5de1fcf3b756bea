"""Several methods as one detector: its parts are those methods, and passes that coincide are made once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import as_uint8, pictures, toy_backbone

import gepc
from gepc.backbones.base import shared_passes
from gepc.cli.app import run
from gepc.core.errors import OptionError
from gepc.methods.base import Batch, extract_table
from gepc.methods.combined import Combined

IMAGES = as_uint8(pictures(60))
NAMES = ("gepc", "scoped", "diffpath")


@pytest.fixture(scope="module")
def detector() -> gepc.Detector:
    return gepc.create_detector(toy_backbone(), list(NAMES)).fit(IMAGES)


def test_every_method_is_a_part_and_scores_as_it_does_alone(detector: gepc.Detector) -> None:
    """The order of images by a part is that of the method by itself, fitted on the same images."""
    new = as_uint8(pictures(20, seed=5))
    results = detector.explain(new)
    assert list(results[0].evidence) == list(NAMES)
    for name in NAMES:
        alone = gepc.create_detector(detector.backbone, name).fit(IMAGES).score(new)
        evidence = np.array([-np.log(result.evidence[name]) for result in results])
        far = evidence > -np.log(0.2)  # the tail, where the order is strict
        np.testing.assert_array_equal(np.argsort(evidence[far]), np.argsort(alone[far]))


def test_saved_and_loaded_it_scores_the_same(detector: gepc.Detector, tmp_path: Path) -> None:
    detector.save(tmp_path / "det")
    with pytest.warns(UserWarning, match="weights of the network cannot be compared"):
        again = gepc.load_detector(tmp_path / "det", detector.backbone)
    np.testing.assert_array_equal(again.score(IMAGES[:5]), detector.score(IMAGES[:5]))
    assert again.explain(IMAGES[:1])[0].evidence == detector.explain(IMAGES[:1])[0].evidence


def test_the_same_pass_is_made_once() -> None:
    """Two presets of one method have two levels in common: their passes for x_t and all P_g x_t coincide."""
    backbone = toy_backbone()
    method = Combined(("gepc:paper", "gepc:paper-celeba"))
    batch = Batch(pictures(4), [bytes([row]) * 16 for row in range(4)])
    table = extract_table(method, backbone, batch, (0,))
    levels = [set(member.timesteps(backbone)) for member in method.builds_on()]
    common = len(levels[0] & levels[1])
    assert common > 0
    stated = method.cost(backbone, batch.size).forward
    assert backbone.forward_count == 4 * (stated - 7 * common)
    for member in method.members:
        alone = extract_table(member.extractor, backbone, batch, member.extractor.timesteps(backbone))
        np.testing.assert_array_equal(table[f"{member.name}/s"][:, 0], alone["s"])


def test_the_command_line_combines_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "images.npy", as_uint8(pictures(60, 16)))
    options = ["--backbone", "photos-small", "--set", "size=16"]
    assert run(["fit", f"{tmp_path}/images.npy", "--out", f"{tmp_path}/det", "--method", "gepc,msma", *options]) == 0
    assert run(["score", f"{tmp_path}/det", f"{tmp_path}/images.npy", "--out", f"{tmp_path}/scores.csv"]) == 0
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 61


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["gepc"], "at least two different methods"),
        (["gepc", "gepc"], "at least two different methods"),
        (["gepc", "mssma"], "msma"),
        (["gepc", "gepc:papr"], "paper"),
        (["msma", "gepc+:radar"], "way of its own"),
        (["gepc", "energy"], "cannot be combined"),
        (["gepc", "combined"], "name its methods"),
        ([1, 2], "method must be a name"),
    ],
)
def test_what_cannot_be_combined(methods: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        gepc.create_detector(toy_backbone(), methods)


def test_each_thread_shares_its_own_passes() -> None:
    """A pass counts once in each block, and a thread outside of a block is not answered from memory."""
    backbone, x = toy_backbone(), torch.from_numpy(pictures(2))
    expected = backbone.eps(x, 5)
    backbone.reset_counts()
    both_inside = threading.Barrier(2)

    def share() -> None:
        with shared_passes():
            both_inside.wait()
            for _ in range(3):
                torch.testing.assert_close(backbone.eps(x, 5), expected, rtol=0.0, atol=0.0)
            backbone.eps(x, torch.tensor([5, 6]))
            both_inside.wait()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(share)
        share()
        other.result()
    assert backbone.forward_count == 2 * 2 * len(x)  # two different passes in each of two threads
    backbone.eps(x, 5)
    assert backbone.forward_count == 5 * len(x)


def test_images_that_may_not_be_square_are_refused_as_for_the_method_by_itself() -> None:
    """gepc+ takes rot180 in place of rot90 where images are not square, which is another feature."""
    for methods in ("gepc+", ["gepc+", "msma"]):
        with pytest.raises(OptionError, match="images may not be square; leave rot90 out"):
            gepc.create_detector(toy_backbone(image_size=None), methods, resize="native")
    gepc.create_detector(toy_backbone(image_size=None), ["gepc+:single", "msma"], resize="native")
