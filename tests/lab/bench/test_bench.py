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
from gepc.core.errors import InputError, OptionError, ValueRangeWarning
from gepc.core.tables import ResultTable
from gepc.lab.bench import detector_tables
from gepc.lab.bench.baselines import estimate_cost, runtime_table
from gepc.lab.bench.evaluate import Benchmark, Collection, GepcBench, Variant
from gepc.lab.bench.protocol import BenchmarkDataset, Protocol, builtin_protocols, load_protocol
from gepc.lab.bench.run import run, timestep_curve, write
from gepc.lab.datasets import open_dataset
from gepc.methods.base import extract_table
from gepc.methods.extraction import FeatureCache

LEVELS = (0.999, 0.99, 0.97, 0.9)
SMALL32 = ("cifar10", "svhn", "celeba", "cifar100")


def opened(
    protocol: Protocol, data: Path, cache: Path | None = None, backbone: gepc.Backbone | None = None
) -> Benchmark:
    return Benchmark.open(protocol, backbone or toy_backbone(), data, FeatureCache(cache))


def collect(*arguments) -> Collection:
    return opened(*arguments).collect()


def kept_backbone(weights: str = "a stand-in for weights") -> gepc.Backbone:
    backbone = toy_backbone()
    backbone.sha256 = weights  # so that features are cached
    return backbone


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


def passes_needed(protocol, backbone, sizes) -> int:
    (own,) = estimate_cost(protocol, backbone, (), sizes)
    return own.passes


@pytest.fixture(scope="module")
def bench(data, protocol) -> GepcBench:
    benchmark = opened(protocol, data, None, kept_backbone())
    return GepcBench(benchmark, benchmark.collect())


