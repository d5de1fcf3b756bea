"""Actions are orthogonal with exact inverses, groups hold the identity first, and what cannot act is said so."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from literal_gepc import DESTINATION, move, move_back

from gepc.core.errors import OptionError
from gepc.methods import groups
from gepc.methods.groups import IDENTITY, Action, Group, find_action, register_action

images = st.builds(
    lambda seed, count, channels, side: torch.from_numpy(
        np.random.default_rng(seed).standard_normal((count, channels, side, side))
    ),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 7),
)
shifts = st.builds(lambda dx, dy: f"shift({dx},{dy})", st.integers(-9, 9), st.integers(-9, 9))
names = st.one_of(st.sampled_from(sorted(groups._ACTIONS)), shifts)


@given(images, names)
def test_an_action_and_its_inverse_undo_each_other_exactly(x: torch.Tensor, name: str) -> None:
    action = find_action(name)
    assert torch.equal(action.inverse(action.apply(x)), x)
    assert torch.equal(action.apply(action.inverse(x)), x)


@given(images, names)
def test_an_action_moves_values_about_and_so_keeps_the_norm(x: torch.Tensor, name: str) -> None:
    """Orthogonal: the same absolute values, in other places, per image and channel."""
    moved = find_action(name).apply(x)
    assert torch.equal(moved.abs().flatten(2).sort().values, x.abs().flatten(2).sort().values)


@pytest.mark.parametrize("name", DESTINATION)
def test_the_papers_elements_do_what_their_names_say(name: str) -> None:
    """Against a pixel by pixel reading: x to the right, y down, quarter turns counter-clockwise."""
    x = np.arange(2 * 4 * 4, dtype=np.float64).reshape(2, 4, 4)
    action = find_action(name)
    np.testing.assert_array_equal(action.apply(torch.from_numpy(x)).numpy(), move(name, x))
    np.testing.assert_array_equal(action.inverse(torch.from_numpy(x)).numpy(), move_back(name, x))


@pytest.mark.parametrize("name", ["c4", "d4", "flips", "sign"])
def test_ready_made_groups_are_closed(name: str) -> None:
    """g1 g2 is again an element; the paper's set and the bare shifts are not closed and need not be."""
    x = torch.arange(9.0).reshape(1, 1, 3, 3) + 1
    group = Group.of(name)
    for first in group:
        for second in group:
            product = first.apply(second.apply(x))
            assert sum(torch.equal(product, action.apply(x)) for action in group) == 1


def test_the_papers_set() -> None:
    group = Group.of("paper")
    assert group.names == ("id", "flip_x", "flip_y", "rot90", "rot180", "shift_x", "shift_y")
    assert len(group) == 7
    assert [action.name for action in group.moving] == list(group.names[1:])


def test_the_identity_is_added_first_and_counted_once() -> None:
    assert Group.of(["neg", "id", "flip_x"]).names == ("id", "neg", "flip_x")
    assert Group.of("flip_x").names == ("id", "flip_x")
    assert Group.of(" shift( 2, -1 )").names == ("id", "shift(2,-1)")


@pytest.mark.parametrize("name", sorted(groups._ACTIONS))
def test_an_action_is_on_the_last_two_dimensions(name: str) -> None:
    """Whatever the others are: a map (H, W), maps (N, H, W), or images under several elements (G, N, C, H, W)."""
    action = find_action(name)
    x = torch.arange(2 * 3 * 2 * 4 * 4, dtype=torch.float64).reshape(2, 3, 2, 4, 4)
    moved, back = action.apply(x), action.inverse(x)
    for index in np.ndindex(2, 3, 2):
        assert torch.equal(moved[index], action.apply(x[index]))
        assert torch.equal(back[index], action.inverse(x[index]))
    assert torch.equal(moved[0, 0], action.apply(x[0, 0]))


def test_shift_moves_right_and_down_around_the_border() -> None:
    x = torch.zeros(1, 1, 4, 5)
    x[0, 0, 0, 0] = 1.0
    assert find_action("shift(2,-1)").apply(x)[0, 0, 3, 2] == 1.0


