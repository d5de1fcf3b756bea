"""Compared methods: chosen by name, extracted once, scored as their detectors score, with honest counts."""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from toys import as_uint8, pictures, toy_backbone, toy_network

import gepc
from gepc.core.errors import OptionError
from gepc.core.options import build
from gepc.lab.bench import detector_tables, published
from gepc.lab.bench.baselines import choose_baselines, collect_baselines, estimate_cost, method_names
from gepc.lab.bench.detector_tables import HEAD, METRICS, comparison_table, methods_table
from gepc.lab.bench.evaluate import Benchmark, GepcBench
from gepc.lab.bench.protocol import MethodChoice, Protocol, load_protocol
from gepc.lab.datasets import open_dataset
from gepc.lab.metrics import detection
from gepc.methods import base
from gepc.methods.extraction import FeatureCache

METHODS = [name for name in gepc.list_detectors() if name not in ("gepc", "energy", "encoder", "combined")]
QUICK = ("msma", "scoped", "nll_vlb", "ic", "typicality")
BRIEF = {"nll_vlb": {"strata": 5}, "ic": {"strata": 5}, "typicality": {"strata": 5}}
BRIEFER = BRIEF | {
    "dos": {"strata": 5},
    "eigenscore": {"iterations": 2, "draws": 1},
    "lmd": {"repetitions": 2, "steps": 3},
    "lr": {"levels": "rho:0.1,0.5,2"},
    "nll_ode": {"steps": 2},
    "waic": {"strata": 4, "draws": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for position, contrast in enumerate((0.3, 0.6)):
        parts = {
            f"{split}_x": as_uint8(pictures(40, 8, seed=10 * position + n, contrast=contrast))
            for n, split in enumerate(("train", "test"))
        }
        np.savez(folder / f"set{position}.npz", **parts)
    return folder


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    values = {
        "datasets": {name: {"dataset": f"npz:{name}.npz", "label": name.upper()} for name in ("set0", "set1")},
        "pairs": {"set0": ["set1"], "set1": ["set0"]},
        "levels": {"default": [0.999, 0.99, 0.9]},
        "size": 8,
        "train_images": 32,
        "test_images": 24,
        "seeds": [0, 3],
        "batch_size": 16,
        "methods": {
            "msma": {"train_images": 22, "test_images": 20},
            **{name: {"options": options} for name, options in BRIEF.items()},
        },
    }
    return build(Protocol, values, "protocol")


def kept_backbone() -> gepc.Backbone:
    backbone = toy_backbone()
    backbone.sha256 = "a stand-in for weights"  # so that features are cached
    return backbone


def opened(protocol: Protocol, data: Path, backbone: gepc.Backbone, cache: Path | None = None) -> Benchmark:
    return Benchmark.open(protocol, backbone, data, FeatureCache(cache))


@pytest.fixture(scope="module")
def bench(data, protocol) -> GepcBench:
    benchmark = opened(protocol, data, kept_backbone())
    return GepcBench(benchmark, benchmark.collect())


@pytest.fixture(scope="module")
def baselines(bench, protocol):
    return collect_baselines(choose_baselines(QUICK, protocol, bench.backbone), bench.benchmark)


# --- which methods --------------------------------------------------------------------------------------------------


def test_names_of_methods():
    found = method_names("all")
    assert sorted({name.partition(":")[0] for name in found}) == METHODS
    assert {"gepc+:fast", "gepc+:full"} <= set(found)  # it has no preset light: all of them,
    assert not {"gepc+:radar", "gepc+:inspect"} & set(found)  # but those for one kind of images
    free = method_names("training-free")
    assert set(free) == {name for name in found if name not in published.ID_TRAINED}
    assert {"nll_vlb", "ic", "msma", "ddpm_ood", "lmd", "diffpath", "scoped"} <= set(free)
    assert method_names("scoped, msma,msma") == ["msma", "scoped"]
    assert method_names("gepc") == []
    assert method_names("msma:knn,msma,training-free")[-1] == "ufcod"
    assert {"msma", "msma:knn"} <= set(method_names("all,msma:knn"))
    with pytest.raises(OptionError, match="did you mean 'msma'"):
        method_names("mmsa")
    with pytest.raises(OptionError, match="'msma' has no preset 'papr'; did you mean 'paper'"):
        method_names("msma:papr")
    with pytest.raises(OptionError, match="training-free"):
        method_names(" , ")


def test_a_method_registered_later_is_picked_up(monkeypatch):
    @dataclass(frozen=True)
    class Later(base.find_method("msma")):  # type: ignore[misc]
        pass

    monkeypatch.setitem(base._EXTRACTORS, "later", Later)
    assert "later" in method_names("all")
    assert "later" in method_names("training-free")


def test_every_row_of_the_paper_that_we_measure_is_there():
    assert set(published.MAIN_ROW.values()) <= set(published.MAIN)
    assert set(published.MAIN_ROW) <= {"gepc", *METHODS}


def test_published_values_are_those_of_the_tables():
    averages = {row: np.mean(values) for row, (values, _) in published.MAIN.items() if None not in values}
    printed = {"GEPC": 0.908, "DoS (ID-trained)": 0.928, "MSMA": 0.928, "LMD": 0.868, "DiffPath": 0.918, "NLL": 0.652}
    for row, average in printed.items():
        assert averages[row] == pytest.approx(average, abs=5.1e-4), row
    assert averages["SCOPED"] == pytest.approx(0.8931, abs=5e-5)  # the paper prints 0.892
    assert published.SAR == {"HRSID": (0.853, 0.0, 0.619), "SSDD": (1.0, 0.0, 1.0)}
    assert published.RUNTIME_MS["mvn"] == (69.86, 69.69)
    assert [published.KEPT[name]["weights"]["C100"] for name in ("C10", "SVHN", "CelebA")] == [
        [0.522, 0.478],
        [0.428, 0.572],
        [0.502, 0.498],
    ]
    for kept in published.KEPT.values():
        assert set(kept["timesteps"]) < set(kept["candidates"])
        assert all(sum(weights) == pytest.approx(1.0) for weights in kept["weights"].values())
    candidates, text = detector_tables._published_timesteps("SVHN")
    assert candidates == "5, 15, 136, 172"
    assert text == "5 (0.429), 15 (0.571) against C10, CelebA; 5 (0.428), 15 (0.572) against C100"


def test_presets_options_and_numbers_of_images_come_from_the_protocol(protocol):
    choices = {
        "scoped": MethodChoice(preset="paper"),
        "msma": MethodChoice(train_images=5000, options={"calibration": "knn:k=1", "noised": True}),
    }
    scoped, msma, norm = choose_baselines(
        ("scoped", "msma", "score_norm"), replace(protocol, methods=choices), toy_backbone()
    )
    assert (scoped.preset, len(scoped.extractor.levels.values)) == ("paper", 2)
    assert msma.images == {"train": 32, "test": 24}  # never more than the protocol's
    assert (msma.detector.calibration_name, msma.extractor.noised) == ("knn:k=1", True)
    assert (norm.preset, norm.images["train"]) == ("light", 32)


def test_one_method_with_two_presets(protocol):
    choices = {"msma": MethodChoice(test_images=20), "msma:knn": MethodChoice(test_images=22)}
    plain, knn, paper = choose_baselines(
        ("msma", "msma:knn", "msma:paper"), replace(protocol, methods=choices), toy_backbone()
    )
    assert [one.images["test"] for one in (plain, knn, paper)] == [20, 22, 20]
    assert [one.label for one in (plain, knn, paper)] == ["msma", "msma knn", "msma paper"]
    assert knn.detector.calibration_name == "knn:k=5"


def test_a_method_named_in_two_ways_is_compared_once(protocol):
    assert [one.label for one in choose_baselines(("msma", "msma:light"), protocol, toy_backbone())] == ["msma"]


def test_both_dimensions_of_diffpath_share_their_passes(data, protocol, tmp_path):
    backbone = kept_backbone()
    options = {"diffpath": MethodChoice(options={"steps": 4})}
    baselines = choose_baselines(("diffpath", "diffpath:paper"), replace(protocol, methods=options), backbone)
    one, six = collect_baselines(baselines, opened(protocol, data, backbone, tmp_path))
    assert one.collection.passes > 0
    assert six.collection.passes == 0
    alone, *_ = collect_baselines(baselines[1:], opened(protocol, data, backbone))
    assert alone.aurocs == six.aurocs


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ({"mmsa": {}}, "did you mean 'msma'"),
        ({"msma:kn": {}}, "did you mean 'knn'"),
        ({"gepc": {}}, "the protocol's own"),
        ({"msma": {"test_images": 0}}, "at least 20"),
        ({"msma": {"presett": "paper"}}, "did you mean 'preset'"),
    ],
)
def test_bad_choices_are_refused_when_read(methods, sentence):
    with pytest.raises(OptionError, match=sentence):
        load_protocol("quick", {"methods": methods})


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (MethodChoice(preset="papr"), "did you mean 'paper'"),
        (MethodChoice(options={"nosed": True}), "did you mean 'noised'"),
        (MethodChoice(options={"seed": 3}), "has no option 'seed'"),
    ],
)
def test_bad_choices_are_refused_when_made(protocol, choice, sentence):
    with pytest.raises(OptionError, match=sentence):
        choose_baselines(["msma"], replace(protocol, methods={"msma": choice}), toy_backbone())


