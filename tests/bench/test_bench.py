"""The benchmark: one pass, tables that are arithmetic on it, and agreement with the detector itself."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from toys import as_uint8, pictures, toy_backbone

import gepc
from gepc.bench import ablations, figures
from gepc.bench.collect import asked_for, check_ready, collect, naive_passes, needed, passes_needed
from gepc.bench.evaluate import Bench
from gepc.bench.false_alarms import false_alarm_table
from gepc.bench.protocol import Protocol, Source, builtin_protocols, load_protocol
from gepc.bench.rows import read_rows
from gepc.bench.run import run, write
from gepc.core.errors import InputError, OptionError, ValueRangeWarning
from gepc.core.tables import ResultTable
from gepc.datasets import open_dataset
from gepc.features.extraction import FeatureCache

LEVELS = (0.999, 0.99, 0.97, 0.9)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Three small data sets as npz files."""
    folder = tmp_path_factory.mktemp("data")
    for position, contrast in enumerate((0.3, 0.6, 1.2)):
        parts = {
            split: as_uint8(pictures(48, 8, seed=10 * position + n, contrast=contrast))
            for n, split in enumerate(("train_x", "test_x"))
        }
        np.savez(folder / f"set{position}.npz", **parts)
    return folder


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    values = {
        "datasets": {name: {"dataset": f"npz:{name}.npz", "label": name.upper()} for name in ("set0", "set1", "set2")},
        "pairs": {"set0": ["set1", "set2"], "set1": ["set0"]},
        "levels": {"default": list(LEVELS), "set1": [0.99, 0.9]},
        "size": 8,
        "train_images": 40,
        "test_images": 24,
        "seeds": [0, 1],
    }
    from gepc.core.options import build

    return build(Protocol, values, "protocol")


@pytest.fixture(scope="module")
def bench(data, protocol) -> Bench:
    backbone = toy_backbone()
    backbone.sha256 = "a stand-in for weights"  # so that features are cached
    return Bench(protocol, backbone, collect(protocol, backbone, data, FeatureCache(None)))


def test_one_pass_costs_what_was_foretold_and_less_than_the_naive_way(bench, protocol):
    backbone = bench.backbone
    assert bench.collection.passes == passes_needed(protocol, backbone) < naive_passes(protocol, backbone)
    assert set(needed(protocol, backbone)) == {
        *((name, "test") for name in ("set0", "set1", "set2")),
        ("set0", "train"),
        ("set1", "train"),
    }


def test_the_benchmark_scores_as_the_detector_does(bench, data, protocol):
    """Same levels, weights and scores as gepc.GEPC fitted on the same ID-train images."""
    train, test = (
        open_dataset("npz:set0.npz", data, split, limit, 0) for split, limit in (("train", 40), ("test", 24))
    )
    detector = gepc.GEPC(bench.backbone, levels=LEVELS, keep=2, size=8, seed=1)
    detector.fit(train, calibration_images=test)
    scores = bench.scores("set0", bench.main, seed=1)
    assert scores.kept == tuple(detector.kept_)
    assert np.allclose(scores.selection.weights, detector.weights_, rtol=1e-6)
    assert np.allclose(scores.inside, detector.score(test), rtol=1e-5)


def test_a_single_transform_is_what_a_detector_with_that_group_computes(bench, data):
    test = open_dataset("npz:set0.npz", data, "test", 24, 0)
    alone = gepc.GEPC(bench.backbone, levels=LEVELS, group=["rot180"], size=8)
    table = alone.features(test)
    variant = bench.raw(("rot180",))
    columns = bench.columns("set0", "test", 0, variant, bench.candidates("set0"))
    assert np.allclose(columns[:, :, 0], table["s"].mean(2), rtol=1e-5)


def test_every_table_has_all_pairs_and_sane_numbers(bench):
    tables = [*ablations.all_tables(bench), false_alarm_table(bench)]
    names = [table.name for table in tables]
    assert len(set(names)) == len(names)
    assert {"main", "detail", "kept", "sweep", "transforms", "calibration", "features", "timesteps"} <= set(names)
    main = tables[0]
    assert main.header[1:4] == ("SET0:SET1", "SET0:SET2", "SET1:SET0")
    values = [cell for cell in main.rows[0] if isinstance(cell, float)]
    assert all(0.0 <= value <= 1.0 for value in values)
    assert values[-1] == pytest.approx(np.mean(values[:-1]))
    for row in next(table for table in tables if table.name == "transforms").rows:
        assert all(cell >= 0.5 for cell in row if isinstance(cell, float))


def test_a_second_run_costs_no_pass_and_a_damaged_file_is_made_again(data, protocol, tmp_path):
    backbone = toy_backbone()
    backbone.sha256 = "a stand-in for weights"
    first = collect(protocol, backbone, data, FeatureCache(tmp_path))
    again = collect(protocol, backbone, data, FeatureCache(tmp_path))
    assert (again.passes, again.computed_levels) == (0, 0)
    for key, part in first.parts.items():
        assert all(np.array_equal(part.table[name], again.parts[key].table[name]) for name in part.table)
    files = sorted(tmp_path.rglob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:50])
    repaired = collect(protocol, backbone, data, FeatureCache(tmp_path))
    assert repaired.computed_levels == 1
    assert repaired.passes > 0