@pytest.mark.parametrize("name", sorted(groups._GROUPS))
def test_non_square_images_lose_what_swaps_their_sides(name: str) -> None:
    """What is left acts on them without changing their shape; a group that has nothing left says so."""
    group, x = Group.of(name), torch.randn(1, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    assert group.for_size(5, 5) is group
    kept = group.for_size(4, 6)
    assert kept.names[0] == "id"
    assert set(group.names) - set(kept.names) <= {"rot90", "rot270", "transpose", "antitranspose"}
    for action in kept:
        assert action.apply(x).shape == x.shape


def test_a_group_of_nothing_but_quarter_turns_cannot_act_on_a_non_square_image() -> None:
    with pytest.raises(OptionError, match="no element of this group acts on 4x6"):
        Group.of(["rot90", "rot270"]).for_size(4, 6)


def test_a_group_that_loses_what_inner_layers_need_says_so() -> None:
    """Without a flip or a rotation there is no feature `inner`."""
    with pytest.warns(UserWarning, match="4x6 are not square, so the group loses rot90; the feature inner needs"):
        assert Group.of(["rot90", "shift_x"]).for_size(4, 6).names == ("id", "shift_x")
    assert Group.of(["rot90", "shift_x", "rot180"]).for_size(4, 6).names == ("id", "shift_x", "rot180")


@pytest.mark.parametrize(
    ("action", "fault"),
    [
        (Action("double", lambda x: 2 * x, lambda x: x / 2), "changes the norm"),
        (Action("fake", lambda x: x.flip(-1), lambda x: x.flip(-2)), "inverse does not undo"),
        (Action("bent", lambda x: x.sign() * x.abs().sort(-1).values, lambda x: x), "inverse does not undo"),
        (Action("offset", lambda x: x + 1, lambda x: x - 1), "changes the norm"),
        (Action("largest first", _flip_if_dark := lambda x: x if x.sum() > 0 else -x, _flip_if_dark), "undo|linear"),
        (Action("crop", lambda x: x[..., :4], lambda x: x), "inverse does not undo"),
        (Action("turn", lambda x: x.transpose(-1, -2), lambda x: x.transpose(-1, -2)), "square_only"),
    ],
    ids=lambda value: value.name if isinstance(value, Action) else "",
)
def test_what_is_not_an_orthogonal_action_is_refused(action: Action, fault: str) -> None:
    with pytest.raises(OptionError, match=fault):
        Group.of([action])


@pytest.mark.parametrize("name", ["paper", "d4", "sign", "shift(2,-1)"])
def test_a_group_can_be_sent_to_another_process(name: str) -> None:
    group, x = Group.of(name), torch.arange(32.0).reshape(2, 4, 4)
    for action, copy in zip(group, pickle.loads(pickle.dumps(group)), strict=True):
        assert action.name == copy.name
        torch.testing.assert_close(copy.apply(x), action.apply(x))
        torch.testing.assert_close(copy.inverse(copy.apply(x)), x)


def test_a_users_own_action_joins_a_group() -> None:
    """Minus the mirror image: orthogonal, its own inverse."""
    negative = Action("negative mirror", lambda x: -x.flip(-1), lambda x: -x.flip(-1))
    assert Group.of(["flip_y", negative]).names == ("id", "flip_y", "negative mirror")


def test_a_registered_action_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_ACTIONS", dict(groups._ACTIONS))
    swap = register_action(Action("swap halves", lambda x: x.roll(4, -1), lambda x: x.roll(-4, -1)))
    assert find_action("swap halves") is swap
    assert "swap halves" in sorted(groups._ACTIONS)
    with pytest.raises(OptionError, match="exists already"):
        register_action(Action("swap halves", lambda x: x, lambda x: x))
    with pytest.raises(OptionError, match="changes the norm"):
        register_action(Action("half", lambda x: x / 2, lambda x: 2 * x))


@pytest.mark.parametrize("name", ["flip_x", "id", "shift(1,1)"])
def test_a_users_action_cannot_take_a_name_that_means_another(name: str) -> None:
    """A saved detector finds its elements by name, so a name must mean one action."""
    with pytest.raises(OptionError, match="exists already"):
        Group.of(["flip_y", Action(name, lambda x: -x, lambda x: -x)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("papre", "did you mean 'paper'"),
        (["flipx"], "did you mean 'flip_x'"),
        ("id", "other than the identity"),
        ([], "other than the identity"),
        (["neg", "neg"], "given twice"),
        (["shift(1)"], "unknown group element"),
    ],
)
def test_groups_that_cannot_be_read(given: object, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Group.of(given)  # type: ignore[arg-type]


def test_a_group_made_by_hand_must_begin_with_the_identity() -> None:
    flip = find_action("flip_x")
    assert len(Group((IDENTITY, flip)).moving) == 1
    with pytest.raises(OptionError, match=r"Group\.of"):
        Group((flip, IDENTITY))


@pytest.mark.parametrize("name", DESTINATION)
def test_an_action_is_on_the_last_two_axes_whatever_is_in_front(name: str) -> None:
    x = torch.arange(2 * 3 * 16.0).reshape(2, 3, 4, 4)
    for transform in (find_action(name).apply, find_action(name).inverse):
        moved = transform(x)
        assert torch.equal(transform(x[0, 0]), moved[0, 0])
        assert torch.equal(transform(x[0]), moved[0])
        assert torch.equal(transform(x[None]), moved[None])


def _quarter(x: torch.Tensor) -> torch.Tensor:
    return x.rot90(1, (-2, -1))


def _quarter_back(x: torch.Tensor) -> torch.Tensor:
    return x.rot90(-1, (-2, -1))


def test_an_action_of_ones_own_that_swaps_the_sides_is_accepted_where_it_says_so() -> None:
    own = Action("own quarter", _quarter, _quarter_back, square_only=True)
    assert Group.of([own]).names == ("id", "own quarter")
    with pytest.raises(OptionError, match="no element of this group acts on 4x6"):
        Group.of([own]).for_size(4, 6)


def test_an_action_of_ones_own_is_pickled_with_all_that_it_is_and_a_known_one_by_name() -> None:
    for square_only in (True, False):
        own = Action("own quarter", _quarter, _quarter_back, square_only)
        assert pickle.loads(pickle.dumps(own)) == own
    for name in ("flip_x", "rot90"):
        assert pickle.loads(pickle.dumps(find_action(name))) is find_action(name)
    for name in ("shift(3,-2)", "rotate(30)", "rotate(-180..180)#2", "0.5*rot90", "hue(120)", "gamma(0.8)"):
        assert pickle.loads(pickle.dumps(find_action(name))) == find_action(name)


def test_an_action_that_depends_on_the_image_is_not_linear() -> None:
    """It mirrors images with a large value: its own inverse, norm kept, and x + 2 y is larger than x and y."""

    def mirror_if_bright(x: torch.Tensor) -> torch.Tensor:
        return x.flip(-1) if x.abs().max() > 5.0 else x

    with pytest.raises(OptionError, match="'fickle' is not an orthogonal action: it is not linear"):
        Group.of([Action("fickle", mirror_if_bright, mirror_if_bright)])


def test_on_finer_pixels_shifts_are_longer_and_other_actions_the_same() -> None:
    """A shift of one cell of a latent is one of `factor` pixels."""
    x = torch.arange(64.0).reshape(8, 8)
    longer = find_action("shift(1,-2)").on_pixels(3)
    assert longer.name == "shift(3,-6)"
    assert torch.equal(longer.apply(x), x.roll((-6, 3), (-2, -1)))
    assert torch.equal(longer.inverse(longer.apply(x)), x)
    assert find_action("shift_x").on_pixels(4).name == "shift(4,0)"
    for name in ("flip_x", "rot90", "transpose", "neg"):
        assert find_action(name).on_pixels(3) is find_action(name)


def test_a_group_of_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="begins with the identity"):
        Group(())


def test_a_group_is_a_group_as_it_is() -> None:
    group = Group.of("d4")
    assert Group.of(group) is group


def test_a_registered_action_may_be_registered_again_and_only_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_ACTIONS", dict(groups._ACTIONS))
    own = Action("own quarter", _quarter, _quarter_back, square_only=True)
    assert register_action(own) is register_action(own) is own
    assert pickle.loads(pickle.dumps(own)) is own


@pytest.mark.parametrize(
    ("name", "square_only"),
    [("id", False), ("rot90", True), ("rot180", False), ("rot270", True), ("transpose", True), ("shift_x", False)],
)
def test_what_swaps_the_sides_needs_square_images(name: str, square_only: bool) -> None:
    assert find_action(name).square_only is square_only


def test_an_action_that_fails_on_three_channels_is_refused_in_a_sentence() -> None:
    last = Action("last first", lambda x: x[..., [12, *range(12)], :, :], lambda x: x[..., [*range(1, 13), 0], :, :])
    with pytest.raises(OptionError, match="'last first' fails on 3x8x8 images: index 12"):
        register_action(last)