# --- features and scores --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_scores_as_its_detector_does(name, data, protocol):
    options = BRIEFER.get(name, {})
    small = replace(protocol, seeds=(3,), pairs={"set0": ("set1",)}, train_images=24, test_images=20)
    small = replace(small, methods={name: MethodChoice(options=options)})
    backbone = toy_network() if name == "cfs" else toy_backbone()
    (baseline,) = choose_baselines([name], small, backbone)
    (found,) = collect_baselines([baseline], opened(small, data, backbone))
    scores = found.scores("set0", seed=3)
    train, test, other = (
        open_dataset(f"npz:{place}.npz", data, split, limit, 0)
        for place, split, limit in (("set0", "train", 24), ("set0", "test", 20), ("set1", "test", 20))
    )
    detector = gepc.create_detector(backbone, name, baseline.preset, seed=3, batch_size=16, **options)
    detector.fit(train, calibration_images=test)
    assert scores.kept == tuple(detector.kept_)
    for ours, images in ((scores.inside, test), (scores.outside["set1"], other)):
        expected = detector.score(images)
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6 * float(np.abs(expected).mean()))


def test_passes_are_as_estimated_and_a_second_run_makes_none(data, protocol, tmp_path):
    backbone = kept_backbone()
    baselines = choose_baselines(QUICK, protocol, backbone)
    alone = collect_baselines(baselines, opened(protocol, data, backbone))
    estimated = estimate_cost(protocol, backbone, baselines, opened(protocol, data, backbone).sizes)
    assert [one.passes for one in estimated[1:]] == [one.collection.passes for one in alone]
    assert estimate_cost(protocol, backbone, baselines) == estimated  # every split has as many images as requested
    found = collect_baselines(baselines, opened(protocol, data, backbone, tmp_path))
    made = {one.name: one.collection.passes for one in found}
    assert made["ic"] == made["typicality"] == 0 < made["nll_vlb"]  # they share its passes
    again = collect_baselines(baselines, opened(protocol, data, backbone, tmp_path))
    assert [one.collection.passes for one in again] == [0] * len(QUICK)
    assert [one.aurocs for one in again] == [one.aurocs for one in found]


