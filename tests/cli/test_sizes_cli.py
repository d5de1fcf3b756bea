"""Images of several sizes through the command line, with the preset for inspecting parts."""

import csv
import io

import numpy as np
import pytest
from PIL import Image
from toys import as_uint8, pictures

SIZES = [(40, 64), (48, 64), (40, 56)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images of three sizes to fit on, and new ones with a damaged file among them."""
    root = tmp_path_factory.mktemp("sizes")
    for folder, count, seed in (("normal", 30, 0), ("new", 7, 100)):
        (root / folder).mkdir()
        for number in range(count):
            picture = as_uint8(pictures(1, SIZES[number % 3], seed=seed + number))[0]
            Image.fromarray(picture).save(root / folder / f"{number:02d}.png")
    (root / "new" / "03.png").write_bytes(b"this is text")
    return root


@pytest.fixture(scope="module")
def detector(place):
    """The folder of a detector that was fitted by the command line, and what was printed; also the sizes asked for."""
    from gepc.cli import options
    from gepc.cli.app import run

    timed = []

    def seconds_per_pass(backbone, size, **_):
        timed.append(size)
        return 1e-3

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(options, "QUICK", 0)
        patch.setattr(options, "seconds_per_pass", seconds_per_pass)
        out = io.StringIO()
        patch.setattr("sys.stdout", out)
        assert run(["fit", "normal", "--out", "det", "--preset", "inspect"]) == 0
    return out.getvalue(), timed


def test_fit_states_the_size_that_the_network_sees(detector):
    printed, timed = detector
    assert "images at half their size, the first of them 32x20 pixels" in printed.replace("\n", " ")
    assert set(timed) == {(20, 32)}


def test_info_states_the_size_as_fit_does(gepc, detector):
    described = gepc("info", "det").stdout
    assert "images at half their size, the first of them 32x20 pixels" in described
    assert "?" not in described


@pytest.mark.parametrize("options", [[], ["--shard-size", "2"], ["--workers", "1"], ["--batch-size", "3"]], ids=str)
def test_score_takes_images_of_several_sizes(place, gepc, detector, options):
    import gepc as library

    run = gepc("score", "det", "new", "--alpha", "0.2", *options)
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader(io.StringIO(run.stdout)))
    expected = list(library.load_detector(place / "det").results(place / "new"))
    assert [row["path"] for row in rows] == [f"new/{number:02d}.png" for number in range(7)]
    for row, result in zip(rows, expected, strict=True):
        if result.error is not None:
            assert (row["score"], row["error"]) == ("", result.error)
        else:
            assert float(row["score"]) == pytest.approx(result.score, rel=1e-4)
            assert float(row["p_value"]) == pytest.approx(result.p_value)
    assert np.isnan([result.score for result in expected]).tolist() == [number == 3 for number in range(7)]


def test_map_takes_images_of_several_sizes(place, gepc, detector):
    run = gepc("map", "det", "new", "--out", "maps", "--alpha", "0.2")
    assert run.returncode == 0, run.stderr
    shapes = [np.load(path).shape for path in sorted((place / "maps").glob("*.npy"))]
    assert shapes == [(SIZES[number % 3][0] // 2, SIZES[number % 3][1] // 2) for number in range(7) if number != 3]
