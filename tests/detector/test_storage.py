"""A saved detector is a folder that is whole or absent, holds no code, and answers as the fitted one did."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from toys import pictures, toy_backbone, toy_detector, toy_network

import gepc
from gepc.core.errors import BackboneError, InputError, NotFittedError, OptionError, StorageError
from gepc.detector import storage
from gepc.detector.registry import load_detector
from gepc.detector.storage import is_detector
from gepc.methods import groups

pytestmark = pytest.mark.usefixtures("trusted")

ID = pictures(24)
NEW = pictures(4, seed=1)


@pytest.fixture(scope="module")
def fitted() -> gepc.GEPC:
    return toy_detector().fit(ID)  # type: ignore[return-value]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def full_disk(limit: int = 100) -> Iterator[None]:
    """No file may grow beyond `limit` bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"calibration": "mvn", "features": ("s", "cos", "d"), "pool": "local", "window": 3},
        {"calibration": "zscore", "aggregate": "max", "fuse": "mean", "weights": "uniform", "keep": None},
        {"calibration": "raw", "mc_samples": 2, "group_samples": 2, "level_samples": 1, "seed": 7},
        {"group": ["neg", "shift(2,-1)", "rot90"], "levels": "rho:0.05,0.2,0.5", "keep": 1},
        {"value_range": (-2.0, 2.0), "size": 8, "resize": "crop", "calibration_share": 0.5, "batch_size": 5},
    ],
    ids=str,
)
def test_a_loaded_detector_is_the_saved_one(tmp_path: Path, options: dict[str, object]) -> None:
    """Same scores, p-values and maps to the bit, same fitted state, same description when saved again."""
    detector = toy_detector(**options).fit(ID)
    detector.save(tmp_path / "det")
    loaded = load_detector(tmp_path / "det", toy_backbone())
    assert type(loaded) is type(detector)
    np.testing.assert_array_equal(loaded.score(NEW), detector.score(NEW))
    np.testing.assert_array_equal(loaded.p_value(NEW), detector.p_value(NEW))
    np.testing.assert_array_equal(loaded.score_map(NEW), detector.score_map(NEW))
    for name in ("levels_", "kept_", "weights_", "cv_", "calibration_scores_", "map_scale_"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(detector, name))
    assert loaded.fitted.preprocessing == detector.fitted.preprocessing
    loaded.save(tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "det")


def test_groups_of_the_reference_come_back(tmp_path: Path) -> None:
    labels = ["night", "day"] * 12
    detector = toy_detector().fit(ID, groups=labels)
    detector.save(tmp_path / "det")
    loaded = load_detector(tmp_path / "det", toy_backbone())
    where = ["day", "night", "night", "day"]
    np.testing.assert_array_equal(loaded.p_value(NEW, groups=where), detector.p_value(NEW, groups=where))


def test_the_folder_holds_one_readable_file_and_one_of_numbers(tmp_path: Path, fitted: gepc.GEPC) -> None:
    """No pickle: JSON without NaN that a person can read, and safetensors."""
    fitted.save(tmp_path / "det")
    assert sorted(contents(tmp_path / "det")) == ["detector.json", "state.safetensors"]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / "det" / "detector.json").read_text()
    described = json.loads(text, parse_constant=refuse)
    assert described["schema"] == 1
    assert described["method"] == "gepc"
    assert described["cost"] == {"forward": 14, "jvp": 0}
    assert described["options"]["seed"] == 0
    assert described["fitted"]["kept"] == fitted.kept_.tolist()
    assert {"gepc", "python", "torch", "numpy"} <= set(described["versions"])
    arrays = load_file(tmp_path / "det" / "state.safetensors")
    assert all(np.isfinite(value).all() for value in arrays.values())
    modes = {path.stat().st_mode for path in (tmp_path / "det").iterdir()}
    assert len(modes) == 1


def test_the_guarantee_is_written_down_where_there_is_one(tmp_path: Path, fitted: gepc.GEPC) -> None:
    """8 calibration images cannot hold 5 %; 20 can."""
    fitted.save(tmp_path / "few")
    assert json.loads((tmp_path / "few" / "detector.json").read_text())["guarantee"] is None
    toy_detector().fit(ID, calibration_images=pictures(20, seed=2)).save(tmp_path / "more")
    found = json.loads((tmp_path / "more" / "detector.json").read_text())["guarantee"]
    assert (found["alpha"], found["n"]) == (0.05, 20)