def test_one_pass_costs_the_estimate(bench, protocol):
    backbone, sizes = bench.backbone, bench.benchmark.sizes
    assert bench.collection.passes == passes_needed(protocol, backbone, sizes)
    assert set(protocol.timesteps(backbone)) == {
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
    scores = bench.scores("set0", seed=1)
    assert scores.kept == tuple(detector.kept_)
    assert np.allclose(scores.selection.weights, detector.weights_, rtol=1e-6)
    assert np.allclose(scores.inside, detector.score(test), rtol=1e-5)


def test_a_single_transform_is_what_a_detector_with_that_group_computes(bench, data):
    test = open_dataset("npz:set0.npz", data, "test", 24, 0)
    alone = gepc.GEPC(bench.backbone, levels=LEVELS, group=["rot180"], size=8)
    table = alone.features(test)
    variant = bench.raw(("rot180",), None)
    columns = bench.columns("set0", "test", 0, variant, bench.candidates("set0"))
    assert np.allclose(columns[:, :, 0], table["s"].mean(2), rtol=1e-5)


def test_every_ablation_has_all_pairs_and_sane_numbers(bench):
    tables = {table.name: table for table in (build(bench) for build in detector_tables.ABLATIONS)}
    assert list(tables) == ["sweep", "transforms", "calibration", "features", "timesteps"]
    for name in ("sweep", "transforms", "calibration", "features"):
        assert tables[name].header[-4:-1] == ("SET0:SET1", "SET0:SET2", "SET1:SET0")
        for row in tables[name].rows:
            assert all(0.0 <= cell <= 1.0 for cell in row[-4:])
            assert row[-1] == pytest.approx(np.mean(row[-4:-1]))
    for row in tables["transforms"].rows:
        assert all(cell >= 0.5 for cell in row if isinstance(cell, float))


def test_a_second_run_costs_no_pass_and_a_damaged_file_is_made_again(data, protocol, tmp_path):
    backbone = kept_backbone()
    first, again = (collect(protocol, data, tmp_path, backbone) for _ in range(2))
    assert again.passes == 0
    assert again.cached > first.cached == 0
    for key, part in first.tables.items():
        assert all(np.array_equal(part.table[name], again.tables[key].table[name]) for name in part.table)
    files = sorted(tmp_path.rglob("*.safetensors"))
    files[0].write_bytes(files[0].read_bytes()[:50])
    repaired = collect(protocol, data, tmp_path, backbone)
    assert repaired.cached == again.cached - 1
    assert repaired.passes > 0


def test_an_interrupted_run_goes_on(data, protocol, tmp_path):
    backbone = kept_backbone()
    benchmark = opened(protocol, data, tmp_path, backbone)
    finished = []

    def stop_early(count: int) -> None:
        finished.append(count)
        if len(finished) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        benchmark.collect(on_progress=stop_early)
    spent = backbone.forward_count
    rest = collect(protocol, data, tmp_path, backbone)
    assert spent > 0
    assert rest.passes + spent == passes_needed(protocol, backbone, benchmark.sizes)


def test_other_weights_or_options_do_not_hit_the_cache(data, protocol, tmp_path):
    for weights in ("one", "two"):
        assert collect(protocol, data, tmp_path, kept_backbone(weights)).cached == 0


def test_every_split_is_opened_once(data, protocol, monkeypatch, tmp_path):
    """For the check, the features of all seeds and methods, the timing and the pictures."""
    from gepc.lab.bench import protocol as module
    from gepc.lab.bench.baselines import choose_baselines

    asked = []

    def counted(name, root, split, *rest):
        asked.append((name, split))
        return open_dataset(name, root, split, *rest)

    monkeypatch.setattr(module, "open_dataset", counted)
    small = replace(protocol, pairs={"set0": ("set1",)}, seeds=(0,))
    benchmark = opened(small, data)
    write(run(benchmark, "", choose_baselines(["score_norm"], small, benchmark.backbone)), tmp_path, ())
    assert sorted(asked) == [("npz:set0.npz", "test"), ("npz:set0.npz", "train"), ("npz:set1.npz", "test")]


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
    sets = {name: BenchmarkDataset(f"folder:{name}", name) for name in ("a", "b")}
    levels = {"default": LEVELS}
    return replace(protocol, datasets=sets, pairs={"a": ("b",)}, levels=levels, train_images=30, test_images=30)


def test_corrupt_images_are_skipped_and_reported(tmp_path, folders):
    found = collect(folders, tmp_path)
    assert len(found.skipped) == 24  # once for each image, however many seeds
    (reason,) = [reason for image, reason in found.skipped.items() if image.startswith("b, test") and "03.png" in image]
    assert "03.png" in reason
    assert len(found.tables["b", "test", 0]) == 18
    for index in range(12, 30):
        (tmp_path / "a" / "test" / f"{index}.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"a, test split: none of the 30 images can be read; the first error: .*\.png"):
        collect(folders, tmp_path)


def test_images_are_read_again_by_the_rows_of_their_table(tmp_path, folders):
    benchmark = opened(folders, tmp_path)
    bench = GepcBench(benchmark, benchmark.collect())
    keys = bench.collection.tables["b", "test", 0].keys
    assert bench.read_rows(("b", "test"), [0, 5, 17]).keys == [keys[row] for row in (0, 5, 17)]
    assert len(bench.read_rows(("b", "test"), range(64))) == 18
    write(run(benchmark, "gepc bench"), tmp_path / "out", ())
    about = json.loads((tmp_path / "out" / "results.json").read_text())["about"]
    assert about["images"] == {"a, train": 30, "a, test": 18, "b, test": 18}


def test_more_sets_than_colours(tmp_path, data, protocol):
    pixels = dict(np.load(data / "set1.npz"))
    names = [f"other{number}" for number in range(8)]
    for name in names:
        np.savez(tmp_path / f"{name}.npz", **pixels)
    np.savez(tmp_path / "set0.npz", **dict(np.load(data / "set0.npz")))
    sets = {name: BenchmarkDataset(f"npz:{name}.npz", name) for name in ("set0", *names)}
    many = replace(protocol, datasets=sets, pairs={"set0": tuple(names)}, levels={"default": (0.99, 0.9)}, seeds=(0,))
    benchmark = opened(many, tmp_path)
    bench = GepcBench(benchmark, benchmark.collect())
    lines = timestep_curve(bench, "set0").axes[0].lines
    assert len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines}) >= 8


def test_floats_from_zero_to_one_are_warned_about_or_declared(tmp_path, data, protocol):
    one = replace(protocol, pairs={"set0": ("set1",)}, seeds=(0,))
    expected = collect(one, data).tables["set0", "test", 0].table["s"]
    for name in ("set0", "set1"):
        arrays = {key: (pixels / 255.0).astype(np.float32) for key, pixels in np.load(data / f"{name}.npz").items()}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    with pytest.warns(ValueRangeWarning):
        collect(one, tmp_path)
    sets = {name: replace(source, value_range=(0.0, 1.0)) for name, source in one.datasets.items()}
    declared = collect(replace(one, datasets=sets), tmp_path)
    drawn_again = declared.tables["set0", "test", 0].table[
        "s"
    ]  # the last bit of the pixels, and so the noise, may differ
    assert drawn_again.shape == expected.shape
    assert drawn_again.mean() == pytest.approx(expected.mean(), rel=0.2)


