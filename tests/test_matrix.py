"""Every method and every preset through every entrance, with images of several sizes and one that cannot be read.

Each combination is fitted once, by `gepc fit`, on a tiny random network. Every entrance must then give the scores of
Python. A combination that is not supported is refused with a message, which is checked. The presets keep their meaning
but take few passes (`toys.BRIEF`). Ray's part is the actor of the cluster, called in this process; `tests/runs` starts
real clusters. Exporting takes seconds and depends on the network alone, so it is tried for some combinations.
"""

from __future__ import annotations

import csv
import functools
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from families import energy_net
from PIL import Image
from toys import BRIEF, as_uint8, pictures

import gepc
from gepc.images.decoder import DecoderProcess
from gepc.methods.base import find_method

SIDE = 16
GOOD = ("a.png", "b.png", "grey.png", "large.png", "wide.png")
BAD = "damaged.png"
EXPORTED = (("gepc+", "fast"), ("gepc", "paper"), ("msma", None))


LPIPS = [("ddpm_ood", "paper"), ("lmd", "paper")]  # they need a package that is optional
HAS_LPIPS = importlib.util.find_spec("lpips") is not None


def combinations() -> list[tuple[str, str | None]]:
    """Every method without a preset, and with each of its presets, without those that cannot be fitted here."""
    every = [(name, preset) for name in gepc.list_detectors() for preset in (None, *find_method(name).presets)]
    return [pair for pair in every if HAS_LPIPS or pair not in LPIPS]


class Case(NamedTuple):
    """A fitted combination: its saved detector, its network, and the images to score."""

    method: str
    preset: str | None
    folder: Path
    network: Path
    images: Path
    root: Path

    def load(self) -> gepc.Detector:
        return gepc.load_detector(self.folder, str(self.network), device="cpu")


