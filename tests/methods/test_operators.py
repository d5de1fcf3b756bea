"""Operators with numbers: orthogonal and undone where they say so, drawn by the image's content, spelled by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from toys import pictures, toy_backbone, toy_detector

import gepc
from gepc.cli.options import parse_settings
from gepc.core.errors import OptionError
from gepc.methods.groups import Action, Group, find_action
from gepc.methods.operators import fourier_shift

ORTHOGONAL = ["shift(0.5,-1.25)", "rotate(30)", "rotate(137)", "rotate(-61.5)", "shear(0.3)", "hue(40)"]
ORTHOGONAL += ["channels(0,1,0,1,0,0,0,0,1)"]
SIZES = [(8, 8), (9, 9), (8, 6), (7, 12)]


def random_images(*size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def blob(side: int = 32) -> torch.Tensor:
    """A smooth spot off the centre, which no shear moves across the border."""
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    return torch.from_numpy(np.exp(-((x - 4) ** 2 + (y - 1) ** 2) / 8))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ORTHOGONAL)
def test_orthogonal_on_even_and_odd_sizes(
    name: str, size: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    """<P x, P y> = <x, y> and P^-1 P x = x = P P^-1 x, for the Nyquist frequency of even sizes, too."""
    action, x = find_action(name), random_images(*size, dtype=dtype)
    y = x.flip(0)
    scale = float(x.norm())
    moved = action.apply(x)
    assert moved.dtype == dtype
    assert abs(float((moved * action.apply(y)).sum() - (x * y).sum())) < tolerance * scale**2
    assert float(action.error(x).norm()) < tolerance * scale
    assert float((action.apply(action.inverse(x)) - x).norm()) < tolerance * scale


@pytest.mark.parametrize("size", [8, 9])
def test_a_whole_fourier_shift_is_a_roll(size: int) -> None:
    x = random_images(size, size)
    torch.testing.assert_close(fourier_shift(x, 3.0, -1), x.roll(3, -1))
    assert torch.equal(find_action("shift(-2,1)").apply(x), x.roll((1, -2), (-2, -1)))


def test_the_true_shift_of_the_nyquist_frequency_would_lose_energy() -> None:
    """Why `fourier_shift` replaces its factor cos(pi/2) = 0: the image +1, -1, +1, ... would vanish."""
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    assert float(fourier_shift(x, 0.5, -1).norm()) == pytest.approx(2.0)


@pytest.mark.parametrize(("degrees", "quarters"), [(90, 1), (180, 2), (-90, 3), (450, 1)])
def test_quarter_turns_are_exact(degrees: int, quarters: int) -> None:
    x = random_images(8, 8)
    torch.testing.assert_close(find_action(f"rotate({degrees})").apply(x), x.rot90(quarters, (-2, -1)))


def test_a_rotation_moves_a_smooth_spot_where_it_should_be() -> None:
    """Counter-clockwise with y down; 3 times 30 degrees are a quarter turn up to the band limit."""
    x = blob()
    thirty = find_action("rotate(30)").apply(x)
    y, x_axis = np.mgrid[:32, :32] - 15.5
    mass = thirty / thirty.sum()
    a = np.deg2rad(30)
    assert float((mass * torch.from_numpy(x_axis)).sum()) == pytest.approx(4 * np.cos(a) + np.sin(a), abs=0.02)
    assert float((mass * torch.from_numpy(y)).sum()) == pytest.approx(-4 * np.sin(a) + np.cos(a), abs=0.02)
    again = find_action("rotate(60)").apply(thirty)
    torch.testing.assert_close(again, x.rot90(1, (-2, -1)), atol=1e-3, rtol=0)


def test_hue_of_120_degrees_exchanges_the_channels() -> None:
    x = random_images(4, 4)
    torch.testing.assert_close(find_action("hue(120)").apply(x), x.roll(1, -3))
    assert Group.of("colours").names == ("id", "hue(120)", "hue(240)")


def test_scaling_interpolates_and_its_error_is_measured() -> None:
    action = find_action("scale(1.25)")
    assert action.kind == "approximate"
    smooth, rough = blob().expand(1, 1, -1, -1), random_images(32, 32)
    errors = [float(action.error(x).norm() / x.norm()) for x in (smooth, rough)]
    assert errors[0] < 0.02
    assert errors[1] > 0.1
    enlarged = action.apply(smooth)
    assert float(enlarged.sum() / smooth.sum()) == pytest.approx(1.25**2, rel=0.02)


@pytest.mark.parametrize("name", ["gain(0.5)", "gamma(0.8)"])
def test_intensities_change_on_the_clean_image_and_are_undone_without_clipping(name: str) -> None:
    action, x = find_action(name), random_images(4, 4).clamp(-1, 1)
    assert action.kind == "intensity"
    assert float(action.error(x).abs().max()) < 1e-12
    assert float((find_action("gain(2)").error(x)).abs().max()) > 0.5, "clipped"


def test_the_error_of_the_operator_is_removed_for_an_equivariant_network() -> None:
    """eps(P x) = P eps(x), so the transported answer is eps(x), though P^-1 P is not the identity."""
    action, x = find_action("scale(1.25)"), random_images(8, 8)
    torch.testing.assert_close(action.transported(action.apply(2 * x), 2 * x), 2 * x)
    assert not torch.allclose(action.inverse(action.apply(2 * x)), 2 * x, atol=0.1)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("so2:samples=2", ("id", "rotate(-180..180)#1", "rotate(-180..180)#2")),
        ("translations:max=1.5,samples=1", ("id", "shift(-1.5..1.5,-1.5..1.5)#1")),
        (["rotate( 30.0 )", "2*flip_x"], ("id", "rotate(30)", "2*flip_x")),
        (["scale(1.2..0.8)#3"], ("id", "scale(0.8..1.2)#3")),
    ],
)
def test_the_spelling_of_groups(given: str | list[str], names: tuple[str, ...]) -> None:
    group = Group.of(given)
    assert group.names == names
    assert Group.of(group.names).names == names


def test_the_spelling_survives_the_command_line() -> None:
    settings = ["group=so2:samples=2", 'group=["shift(0.5,0)","0.5*rotate(-30..30)#1"]']
    for setting, names in zip(
        settings, (Group.so2(2).names, ("id", "shift(0.5,0)", "0.5*rotate(-30..30)#1")), strict=True
    ):
        assert Group.of(parse_settings([setting])["group"]).names == names


def test_groups_from_python() -> None:
    assert Group.so2(samples=2, max=30).names == ("id", "rotate(-30..30)#1", "rotate(-30..30)#2")
    assert len(Group.translations(max=2)) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("so2:sample=4", "did you mean 'samples'"),
        ("so2:samples=x", "takes samples=NUMBER"),
        ("so2:samples=0", "whole number between 1 and 1000"),
        ("so2:samples=2.5", "whole number"),
        (["rotate(1,2)"], "unknown group element"),
        (["rotate(x)"], "unknown group element"),
        (["rotate(inf)"], "unknown group element"),
        (["rotate(1e300)"], "unknown group element"),
        (["rotate(0..10)"], "unknown group element"),
        (["scale(-1)"], "unknown group element"),
        (["channels(1,1,0,1)"], "unknown group element"),
        (["channels(1,0,0)"], "unknown group element"),
        (["channels(-1..1)#1"], "unknown group element"),
        (["-1*rot90"], "unknown group element"),
        (["2*id"], "unknown group element"),
        ("so3", "did you mean 'so2'"),
    ],
)
def test_what_cannot_be_read(given: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Group.of(given)  # type: ignore[arg-type]


def test_a_random_action_is_drawn_before_it_acts_and_differs_between_images() -> None:
    action, x = find_action("rotate(-180..180)#1"), random_images(8, 8)
    with pytest.raises(OptionError, match="draw them first"):
        action.apply(x)
    keys = [b"a", b"b"]
    drawn = action.drawn(0, keys)
    assert float(drawn.error(x).norm()) < 1e-12 * float(x.norm())
    alone = action.drawn(0, keys[1:]).apply(x[1:])
    torch.testing.assert_close(drawn.apply(x)[1:], alone)
    first, second = drawn.apply.numbers[0].flatten().tolist()  # type: ignore[union-attr]
    assert first != second
    assert find_action("rotate(-180..180)#2").drawn(0, keys).apply.numbers[0][0] != first  # type: ignore[union-attr]
    assert find_action("3*rotate(-180..180)#1").drawn(0, keys).apply.numbers[0][0] == first  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["rotate(0..90)#1", "shift(-2..2,0)#1", "scale(0.8..1.2)#1", "hue(0..90)#1", "gain(0.5..1)#1"]
)
def test_every_random_family_acts_on_each_image_by_its_own_number(name: str) -> None:
    x, keys = random_images(8, 8, dtype=torch.float32), [b"a", b"b"]
    moved = find_action(name).drawn(0, keys).apply(x)
    assert moved.dtype == torch.float32
    for row in (0, 1):
        alone = find_action(name).drawn(0, keys[row : row + 1]).apply(x[row : row + 1])
        torch.testing.assert_close(moved[row : row + 1], alone)


def test_scores_of_a_continuous_group_do_not_depend_on_the_batch() -> None:
    images = np.random.default_rng(0).uniform(-1, 1, (6, 3, 8, 8))
    group = Group.of([*Group.so2(2).names, "shift(-2..2,-2..2)#1", "scale(0.9..1.1)#1", "gamma(0.8)"])
    tables = []
    for batch_size, order in ((6, slice(None)), (1, slice(None)), (4, slice(None, None, -1))):
        detector = gepc.GEPC(toy_backbone(), levels=(0.99, 0.9), group=group, batch_size=batch_size)
        tables.append(detector.features(images[order])["s"][order])
    np.testing.assert_allclose(tables[1], tables[0], rtol=1e-5)
    np.testing.assert_allclose(tables[2], tables[0], rtol=1e-5)
    assert (tables[0][:, :, 1:] > 0).all()


def test_a_saved_detector_draws_the_same_numbers(tmp_path: Path) -> None:
    images = np.random.default_rng(0).uniform(-1, 1, (16, 3, 8, 8))
    group = [*Group.so2(2).names, "0.5*shift(-2..2,0)#1", "hue(30)"]
    detector = gepc.GEPC(toy_backbone(), levels=(0.9,), keep=1, group=group, maps="raw").fit(images)
    detector.save(tmp_path / "detector")
    loaded = gepc.load_detector(tmp_path / "detector", toy_backbone())
    assert loaded.extractor.group.names == ("id", *group[1:])  # type: ignore[attr-defined]
    np.testing.assert_array_equal(loaded.score(images[:3]), detector.score(images[:3]))


def test_a_weight_multiplies_the_residual() -> None:
    images = np.random.default_rng(0).uniform(-1, 1, (3, 3, 8, 8))
    plain, weighted = (
        gepc.GEPC(toy_backbone(), levels=(0.9,), keep=1, group=group).features(images)["s"]
        for group in (["rot90", "flip_x"], ["0.5*rot90", "flip_x"])
    )
    np.testing.assert_allclose(weighted, plain * [0.0, 0.5, 1.0])


def test_a_learned_action_is_the_map_between_two_sensors() -> None:
    """Procrustes finds the orthogonal mixture of channels exactly, and noise does not hurt it much."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 3, 4, 4))
    matrix = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    y = np.einsum("ij,njhw->nihw", matrix, x)
    for noise, tolerance in ((0.0, 1e-12), (0.1, 0.05)):
        group = Group.learned(x, y + noise * rng.standard_normal(y.shape))
        moved = group.moving[0].apply(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(moved, y, atol=4 * tolerance)
        assert Group.of(group.names) == group
    with pytest.raises(OptionError, match="two arrays"):
        Group.learned(x, y[:3])


@pytest.mark.parametrize("kind", ["permutation", "rotation"])
def test_a_learned_action_on_pixels_is_recovered_exactly(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix = np.eye(64)[rng.permutation(64)]
    if kind == "rotation":
        matrix = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    x = rng.uniform(-1.0, 1.0, (70, 1, 8, 8))
    y = (x.reshape(70, 64) @ matrix.T).reshape(x.shape)
    group = Group.learned(x, y, on="pixels")
    (action,) = group.moving
    np.testing.assert_allclose(action.apply(torch.from_numpy(x)).numpy(), y, atol=1e-12)
    np.testing.assert_allclose(action.inverse(torch.from_numpy(y)).numpy(), x, atol=1e-12)
    with pytest.raises(OptionError, match="learned on images of 8x8"):
        action.apply(torch.zeros(1, 1, 16, 16))
    detector = toy_detector(group=group).fit(pictures(30))
    detector.save(tmp_path / "det")
    with pytest.raises(OptionError, match=r"unknown group element 'pixels [0-9a-f]{12}'"):
        gepc.load_detector(tmp_path / "det", detector.backbone)
    gepc.register_action(Group.learned(x, y, on="pixels").moving[0])
    again = gepc.load_detector(tmp_path / "det", detector.backbone)
    np.testing.assert_array_equal(again.score(pictures(3, seed=1)), detector.score(pictures(3, seed=1)))


def test_an_action_on_pixels_needs_enough_pairs_of_small_square_images() -> None:
    for shape in ((80, 1, 8, 10), (1, 1, 40, 40)):
        with pytest.raises(OptionError, match="square images with a side of at most 32"):
            Group.learned(np.zeros(shape), np.zeros(shape), on="pixels")
    for shape, on, count in (
        ((63, 1, 8, 8), "pixels", "63 vectors of 64"),
        ((1, 13, 3, 4), "channels", "12 vectors of 13"),
    ):
        with pytest.raises(OptionError, match=f"{count} {on} do not determine a map"):
            Group.learned(np.zeros(shape), np.zeros(shape), on=on)
    with pytest.raises(OptionError, match="finite numbers"):
        Group.learned(np.full((9, 1, 2, 2), np.nan), np.zeros((9, 1, 2, 2)))
    with pytest.raises(OptionError, match="'pixels'"):
        Group.learned(np.zeros((4, 1, 2, 2)), np.zeros((4, 1, 2, 2)), on="pixel")


def test_a_colour_action_needs_its_channels() -> None:
    with pytest.raises(OptionError, match="needs images of 3 channels"):
        find_action("hue(120)").apply(torch.zeros(2, 1, 4, 4))


def test_a_range_is_longer_on_finer_pixels() -> None:
    finer = find_action("shift(-1..1,0)#1").on_pixels(2)
    assert isinstance(finer, Action)
    assert finer.drawn(0, [b"a"]).apply.numbers[0].abs() <= 2.0  # type: ignore[union-attr]
    assert finer.name == "shift(-2..2,0)"