def test_protocols_of_the_package_are_valid():
    assert {"paper32", "small32", "quick"} <= set(builtin_protocols())
    for name in set(builtin_protocols()) - {"tiles", "mvtec"}:  # those are of images with masks
        protocol = load_protocol(name)
        others = {"tinyimagenet"} if name == "tinyimagenet32" else set(protocol.datasets) - {"tinyimagenet"}
        found = {one: set(pairs) for one, pairs in protocol.pairs.items()}
        assert found == {one: others - {one} for one in ("cifar10", "svhn", "celeba")}
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
        ({"keep": 0}, "keep must be at least 1"),
        ({"seeds": []}, "seeds must be different"),
        ({"seeds": [-1]}, "seeds must be different"),
        ({"seeds": [0, 0]}, "seeds must be different"),
        ({"pairs": {"celeba": []}}, "one or more different sets"),
        ({"pairs": {"celeba": ["svhn", "svhn"]}}, "one or more different sets"),
        ({"batch_size": 0}, "at least 1"),
        ({"main_features": ["x0"]}, "unknown main_features 'x0'"),
        ({"main_features": {"celeba": []}}, "at least one feature"),
        ({"features": ["s", "inner"]}, "none of inner layers"),
        ({"datasets": {name: {"dataset": "npz", "label": "X"} for name in SMALL32}}, "different labels"),
        ({"mc_samples": 0}, "mc_samples must be at least 1"),
        ({"levels": {"celebA": [0.9, 0.8]}}, "did you mean 'celeba'"),
    ],
)
def test_a_wrong_value_is_refused_before_the_first_pass(changes, words):
    with pytest.raises(OptionError, match=words):
        load_protocol("small32", changes)


def test_what_is_wrong_with_backbone_or_data_is_said_before_the_first_pass(data, protocol):
    backbone = toy_backbone()
    sizes = opened(protocol, data, None, backbone).sizes
    assert sizes == {place: protocol.images(place[1]) for place in protocol.timesteps(backbone)}
    more = replace(protocol, train_images=60, test_images=100)
    there = opened(more, data, None, backbone).sizes
    assert set(there.values()) == {48}
    assert passes_needed(more, backbone, there) > passes_needed(protocol, backbone, sizes)
    missing = {**protocol.datasets, "set2": BenchmarkDataset("npz:nowhere.npz", "SET2")}
    with pytest.raises(InputError, match=r"nowhere\.npz does not exist"):
        opened(replace(protocol, datasets=missing), data, None, backbone)
    with pytest.raises(OptionError, match="has 1 distinct levels with this backbone"):
        opened(replace(protocol, levels={"default": (0.9, 0.9000001)}), data, None, backbone)
    assert backbone.forward_count == 0


def test_images_are_the_first_ones_without_a_seed(data, protocol):
    images = replace(protocol, subset_seed=None).open(data, ("set0", "test"))
    assert [images[index].name for index in range(3)] == ["test/0", "test/1", "test/2"]
    drawn = protocol.open(data, ("set0", "test"))
    assert [drawn[index].name for index in range(3)] != ["test/0", "test/1", "test/2"]


def test_the_main_detector_has_the_features_and_the_noise_samples_of_the_protocol(data, protocol):
    backbone = kept_backbone()
    small = replace(protocol, main_features=("s", "cos"), mc_samples=2, seeds=(0,), pairs={"set0": ("set1",)})
    benchmark = opened(small, data, None, backbone)
    made = GepcBench(benchmark, benchmark.collect())
    assert passes_needed(small, backbone, benchmark.sizes) == backbone.forward_count
    assert backbone.forward_count == 2 * passes_needed(replace(small, mc_samples=1), backbone, benchmark.sizes)
    fused = made.variant_aurocs(Variant(("s", "cos")))
    assert made.aurocs == fused
    assert fused != made.variant_aurocs(Variant(("s",)))
    assert made.raw(None, None).features == ("s",)