def test_an_interrupted_run_goes_on(data, protocol, tmp_path):
    backbone = toy_backbone()
    backbone.sha256 = "a stand-in for weights"
    looked_at = []

    def stop_early(count: int) -> None:
        looked_at.append(count)
        if len(looked_at) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(protocol, backbone, data, FeatureCache(tmp_path), stop_early)
    spent = backbone.forward_count
    finished = collect(protocol, backbone, data, FeatureCache(tmp_path))
    assert spent > 0
    assert finished.passes + spent == passes_needed(protocol, backbone)


def test_other_weights_or_options_do_not_hit_the_cache(data, protocol, tmp_path):
    backbone = toy_backbone()
    for weights in ("one", "two"):
        backbone.sha256 = weights
        assert collect(protocol, backbone, data, FeatureCache(tmp_path)).cached_levels == 0


@pytest.fixture
def folders(tmp_path, protocol) -> Protocol:
    """Two sets as folders of 30 images; in both test splits the same twelve files are damaged."""
    for name, split in (("a", "train"), ("a", "test"), ("b", "train"), ("b", "test")):
        (tmp_path / name / split).mkdir(parents=True)
        for index, picture in enumerate(as_uint8(pictures(30, 8, seed=len(name + split)))):
            Image.fromarray(picture).save(tmp_path / name / split / f"{index:02d}.png")
        if split == "test":
            for index in range(12):
                (tmp_path / name / split / f"{index:02d}.png").write_bytes(b"broken")
    sets = {name: Source(f"folder:{name}", name) for name in ("a", "b")}
    levels = {"default": LEVELS}
    return replace(protocol, datasets=sets, pairs={"a": ("b",)}, levels=levels, train_images=30, test_images=30)


def test_corrupt_images_are_skipped_and_told(tmp_path, folders):
    found = collect(folders, toy_backbone(), tmp_path, FeatureCache(None))
    assert len(found.skipped) == 24  # once for each image, however many seeds
    (reason,) = [reason for image, reason in found.skipped.items() if image.startswith("b, test") and "03.png" in image]
    assert "03.png" in reason
    assert found.parts["b", "test", 0].count == 18
    for index in range(12, 30):
        (tmp_path / "a" / "test" / f"{index}.png").write_bytes(b"")
    with pytest.raises(InputError, match="no image of a, split test, could be read; the first: "):
        collect(folders, toy_backbone(), tmp_path, FeatureCache(None))


def test_pictures_of_maps_show_the_images_that_have_the_scores(tmp_path, folders):
    backbone = toy_backbone()
    bench = Bench(folders, backbone, collect(folders, backbone, tmp_path, FeatureCache(None)))
    part = bench.collection.parts["b", "test", 0]
    assert read_rows(bench, tmp_path, "b", "test", [0, 5, 17]).keys == [part.keys[row] for row in (0, 5, 17)]
    assert len(read_rows(bench, tmp_path, "b", "test", range(64))) == 18
    outcome = run(folders, backbone, tmp_path, FeatureCache(None), "gepc bench")
    write(outcome, tmp_path / "out", tmp_path, ("png",))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "30 ID-train, 30 of each test set; fewer of a test: 18, b test: 18" in page


def test_more_sets_than_colours(tmp_path, data, protocol):
    pixels = dict(np.load(data / "set1.npz"))
    names = [f"other{number}" for number in range(8)]
    for name in names:
        np.savez(tmp_path / f"{name}.npz", **pixels)
    np.savez(tmp_path / "set0.npz", **dict(np.load(data / "set0.npz")))
    sets = {name: Source(f"npz:{name}.npz", name) for name in ("set0", *names)}
    many = replace(protocol, datasets=sets, pairs={"set0": tuple(names)}, levels={"default": (0.99, 0.9)}, seeds=(0,))
    backbone = toy_backbone()
    bench = Bench(many, backbone, collect(many, backbone, tmp_path, FeatureCache(None)))
    for figure in (figures.timestep_curve(bench, "set0"), figures.martingale_paths(bench, "set0")):
        styles = [(line.get_color(), str(line._unscaled_dash_pattern)) for line in figure.axes[0].lines]
        assert len(set(styles)) >= 8


def test_floats_from_zero_to_one_are_warned_about_or_declared(tmp_path, data, protocol):
    one = replace(protocol, pairs={"set0": ("set1",)}, seeds=(0,))
    expected = collect(one, toy_backbone(), data, FeatureCache(None)).parts["set0", "test", 0].table["s"]
    for name in ("set0", "set1"):
        arrays = {key: (pixels / 255.0).astype(np.float32) for key, pixels in np.load(data / f"{name}.npz").items()}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    with pytest.warns(ValueRangeWarning):
        collect(one, toy_backbone(), tmp_path, FeatureCache(None))
    sets = {name: replace(source, value_range=(0.0, 1.0)) for name, source in one.datasets.items()}
    told = collect(replace(one, datasets=sets), toy_backbone(), tmp_path, FeatureCache(None))
    drawn_again = told.parts["set0", "test", 0].table["s"]  # the last bit of the pixels, and so the noise, may differ
    assert drawn_again.shape == expected.shape
    assert drawn_again.mean() == pytest.approx(expected.mean(), rel=0.2)


