"""The tables of gepc+: designs against their detectors, and passes as the detectors count them."""

from __future__ import annotations

import numpy as np
import pytest
from plus_designs import LEAN, WIDE, PlusBench, collect_plus, designs, fast, full, passes_needed, tables
from toys import as_uint8, pictures, toy_network

import gepc
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.lab.bench.evaluate import Benchmark, pair_aurocs
from gepc.lab.bench.protocol import BenchmarkDataset, Protocol
from gepc.methods.base import Batch
from gepc.methods.extraction import ExtractionSpec, FeatureCache, FeatureTable
from gepc.methods.gepc_plus import GepcPlus

SETS = {"a": pictures(80), "b": pictures(80, seed=1, contrast=0.8), "c": pictures(80, seed=2, contrast=0.3)}
PROTOCOL = Protocol(
    datasets={name: BenchmarkDataset(f"npz:{name}.npz", name.upper()) for name in SETS},
    pairs={"a": ("b", "c"), "b": ("a", "c")},
    size=8,
    train_images=60,
    test_images=20,
    seeds=(0, 1),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> PlusBench:
    folder = tmp_path_factory.mktemp("data")
    for name, images in SETS.items():
        np.savez(folder / f"{name}.npz", train_x=as_uint8(images[:60]), test_x=as_uint8(images[60:80]))
    backbone = toy_network()
    benchmark = Benchmark.open(PROTOCOL, backbone, folder, FeatureCache(None))
    found = collect_plus(benchmark)
    assert backbone.forward_count == passes_needed(benchmark) == (2 * 60 + 3 * 20) * 4 * (7 + 3)
    return found


def extracted(bench: PlusBench, method: GepcPlus, batch: Batch) -> FeatureTable:
    spec = ExtractionSpec(method, WIDE.timesteps(bench.backbone))
    table = method.extract(bench.backbone, batch, spec.timesteps)
    return FeatureTable(spec, table, tuple(batch.keys), np.arange(len(batch)), Preprocessing(), batch.size)


def test_a_design_gives_the_columns_of_its_method(bench: PlusBench) -> None:
    images = SETS["a"][:6]
    batch = Batch(images, [image_key(image) for image in images])
    wide = extracted(bench, WIDE, batch)
    for rows in designs().values():
        for design in rows:
            own = bench.timesteps(design)
            direct = design.method.columns(design.method.extract(bench.backbone, batch, own))
            np.testing.assert_allclose(design.columns(wide, own), direct, rtol=1e-4, atol=1e-5)


def test_a_lean_table_holds_the_same_numbers_as_a_wide_one(bench: PlusBench) -> None:
    images = SETS["a"][:6]
    batch = Batch(images, [image_key(image) for image in images])
    wide, lean = (extracted(bench, method, batch) for method in (WIDE, LEAN))
    for design in (full("full"), fast("fast")):
        own = bench.timesteps(design)
        np.testing.assert_allclose(
            design.columns(lean, own, LEAN.group), design.columns(wide, own), rtol=1e-4, atol=1e-5
        )


def test_the_presets_are_among_the_designs(bench: PlusBench) -> None:
    rows = {design.label: design for row in designs().values() for design in row}
    for preset in ("fast", "full"):
        detector = gepc.create_detector(bench.backbone, "gepc+", preset)
        design = rows[f"gepc+ {preset} *"]
        assert design.method == detector.extractor
        assert design.calibration == detector.calibration_name
        assert design.passes(bench.backbone, 8, len(bench.timesteps(design))) == detector.cost().forward


def test_the_tables_are_whole(bench: PlusBench) -> None:
    found = {table.name: table for table in tables(bench)}
    main = found["plus-0"]
    assert [row[0] for row in main.rows[:3]] == ["gepc+ full *", "gepc+ fast *", "gepc+ single *"]
    assert main.rows[-1][0] == "GEPC, K=2 of these levels, 1/CV, KDE"
    first = main.rows[0]
    runs = bench.all_scores(next(iter(designs().values()))[0])
    assert list(runs) == [0, 1]
    expected = np.mean([list(pair_aurocs(scores).values()) for scores in runs.values()], axis=0)
    np.testing.assert_allclose(first[1:5], expected)
    assert first[5] == pytest.approx(np.mean(expected))
    assert first[8] == pytest.approx(min(expected))
    assert [row[6] for row in main.rows] == [
        2,
        2,
        2,
        2,
        2,
        2,
        1,
    ]  # GEPC needs more transforms
    assert first[-2:] == (0.0, None)  # nobody is ahead of himself


def test_a_label_says_the_features() -> None:
    design = fast("d", features=("d",))
    assert design.method.column_names == ("d",)
    assert design.passes(toy_network(), 8, 1) == 1