def test_id_sets_may_differ_in_pooling_and_features(data, protocol):
    """Every ID set has the scores that it has in a protocol with its own values for all sets."""
    small = replace(protocol, seeds=(0,))
    mixed = replace(small, topk={"default": 0.3, "set1": 0.5}, main_features={"set1": ("s", "cos"), "default": ("s",)})
    alone = {"set0": small, "set1": replace(small, topk=0.5, main_features=("s", "cos"))}
    backbone = kept_backbone()
    benchmark = opened(mixed, data, None, backbone)
    bench = GepcBench(benchmark, benchmark.collect())
    assert bench.collection.passes == passes_needed(mixed, backbone, benchmark.sizes)
    assert bench.collection.passes > passes_needed(small, backbone, benchmark.sizes)
    assert bench.collection.sizes == benchmark.sizes
    for name, own in alone.items():
        single = opened(own, data, None, kept_backbone())
        expected = GepcBench(single, single.collect()).scores(name, 0)
        found = bench.scores(name, 0)
        np.testing.assert_allclose(found.inside, expected.inside, rtol=1e-6)
        for other, values in expected.outside.items():
            np.testing.assert_allclose(found.outside[other], values, rtol=1e-6)
    with pytest.raises(OptionError, match="'set9' is not a data set"):
        replace(small, topk={"set9": 0.5})


def test_histograms_show_the_sums_of_the_definitions(bench):
    from gepc.lab.bench.run import three_histograms

    drawn = three_histograms(bench)
    assert list(drawn) == ["histogram-energy", "histogram-residual", "histogram-definition"]
    name, kept = bench.protocol.representative[0], bench.scores(bench.protocol.representative[0], 0).kept
    batch = bench.read_rows((name, "test"), range(5))
    x_t, _ = batch.noised(bench.backbone, kept[0])
    sigma = (1.0 - bench.backbone.alphas_cumprod[kept[0]]) ** 0.5
    energy = (bench.backbone.eps(x_t, kept[0]) / sigma).square().flatten(1).sum(1).numpy()
    low, high = drawn["histogram-energy"].axes[0].get_xlim()
    assert low <= np.log10(energy).min() <= np.log10(energy).max() <= high
    table = extract_table(replace(bench.extractor, features=("b",), pool="mean"), bench.backbone, batch, kept)
    np.testing.assert_allclose(batch.images[0].size * table["b"][:, 0], energy, rtol=1e-5)


def test_every_feature_of_the_protocol_is_in_the_ablation(data, protocol):
    features = ("s", "cycle", "residual", "b")
    few = replace(protocol, pairs={"set0": ("set1",)}, features=features, seeds=(0,))
    benchmark = opened(few, data)
    table = detector_tables.feature_table(GepcBench(benchmark, benchmark.collect()))
    assert [row[0] for row in table.rows] == [*features, "fusion"]


def test_timestep_0_has_its_place_on_the_axis(data, protocol):
    from_zero = replace(protocol, pairs={"set0": ("set1",)}, levels={"default": (0.99999, 0.99, 0.9)}, seeds=(0,))
    benchmark = opened(from_zero, data)
    bench = GepcBench(benchmark, benchmark.collect())
    (axes,) = timestep_curve(bench, "set0").axes
    assert bench.candidates("set0")[0] == 0
    places = [axes.transAxes.inverted().transform(axes.transData.transform((t, 0.5)))[0] for t in axes.get_xticks()]
    assert places[0] > 0
    assert min(np.diff(places)) > 0.05


def test_levels_are_chosen_by_the_feature_s_wherever_it_stands():
    rng = np.random.default_rng(0)
    columns = np.stack([1 + rng.random((40, 2)) * [0.1, 0.9], 1 + rng.random((40, 2)) * [0.9, 0.1]], axis=2)
    assert Variant(("cos", "s"), keep=1).fit(columns).selection_.kept == (1,)
    assert Variant(("s", "cos"), keep=1).fit(columns).selection_.kept == (0,)


def test_the_dashed_lines_are_the_mean_over_kept_timesteps(bench):
    lines = [line for line in timestep_curve(bench, "set0").axes[0].lines if line.get_linestyle() == "--"]
    expected = detector_tables.kept_raw(bench, None, only="set0").values()
    assert [line.get_ydata()[0] for line in lines] == pytest.approx(list(expected))


def test_the_runtime_table_has_the_columns_of_the_papers(bench):
    table = runtime_table(bench)
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    pair = bench.protocol.representative
    assert [row["variant"] for row in rows] == [f"GEPC_s + {name}" for name in ("kde", "zscore", "raw", "mvn")]
    assert rows[0]["AUROC"] == bench.aurocs[pair]
    assert all(row["ms per image (ID)"] > 0 < row["ms per image (OOD)"] for row in rows)
    assert (rows[0]["paper: AUROC"], rows[0]["paper: ms (ID)"], rows[0]["paper: ms (OOD)"]) == (0.894, 69.92, 69.96)
    assert load_protocol("paper32").representative == ("svhn", "cifar100")


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