def test_saving_again_replaces_and_other_things_are_left_alone(tmp_path: Path, fitted: gepc.GEPC) -> None:
    (tmp_path / "empty").mkdir()
    fitted.save(tmp_path / "empty")
    fitted.save(tmp_path / "empty")
    fitted.save(tmp_path / "new" / "deep")
    assert is_detector(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for place in ("mine", "file"):
        with pytest.raises(InputError, match="exists and is not a detector folder"):
            fitted.save(tmp_path / place)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_an_unfitted_detector_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        toy_detector().save(tmp_path / "det")
    assert list(tmp_path.iterdir()) == []


def test_a_users_own_action_must_be_known_where_the_detector_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_ACTIONS", dict(groups._ACTIONS))
    mirror = gepc.Action("negative mirror", lambda x: -x.flip(-1), lambda x: -x.flip(-1))
    detector = toy_detector(group=["flip_y", mirror]).fit(ID)
    detector.save(tmp_path / "det")
    with pytest.raises(OptionError, match=r"'negative mirror'.*gepc\.register_action"):
        load_detector(tmp_path / "det", toy_backbone())
    gepc.register_action(mirror)
    np.testing.assert_array_equal(load_detector(tmp_path / "det", toy_backbone()).score(NEW), detector.score(NEW))


# --- failing writes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("existed", [True, False])
def test_a_full_disk_leaves_the_old_folder(tmp_path: Path, fitted: gepc.GEPC, existed: bool) -> None:
    place = tmp_path / "det"
    if existed:
        fitted.save(place)
    before = contents(place) if existed else None
    with full_disk(), pytest.raises(StorageError, match=r"cannot write .*/det: .*File too large.*untouched"):
        fitted.save(place)
    assert (contents(place) if existed else None) == before
    assert [path.name for path in tmp_path.iterdir()] == (["det"] if existed else [])


@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_any_failing_rename_leaves_the_old_folder(
    tmp_path: Path, fitted: gepc.GEPC, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Both files into the draft, the old folder aside, the draft into place: each in turn, where names do not swap."""
    monkeypatch.setattr("gepc.core.files._exchange", lambda *_: False)
    place = tmp_path / "det"
    fitted.save(place)
    before = contents(place)
    calls = 0
    rename = os.replace

    def fail_once(source: object, target: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(5, "Input/output error")
        rename(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises(StorageError, match=r"cannot write .*/det: Input/output error"):
        fitted.save(place)
    assert contents(place) == before
    assert [path.name for path in tmp_path.iterdir()] == ["det"]


# --- folders that cannot be loaded -----------------------------------------------------------------------------------


def without_weights(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "fitted": {name: part for name, part in value["fitted"].items() if name != "weights"}}


def with_option(value: dict[str, Any], name: str, option: object) -> dict[str, Any]:
    return {**value, "options": {**value["options"], name: option}}


STATE_DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "no state": lambda content: None,
    "state cut short": lambda content: content[:-40],
    "state is text": lambda content: b"hello, this is not a file of tensors",
}
DESCRIPTION_DAMAGE: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "no description": lambda value: None,
    "description cut short": lambda value: json.dumps(value)[:200],
    "description is a list": lambda value: "[1, 2]",
    "other schema": lambda value: json.dumps({**value, "schema": 99}),
    "a part missing": lambda value: json.dumps(without_weights(value)),
    "an unknown method": lambda value: json.dumps({**value, "method": "gpec"}),
    "an unknown option": lambda value: json.dumps(with_option(value, "sede", 1)),
    "an unknown group element": lambda value: json.dumps(with_option(value, "group", ["id", "my own"])),
}


def damage(folder: Path, how: str) -> None:
    """Put something else in place of a file's content, or nothing at all."""
    path = folder / ("state.safetensors" if how in STATE_DAMAGE else "detector.json")
    old = path.read_bytes()
    new = STATE_DAMAGE[how](old) if how in STATE_DAMAGE else DESCRIPTION_DAMAGE[how](json.loads(old))
    path.unlink()
    if new is not None:
        path.write_bytes(new if isinstance(new, bytes) else new.encode())


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("no description", InputError, r"contains no detector\.json"),
        ("no state", InputError, r"state\.safetensors is missing or damaged"),
        ("state cut short", InputError, r"state\.safetensors is missing or damaged"),
        ("state is text", InputError, r"state\.safetensors is missing or damaged"),
        ("description cut short", InputError, r"detector\.json is not a readable JSON file"),
        ("description is a list", InputError, "schema None"),
        ("other schema", InputError, "schema 99; this version reads 1"),
        ("a part missing", OptionError, "fitted needs weights"),
        ("an unknown method", OptionError, "did you mean 'gepc'"),
        ("an unknown option", OptionError, "did you mean 'seed'"),
        ("an unknown group element", OptionError, "unknown group element 'my own'.*register_action"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong(
    tmp_path: Path, fitted: gepc.GEPC, how: str, error: type[Exception], message: str
) -> None:
    fitted.save(tmp_path / "det")
    damage(tmp_path / "det", how)
    with pytest.raises(error, match=message):
        load_detector(tmp_path / "det", toy_backbone())


# --- the backbone ----------------------------------------------------------------------------------------------------


def test_a_backbone_made_in_python_must_be_passed(tmp_path: Path, fitted: gepc.GEPC) -> None:
    fitted.save(tmp_path / "det")
    with pytest.raises(BackboneError, match=r"backbone made in Python \(callable\).*load_detector\(folder, backbone\)"):
        load_detector(tmp_path / "det")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    right, wrong = toy_backbone(), toy_backbone()
    right.sha256, wrong.sha256 = "a" * 64, "b" * 64
    toy_detector(right).fit(ID).save(tmp_path / "det")
    load_detector(tmp_path / "det", right)
    with pytest.raises(BackboneError, match=r"other weights.*aaaaaaaaaaaa\.\.\. expected, found bbbbbbbbbbbb"):
        load_detector(tmp_path / "det", wrong)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: toy_backbone(channels=1), "channels is 3, this one has 1"),
        (lambda: toy_backbone(image_size=16), r"image_size is \[8, 8\], this one has \[16, 16\]"),
        (
            lambda: gepc.Backbone.from_callable(lambda x, t: x, np.linspace(0.99, 0.1, 1000), 3, 8),
            "first_abar is 0.99",
        ),
        (lambda: gepc.Backbone.from_callable(lambda x, t: x, toy_backbone().alphas_cumprod[:500], 3, 8), "timesteps"),
    ],
)
def test_another_schedule_or_shape_is_refused(tmp_path: Path, fitted: gepc.GEPC, other: object, message: str) -> None:
    """Also where neither has a hash to compare: kept timesteps would mean other noise levels."""
    fitted.save(tmp_path / "det")
    with pytest.raises(BackboneError, match=message):
        load_detector(tmp_path / "det", other())  # type: ignore[operator]