def test_density_of_states_costs_nothing_beside_the_methods_it_builds_on(data, protocol, tmp_path):
    backbone = kept_backbone()
    choices = {name: MethodChoice(options={"strata": 5}) for name in ("dos", "nll_vlb")}
    baselines = choose_baselines(("dos", "nll_vlb", "score_norm"), replace(protocol, methods=choices), backbone)
    dos, *_ = collect_baselines(baselines, opened(protocol, data, backbone, tmp_path))
    assert dos.collection.passes == 0
    alone, *_ = collect_baselines(baselines[:1], opened(protocol, data, backbone))
    assert alone.collection.passes > 0
    assert alone.aurocs == dos.aurocs


def test_an_interrupted_run_goes_on(data, protocol, tmp_path):
    backbone = kept_backbone()
    baselines = choose_baselines(["msma"], protocol, backbone)
    told: list[int] = []

    def stop_early(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_baselines(baselines, opened(protocol, data, backbone, tmp_path), stop_early)
    spent = backbone.forward_count
    (found,) = collect_baselines(baselines, opened(protocol, data, backbone, tmp_path))
    assert 0 < spent == sum(told)
    _, estimated = estimate_cost(protocol, backbone, baselines)
    assert found.collection.passes + spent == estimated.passes


@pytest.mark.parametrize("name", ["lr", "ddpm_ood", "msma"])
def test_other_levels_are_other_features_in_the_cache(name, data, protocol, tmp_path):
    """A method whose levels are not the table's levels must not find the table of other levels."""
    backbone = kept_backbone()
    small = replace(protocol, seeds=(0,))
    for levels in ("rho:0.3,1", "rho:0.6,2"):
        choices = {name: MethodChoice(options={"levels": levels, "calibration": "kde"})}
        baselines = choose_baselines([name], replace(small, methods=choices), backbone)
        (kept,) = collect_baselines(baselines, opened(small, data, backbone, tmp_path))
        (fresh,) = collect_baselines(baselines, opened(small, data, backbone))
        for place, part in fresh.collection.tables.items():
            for column, values in part.table.items():
                np.testing.assert_array_equal(kept.collection.tables[place].table[column], values)


# --- the tables -----------------------------------------------------------------------------------------------------


def test_gepc_has_the_row_it_has_alone(bench, baselines):
    alone, beside = (comparison_table(bench, rows) for rows in ([], baselines))
    assert alone.rows[0] == beside.rows[0]
    row = dict(zip(alone.header, alone.rows[0], strict=True))
    assert [row[label] for label in bench.protocol.pair_labels] == list(bench.aurocs.values())
    assert "GEPC needs 16F" in alone.note


def test_the_main_table_says_what_each_row_is(bench, baselines):
    table = comparison_table(bench, baselines)
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    measured = {row["method"]: row for row in rows if row["source"] == "measured"}
    assert list(measured) == ["GEPC", "msma", "scoped", "nll_vlb", "ic[png]", "typicality"]
    assert {name: row["F+J"] for name, row in measured.items()} == {
        "GEPC": "14F+0J",
        "msma": "10F+0J",
        "scoped": "1F+1J",
        "nll_vlb": "6F+0J",
        "ic[png]": "6F+0J",
        "typicality": "6F+0J",
    }
    assert measured["msma"]["train / test images"] == "22 / 20"
    assert measured["msma"]["calibration"] == "gmm"
    for row in measured.values():
        values = [row[name] for name in bench.protocol.pair_labels]
        assert row["average"] == pytest.approx(np.mean(values))
        assert row["worst"] == min(values) == row[row["worst pair"]]
        assert row["std over seeds"] >= 0.0
    assert len(rows) == len(measured)  # no published figure is for these pairs
    assert detector_tables.PUBLISHED_NOTE not in table.note
    assert table.header[: len(HEAD)] == HEAD
    json.dumps(table.as_dict())


def test_published_rows_stand_beside_pairs_that_have_them(bench, baselines):
    labels = {"set0": "C10", "set1": "SVHN"}
    sets = {name: replace(source, label=labels[name]) for name, source in bench.protocol.datasets.items()}
    renamed = copy.copy(bench)
    renamed.protocol = replace(bench.protocol, datasets=sets)
    table = comparison_table(renamed, baselines)
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    names = [row["method"] for row in rows]
    assert names[names.index("msma") + 1] == "MSMA"
    published_only = {name: rows[names.index(f"{name} (ID-trained)")] for name in ("IGEBM", "VAEBM", "Improved CD")}
    assert all(row["source"].startswith("published") for row in published_only.values())
    assert len(rows) == 1 + len(baselines) + len(published.MAIN)
    assert detector_tables.PUBLISHED_NOTE in table.note


def test_intervals_of_every_method_and_pair(bench, baselines):
    table = methods_table(bench.protocol, [bench, *baselines])
    assert len(table.rows) == (1 + len(baselines)) * len(bench.protocol.pair_list)
    for row in table.rows:
        values = dict(zip(table.header, row, strict=True))
        assert values["low"] <= values["AUROC"] <= values["high"]


def test_metrics_are_means_over_noise_seeds(bench):
    several = SimpleNamespace(label="GEPC", detections=lambda: runs)
    pairs = bench.protocol.pair_list
    runs = [dict.fromkeys(pairs, detection([0.0, 1.0, 2.0], scores)) for scores in ([1.5, 3.0], [0.5, 3.0])]
    for row in methods_table(bench.protocol, [several]).rows:
        values = dict(zip(METRICS, row, strict=True))
        first, second = (run[pairs[0]] for run in runs)
        assert values["AUROC"] == pytest.approx((5 / 6 + 4 / 6) / 2)
        assert values["std over seeds"] == pytest.approx((1 / 6) / 2**0.5)
        assert values["low"] == pytest.approx((first.auroc_low + second.auroc_low) / 2)
        assert values["AUPR"] == pytest.approx((first.aupr + second.aupr) / 2)
        assert values["FPR95"] == pytest.approx((1 / 3 + 2 / 3) / 2)