def test_every_noise_seed_has_its_column(bench, protocol):
    table = ablations.seed_table(bench)
    assert table.header == ("pair", "seed 0", "seed 1", "mean", "std over seeds")
    first, *_, average = (row for row in table.rows if not str(row[0]).startswith("kept"))
    aurocs = [bench.detections(bench.main, seed)["set0", "set1"].auroc for seed in (0, 1)]
    assert first == ("SET0:SET1", *aurocs, np.mean(aurocs), pytest.approx(np.std(aurocs, ddof=1)))
    assert average[0] == "average"
    assert table.rows[-1][0] == "kept, ID SET1"
    assert "Noise seeds" in [one.title for one in ablations.all_tables(bench)]
    alone = Bench(replace(protocol, seeds=(0,)), bench.backbone, bench.collection)
    assert "Noise seeds" not in [one.title for one in ablations.all_tables(alone)]


def test_protocols_of_the_package_are_valid():
    assert {"paper32", "small32", "quick"} <= set(builtin_protocols())
    for name in builtin_protocols():
        assert len(load_protocol(name).pair_list) == 9
    paper = load_protocol("configs/paper32.yaml")
    assert (paper.train_images, paper.test_images, paper.keep, paper.topk) == (2000, 1000, 2, 0.3)


def test_bad_protocols_are_refused(tmp_path):
    with pytest.raises(OptionError, match="did you mean 'keep'"):
        load_protocol("quick", {"kep": 3})
    with pytest.raises(OptionError, match="did you mean 'celeba'"):
        load_protocol("quick", {"pairs": {"celebA": ["svhn"]}})
    with pytest.raises(OptionError, match="its own"):
        load_protocol("quick", {"pairs": {"svhn": ["svhn"]}})
    with pytest.raises(InputError, match="did you mean 'small32'"):
        load_protocol("smal32")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "foo"}, "inv_cv"),
        ({"calibration": "kdee"}, "did you mean 'kde'"),
        ({"keep": 0}, "keep must be between 1 and 4"),
        ({"keep": 5}, "keep must be between 1 and 4"),
        ({"seeds": []}, "seeds must be different"),
        ({"seeds": [-1]}, "seeds must be different"),
        ({"seeds": [0, 0]}, "seeds must be different"),
        ({"pairs": {"celeba": []}}, "one or more different sets"),
        ({"pairs": {"celeba": ["svhn", "svhn"]}}, "one or more different sets"),
        ({"batch_size": 0}, "at least 1"),
        ({"levels": {"celebA": [0.9, 0.8]}}, "did you mean 'celeba'"),
    ],
)
def test_a_wrong_value_is_refused_before_the_first_pass(changes, words):
    with pytest.raises(OptionError, match=words):
        load_protocol("small32", changes)


def test_what_is_wrong_with_backbone_or_data_is_said_before_the_first_pass(data, protocol):
    backbone = toy_backbone()
    assert check_ready(protocol, backbone, data) == asked_for(protocol, backbone)
    more = replace(protocol, train_images=60, test_images=100)
    there = check_ready(more, backbone, data)  # 48 of each
    assert set(there.values()) == {48}
    assert passes_needed(more, backbone, there) < passes_needed(more, backbone)
    missing = {**protocol.datasets, "set2": Source("npz:nowhere.npz", "SET2")}
    with pytest.raises(InputError, match=r"nowhere\.npz does not exist"):
        check_ready(replace(protocol, datasets=missing), backbone, data)
    with pytest.raises(OptionError, match="are 1 timesteps of this backbone"):
        check_ready(replace(protocol, levels={"default": (0.9, 0.9000001)}), backbone, data)
    assert backbone.forward_count == 0


def test_a_table_says_the_same_in_every_format():
    table = ResultTable("t", "A & B", ("name", "x"), (("a_b", 0.12345), ("c", None)), "50 % of it")
    assert list(csv.reader(io.StringIO(table.csv()))) == [["name", "x"], ["a_b", "0.12345"], ["c", ""]]
    assert "| a_b | 0.123 |" in table.markdown()
    assert r"a\_b & 0.123 \\" in table.latex()
    assert r"A \& B" in table.latex()
    assert r"10\textasciicircum{}4" in ResultTable("t", "10^4 F", ("a",), ()).latex()
    assert json.loads(json.dumps(table.as_dict()))["rows"][1] == {"name": "c", "x": None}
    with pytest.raises(ValueError, match="cells"):
        ResultTable("t", "t", ("a", "b"), (("x",),))