def run(*arguments: object) -> int:
    """`gepc ...` in this process."""
    import gepc.cli  # noqa: F401 - registers the commands
    from gepc.cli.app import run as run_command

    return run_command([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two tiny networks, images to fit on, images to score, and a scene."""
    from diffusers import DDPMScheduler, UNet2DModel

    root = tmp_path_factory.mktemp("matrix")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = UNet2DModel(
            block_out_channels=(4,),
            layers_per_block=1,
            norm_num_groups=2,
            add_attention=False,
            down_block_types=("DownBlock2D",),
            mid_block_type=None,
            up_block_types=("UpBlock2D",),
        )
    net.save_pretrained(root / "network")
    scheduler = DDPMScheduler(4000, beta_schedule="squaredcos_cap_v2", prediction_type="sample")
    scheduler.save_pretrained(root / "network")
    energy_net(root / "energies", side=SIDE)
    normal, new = root / "normal", root / "new"
    normal.mkdir()
    new.mkdir()
    for number, image in enumerate(as_uint8(pictures(42, SIDE))):
        save(normal / f"{number:02d}.png", image)
    colour = as_uint8(pictures(3, SIDE, seed=1, contrast=0.8))
    save(new / "a.png", colour[0])
    save(new / "b.png", colour[1])
    save(new / "grey.png", colour[2][:, :, 0])
    save(new / "large.png", as_uint8(pictures(1, 2 * SIDE, seed=2))[0])
    save(new / "wide.png", as_uint8(pictures(1, (SIDE, 2 * SIDE), seed=3))[0])
    (new / BAD).write_bytes((new / "a.png").read_bytes()[:60])
    save(root / "scene.png", as_uint8(pictures(1, (2 * SIDE, 3 * SIDE), seed=4))[0])
    return root


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def save(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


def options_of(method: str, preset: str | None) -> list[str]:
    """The options of `gepc fit` for a combination: few passes, and one size unless images keep theirs."""
    settings = dict(BRIEF.get(method, {}))
    preset_options = (
        {}
        if preset is None
        else dict(getattr(find_method(method).presets[preset], "options", find_method(method).presets[preset]))
    )
    own_size = preset_options.get("resize") in ("native", "half")
    if not own_size:
        settings["size"] = SIDE
    return [f"--set={name}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def case(workshop: Path) -> Callable[[str, str | None], Case]:
    """Fit a combination when it is asked for the first time."""

    def fit(method: str, preset: str | None) -> Case:
        needs_energies = find_method(method).needs == "energies"
        network = workshop / ("energies" if needs_energies else "network")
        folder = workshop / "detectors" / f"{method}-{preset}"
        arguments = ["fit", workshop / "normal", "--out", folder, "--backbone", network, "--method", method]
        arguments += [] if preset is None else ["--preset", preset]
        assert run(*arguments, "--device", "cpu", *options_of(method, preset)) == 0
        return Case(method, preset, folder, network, workshop / "new", workshop)

    return functools.cache(fit)


@pytest.fixture(scope="module")
def expected(case: Callable[[str, str | None], Case]) -> Callable[[str, str | None], dict[str, Any]]:
    """The results of Python by the name of the file."""

    def score(method: str, preset: str | None) -> dict[str, Any]:
        made = case(method, preset)
        return {Path(result.name).name: result for result in made.load().results(made.images)}

    return functools.cache(score)


@pytest.fixture(scope="module", autouse=True)
def one_decoder() -> Any:
    """The service and the watched folder share one process that decodes files, which takes a second to start."""
    shared, patch = DecoderProcess(), pytest.MonkeyPatch()
    close = shared.close
    patch.setattr(shared, "close", lambda: None)
    for module in ("gepc.serve.service", "gepc.runs.watch"):
        patch.setattr(f"{module}.DecoderProcess", lambda *_: shared)
    yield
    patch.undo()
    close()


every_combination = pytest.mark.parametrize(
    ("method", "preset"), combinations(), ids=lambda value: "none" if value is None else value
)


def assert_same(found: dict[str, tuple[float, float]], expected: dict[str, Any]) -> None:
    """Scores and p-values of the good images as in Python; scores up to rounding in another batch."""
    assert set(found) == set(GOOD)
    scores = [expected[name].score for name in GOOD]
    size = 1e-3 * float(np.mean(np.abs(scores)))
    np.testing.assert_allclose([found[name][0] for name in GOOD], scores, rtol=1e-3, atol=size)
    np.testing.assert_allclose([found[name][1] for name in GOOD], [expected[name].p_value for name in GOOD], atol=0.07)


@every_combination
def test_python(method: str, preset: str | None, expected: Callable[..., dict[str, Any]]) -> None:
    results = expected(method, preset)
    assert set(results) == {*GOOD, BAD}
    for name in GOOD:
        assert results[name].error is None
        assert np.isfinite(results[name].score)
        assert 0.0 < results[name].p_value <= 1.0
    assert results[BAD].error
    assert np.isnan(results[BAD].score)


@every_combination
def test_score(method: str, preset: str | None, case: Any, expected: Any, capsys: pytest.CaptureFixture[str]) -> None:
    made = case(method, preset)
    capsys.readouterr()
    assert run("score", made.folder, made.images, "--backbone", made.network, "--alpha", "0.1") == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    (bad,) = [row for row in rows if row["path"].endswith(BAD)]
    assert bad["error"]
    scored = {Path(row["path"]).name: row for row in rows if not row["error"]}
    assert_same(
        {name: (float(row["score"]), float(row["p_value"])) for name, row in scored.items()}, expected(method, preset)
    )


@every_combination
def test_map(
    method: str, preset: str | None, case: Any, expected: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = case(method, preset)
    code = run(
        "map", made.folder, made.images, "--backbone", made.network, "--out", tmp_path / "maps", "--alpha", "0.1"
    )
    if not made.load().extractor.has_maps:
        assert code == 2
        assert "has no maps" in capsys.readouterr().err
        return
    assert code == 0
    entries = {
        Path(one["path"]).name: one for one in json.loads((tmp_path / "maps" / "metadata.json").read_text())["images"]
    }
    assert entries[BAD]["error"]
    found = {name: (entries[name]["score"], entries[name]["p_value"]) for name in GOOD}
    assert_same(found, expected(method, preset))
    for name in GOOD:
        assert np.isfinite(np.load(tmp_path / "maps" / entries[name]["map"])).all()
        assert (tmp_path / "maps" / entries[name]["picture"]).is_file()


@every_combination
def test_scene(method: str, preset: str | None, case: Any, tmp_path: Path) -> None:
    made = case(method, preset)
    arguments = ["scene", made.folder, made.root / "scene.png", "--out", tmp_path / "scene", "--backbone", made.network]
    assert run(*arguments, "--tile", SIDE, "--overlap", 0, "--control", "tile", "--alpha", 0.1) == 0
    rows = rows_of(tmp_path / "scene" / "tiles.csv")
    assert len(rows) == 6
    pixels = np.asarray(Image.open(made.root / "scene.png"))
    crop = pixels[SIDE : 2 * SIDE, SIDE : 2 * SIDE]
    (row,) = [one for one in rows if (int(one["top"]), int(one["left"])) == (SIDE, SIDE)]
    score = made.load().score(crop[None])[0]
    assert float(row["score"]) == pytest.approx(score, rel=1e-3, abs=1e-3 * abs(score))


@every_combination
def test_serve(method: str, preset: str | None, case: Any, expected: Any) -> None:
    from starlette.testclient import TestClient

    from gepc.serve import Settings, create_app

    made = case(method, preset)
    names = sorted([*GOOD, BAD])
    form = [("images", (name, (made.images / name).read_bytes(), "image/png")) for name in names]
    with TestClient(create_app(made.folder, Settings(), str(made.network)), base_url="http://127.0.0.1:8000") as client:
        answer = client.post("/v1/score", files=form, data={"alpha": "0.1", "map": "true"})
    assert answer.status_code == 200, answer.text
    results = {one["name"]: one for one in answer.json()["results"]}
    assert results[BAD]["error"]
    found = {name: (results[name]["score"], results[name]["p_value"]) for name in GOOD}
    assert_same(found, expected(method, preset))
    has_maps = made.load().extractor.has_maps
    assert all((results[name].get("map") is not None) == has_maps for name in GOOD)


@every_combination
def test_watch(method: str, preset: str | None, case: Any, expected: Any, tmp_path: Path) -> None:
    made = case(method, preset)
    log = tmp_path / "log.csv"
    arguments = [
        "watch",
        made.folder,
        made.images,
        "--out",
        log,
        "--alpha",
        "0.1",
        "--once",
        "--backbone",
        made.network,
    ]
    assert run(*arguments) == 0
    rows = rows_of(log)
    (bad,) = [row for row in rows if row["path"].endswith(BAD)]
    assert bad["error"]
    scored = {Path(row["path"]).name: row for row in rows if row["score"]}
    reference = expected(method, preset)
    assert set(scored) == set(GOOD)
    for name, row in scored.items():
        score = reference[name].score
        assert float(row["score"]) == pytest.approx(score, rel=1e-3, abs=1e-3 * max(1.0, abs(score)))


@every_combination
def test_save_and_load(method: str, preset: str | None, case: Any, expected: Any, tmp_path: Path) -> None:
    made = case(method, preset)
    made.load().save(tmp_path / "again")
    again = gepc.load_detector(tmp_path / "again", str(made.network), device="cpu")
    results = {Path(result.name).name: result for result in again.results(made.images)}
    for name in GOOD:
        assert results[name].score == pytest.approx(expected(method, preset)[name].score, rel=1e-9)


@every_combination
def test_an_actor_of_the_cluster(method: str, preset: str | None, case: Any, expected: Any) -> None:
    pytest.importorskip("ray", reason="a cluster needs gepc[ray]")
    from gepc.runs.cluster import DetectorPayload, ScoreActor
    from gepc.runs.shards import parse_shard

    made = case(method, preset)
    actor = ScoreActor(DetectorPayload.of(made.folder, str(made.network), 4), Path.cwd(), None)
    names = [str(made.images / name) for name in (*GOOD, BAD)]
    batch = {"shard": [0], "start": [0], "stop": [len(names)], "names": [names], "labels": [[]]}
    (text,) = actor(batch)["text"]
    rows = parse_shard(text)
    assert [row.error is not None for row in rows] == [False] * len(GOOD) + [True]
    found = {name: (row.score, row.p_value) for name, row in zip(GOOD, rows, strict=False)}
    assert_same(found, expected(method, preset))


@every_combination
def test_scikit_learn(method: str, preset: str | None, case: Any, expected: Any, workshop: Path) -> None:
    from gepc.sklearn import OODDetector

    made = case(method, preset)
    backbone = gepc.load_backbone(str(made.network), device="cpu")
    options = dict(BRIEF.get(method, {}))
    if any(option.startswith("--set=size") for option in options_of(method, preset)):
        options["size"] = SIDE
    estimator = OODDetector(backbone, method, preset, alpha=0.1, options=options).fit(str(workshop / "normal"))
    files = [str(made.images / name) for name in GOOD]
    scores = [expected(method, preset)[name].score for name in GOOD]
    size = 1e-3 * float(np.mean(np.abs(scores)))
    np.testing.assert_allclose(-estimator.score_samples(files), scores, rtol=1e-3, atol=size)


@pytest.mark.parametrize(("method", "preset"), EXPORTED)
def test_export(method: str, preset: str | None, case: Any, expected: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="exporting needs gepc[onnx]")
    made = case(method, preset)
    assert run("export", made.folder, "--out", tmp_path / "onnx", "--backbone", made.network) == 0
    exported = gepc.load_detector(tmp_path / "onnx", str(tmp_path / "onnx" / "net.onnx"))
    results = {Path(result.name).name: result for result in exported.results(made.images)}
    assert_same({name: (results[name].score, results[name].p_value) for name in GOOD}, expected(method, preset))


def test_export_refuses_images_that_keep_their_size(
    case: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = case("gepc+", "inspect")
    assert run("export", made.folder, "--out", tmp_path / "onnx", "--backbone", made.network) == 2
    assert "an exported network takes images of one size" in capsys.readouterr().err


@pytest.mark.skipif(HAS_LPIPS, reason="lpips is installed")
@pytest.mark.parametrize(("method", "preset"), LPIPS)
def test_a_preset_without_its_package_is_refused_at_fit(
    method: str, preset: str, workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fit", workshop / "normal", "--out", workshop / "refused", "--backbone", workshop / "network"]
    assert run(*arguments, "--method", method, "--preset", preset, *options_of(method, preset)) == 2
    assert "needs the package lpips" in capsys.readouterr().err
    assert not (workshop / "refused").exists()