def test_a_backbone_given_by_path_keeps_the_stored_precision(tmp_path: Path) -> None:
    """A detector fitted in bfloat16 is scored in bfloat16 whether its backbone is found or given."""
    net = Path(__file__).parents[1] / "data" / "pinned" / "net"
    detector = gepc.create_detector(gepc.load_backbone(net, dtype="bfloat16"), "msma", size=16)
    detector.fit(pictures(24, 16)).save(tmp_path / "det")
    images = pictures(4, 16, seed=1)
    expected = detector.score(images)
    np.testing.assert_array_equal(load_detector(tmp_path / "det", str(net)).score(images), expected)
    with pytest.raises(BackboneError, match="precision is 'bfloat16', this one has 'float32'"):
        load_detector(tmp_path / "det", gepc.load_backbone(net))


# --- folders that someone has edited ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "det"
    toy_detector(calibration="knn").fit(ID).save(folder)
    return folder


def loading(saved: Path, tmp_path: Path, **changes: object) -> gepc.Detector:
    """Load a copy in which values of detector.json, by `part__name`, and arrays, by `state`, are others."""
    folder = Path(shutil.copytree(saved, tmp_path / "det"))
    state = load_file(folder / "state.safetensors")
    state.update(changes.pop("state", {}))  # type: ignore[call-overload]
    save_file({name: array for name, array in state.items() if array is not None}, folder / "state.safetensors")
    described = json.loads((folder / "detector.json").read_text())
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            described[part][key] = value
        else:
            described[part] = value
    (folder / "detector.json").write_text(json.dumps({k: v for k, v in described.items() if v is not None}))
    return load_detector(folder, toy_backbone())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fitted": None}, "det is incomplete: 'fitted' is missing"),
        ({"fitted": []}, r"detector\.json: fitted must be a mapping"),
        ({"method": {}}, r"detector\.json: method must be text"),
        ({"schema": True}, "det has schema True; this version reads 1"),
        ({"backbone__sha256": 5}, "backbone sha256 must be text"),
        ({"backbone__load_options": {"revision": "x", "code": 1}}, "load_options may hold"),
        ({"options__group": ["x"] * 20_000}, "options: group is nested too deeply or too long"),
        ({"options__group": [[[[[[[[[[[[1]]]]]]]]]]]]}, "is nested too deeply or too long"),
        ({"options__calibration": "x" * 20_000}, "options: calibration is too long"),
        ({"options__sequential": {"levels": 2}}, "uses sequential scoring, which gepc 0.2 no longer has"),
        ({"fitted__kept": [5, 4]}, "fitted: kept must be some of the timesteps, ascending"),
        ({"fitted__cv": [0.5]}, "fitted: cv and weights must have a number for each level"),
        ({"fitted__map_scale": None}, "fitted: map_scale must be positive for a method with maps"),
        ({"fitted__fit_images": 0}, "fitted: fit_images must be positive"),
        ({"fitted__groups": ["", ""]}, "det is incomplete: 'reference/1' is missing"),
    ],
)
def test_an_edited_description_says_what_is_wrong(
    saved: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        loading(saved, tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("calibrator/bounds", lambda array: None, "det is incomplete: 'calibrator/bounds' is missing"),
        ("calibrator/bounds", lambda array: array[0], r"calibrator/bounds has shape \(2, 1\), not \(2, 2, columns\)"),
        ("calibrator/bounds", lambda array: array[:, :1], r"has shape \(2, 1, 1\), not \(2, 2, columns\)"),
        ("calibrator/bounds", lambda array: array[:, :, :0], r"has shape \(2, 2, 0\), not \(2, 2, columns\)"),
        ("calibrator/bounds", lambda array: array.astype(np.float32), "calibrator/bounds is float32 of shape"),
        ("calibrator/samples", lambda array: np.zeros((1, 300_000)), r"with more than \d+ columns"),
        ("calibrator/more", lambda array: np.zeros(3), "holds other arrays than its calibrator has"),
        ("reference/0", lambda array: array[::-1].copy(), "fitted: calibration scores must be sorted"),
        ("reference/0", lambda array: array[1:], "fitted: groups must differ, with calibration scores for each"),
        ("maps/std", np.zeros_like, "the statistics of the maps do not fit each other"),
        ("maps/mean", lambda array: array[:1], "the statistics of the maps do not fit each other"),
        ("maps/gaussian/mean", lambda array: np.zeros(3), "the model of the activations is missing"),
    ],
)
def test_edited_arrays_say_what_is_wrong(
    saved: Path, tmp_path: Path, name: str, change: Callable[[Any], Any], message: str
) -> None:
    array = load_file(saved / "state.safetensors").get(name)
    with pytest.raises(InputError, match=message):
        loading(saved, tmp_path, state={name: change(array)})


def test_neighbours_that_are_stored_in_single_precision_give_the_same_scores(tmp_path: Path) -> None:
    detector = toy_detector(calibration="level_lof", features=("s", "cos", "b")).fit(ID)
    detector.save(tmp_path / "det")
    assert load_file(tmp_path / "det" / "state.safetensors")["calibrator/samples"].dtype == np.float32
    loaded = load_detector(tmp_path / "det", toy_backbone())
    np.testing.assert_array_equal(loaded.score(NEW), detector.score(NEW))


def test_arrays_that_give_no_finite_score_are_refused(tmp_path: Path) -> None:
    toy_detector(calibration="zscore").fit(ID).save(tmp_path / "saved")
    spread = load_file(tmp_path / "saved" / "state.safetensors")["calibrator/std"]
    with pytest.raises(InputError, match=r"state\.safetensors does not give a finite score"):
        loading(tmp_path / "saved", tmp_path, state={"calibrator/std": np.zeros_like(spread)})


def test_a_state_of_more_bytes_than_any_detector_has_is_not_read(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_STATE", 100)
    with pytest.raises(InputError, match=r"state\.safetensors is larger than the 100 bytes allowed"):
        loading(saved, tmp_path)


def test_a_saved_detector_finds_its_network_from_any_folder(
    tmp_path: Path, tiny_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own path is not followed: another user, with another state folder, has to give the network."""
    from diffusers import DDPMScheduler

    monkeypatch.delenv("GEPC_TRUST", raising=False)
    monkeypatch.setenv("GEPC_STATE", str(tmp_path / "state"))
    tiny_net.save_pretrained(tmp_path / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(tmp_path / "net")
    monkeypatch.chdir(tmp_path)
    images = pictures(40, 16)
    detector = gepc.GEPC(gepc.load_backbone("net"), levels=(0.99, 0.9), size=16).fit(images)
    detector.save("det")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    np.testing.assert_array_equal(load_detector(tmp_path / "det").score(images[:4]), detector.score(images[:4]))
    monkeypatch.setenv("GEPC_STATE", str(tmp_path / "another"))
    with pytest.raises(BackboneError, match="paths and hub ids in it are not followed"):
        load_detector(tmp_path / "det")


def test_more_images_than_columns_can_be_learnt_from(tmp_path: Path) -> None:
    """Neighbours and memories are arrays with one entry for every fitted image."""
    backbone, images = toy_network(), pictures(420)
    for calibration in ("level_lof", "level_memory"):
        detector = gepc.create_detector(backbone, "cfs", calibration=calibration, maps="raw").fit(images)
        detector.save(tmp_path / calibration)
        loaded = load_detector(tmp_path / calibration, backbone)
        np.testing.assert_array_equal(loaded.score(NEW), detector.score(NEW))


def test_a_folder_that_is_replaced_while_it_is_read_is_not_mixed(
    fitted: gepc.GEPC, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted.save(tmp_path / "det")
    other = toy_detector(seed=5).fit(ID)
    read = storage._read_state

    def exchanged(path: Path) -> Any:
        other.save(tmp_path / "det")
        return read(path)

    monkeypatch.setattr(storage, "_read_state", exchanged)
    with pytest.raises(InputError, match="was replaced while it was read"):
        load_detector(tmp_path / "det", toy_backbone())


def test_the_working_directory_may_change_between_loading_a_network_and_saving_a_detector(
    tmp_path: Path, tiny_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is the one that led to the network, for a saved detector and for a pickle."""
    from diffusers import DDPMScheduler

    tiny_net.save_pretrained(tmp_path / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(tmp_path / "net")
    monkeypatch.chdir(tmp_path)
    backbone = gepc.load_backbone("net", device="cpu")
    detector = gepc.create_detector(backbone, "pixel_stats", size=16).fit(pictures(24, 16))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    detector.save("det")
    assert backbone.source == "net"
    assert json.loads(Path("det/detector.json").read_text())["backbone"]["source"] == str(tmp_path / "net")
    for again in (load_detector("det").backbone, pickle.loads(pickle.dumps(backbone))):
        assert again.sha256 == backbone.sha256


def test_a_folder_that_holds_the_network_of_the_detector_is_not_replaced(tmp_path: Path, tiny_net: Any) -> None:
    """Saving would delete the weights that the detector needs."""
    from diffusers import DDPMScheduler

    folder = tmp_path / "det"
    tiny_net.save_pretrained(tmp_path / "net")
    DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(tmp_path / "net")
    gepc.create_detector(gepc.load_backbone(tmp_path / "net"), "pixel_stats", size=16).fit(pictures(24, 16)).save(
        folder
    )
    shutil.move(tmp_path / "net", folder / "net")
    detector = load_detector(folder, str(folder / "net"))
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InputError, match=r"net is in .*det, which saving replaces; give another folder, or move the"):
        detector.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_what_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    """The label of a group is longer than a folder may ask for."""
    detector = toy_detector().fit(ID, pictures(20, seed=3), groups=["a" * 20_000] * 20)
    with pytest.raises(InputError, match=r"det.detector\.json: fitted: groups: 0 is too long"):
        detector.save(tmp_path / "det")
    assert not list(tmp_path.iterdir())


def test_an_error_names_the_option_that_solves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line says how it spells the option."""
    detector = gepc.create_detector(gepc.load_backbone("photos-tiny"), "pixel_stats", size=16).fit(pictures(24, 16))
    detector.save(tmp_path / "det")
    path = tmp_path / "det" / "detector.json"
    facts = json.loads(path.read_text())
    facts["backbone"] |= {"source": "/not/here", "sha256": "0" * 64}
    path.write_text(json.dumps(facts))
    with pytest.raises(BackboneError, match="det names the network '/not/here'") as raised:
        load_detector(tmp_path / "det", trust=False)
    assert raised.value.options == ("backbone",)


def test_absurd_numbers_and_names_are_refused_in_a_sentence(fitted: gepc.GEPC, tmp_path: Path) -> None:
    fitted.save(tmp_path / "det")
    path = tmp_path / "det" / "detector.json"
    facts = json.loads(path.read_text())
    for part, name, value in (("options", "keep", 10**400), ("backbone", "load_options", {"variant": "v" * 400})):
        path.write_text(json.dumps({**facts, part: {**facts[part], name: value}}))
        with pytest.raises(InputError):
            load_detector(tmp_path / "det", toy_backbone())
