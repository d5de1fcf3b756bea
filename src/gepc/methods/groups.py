"""Orthogonal actions on images with their inverses, and the groups (finite sets of them) that GEPC averages over."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from gepc.core.errors import OptionError, nearest

Transform = Callable[[torch.Tensor], torch.Tensor]
PIXELS = (-2, -1)


@dataclass(frozen=True)
class Action:
    """P_g and P_g^-1 on (..., H, W) tensors.

    Parameters
    ----------
    name : how options and saved detectors refer to it.
    apply : P_g.
    inverse : P_g^-1.
    square_only : whether it swaps height and width, and so needs square images.
    """

    name: str
    apply: Transform
    inverse: Transform
    square_only: bool = False

    def on_pixels(self, factor: int) -> Action:
        """The same action on images with `factor` pixels per side of a cell: shifts are that many times longer."""
        if isinstance(self.apply, Shift):
            return shift(self.apply.dx * factor, self.apply.dy * factor)
        return self

    def __repr__(self) -> str:
        return f"Action({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # by name, so that an unpickled action equals the registered one
        if _known(self.name) == self:
            return find_action, (self.name,)
        return Action, (self.name, self.apply, self.inverse, self.square_only)


@dataclass(frozen=True)
class Shift:
    """A circular shift by `dx` pixels to the right and `dy` down."""

    dx: int
    dy: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The shifted image."""
        return torch.roll(x, (self.dy, self.dx), PIXELS)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _antitransposed(x: torch.Tensor) -> torch.Tensor:
    return x.rot90(2, PIXELS).transpose(*PIXELS)


def _involution(name: str, transform: Transform, square_only: bool = False) -> Action:
    return Action(name, transform, transform, square_only)


def _rotation(name: str, turns: int) -> Action:
    apply, inverse = partial(torch.rot90, k=turns, dims=PIXELS), partial(torch.rot90, k=-turns, dims=PIXELS)
    return Action(name, apply, inverse, square_only=turns % 2 == 1)


@cache
def shift(dx: int, dy: int, name: str | None = None) -> Action:
    """The action of a circular shift by `dx` pixels to the right and `dy` down."""
    return Action(name or f"shift({dx},{dy})", Shift(dx, dy), Shift(-dx, -dy))


IDENTITY = _involution("id", _same)

_ACTIONS: dict[str, Action] = {
    action.name: action
    for action in (
        IDENTITY,
        _involution("flip_x", partial(torch.flip, dims=(-1,))),
        _involution("flip_y", partial(torch.flip, dims=(-2,))),
        _rotation("rot90", 1),
        _rotation("rot180", 2),
        _rotation("rot270", 3),
        shift(1, 0, "shift_x"),
        shift(0, 1, "shift_y"),
        _involution("transpose", partial(torch.transpose, dim0=-2, dim1=-1), square_only=True),
        _involution("antitranspose", _antitransposed, square_only=True),
        _involution("neg", torch.neg),
    )
}

SQUARE_SYMMETRIES = ("flip_x", "flip_y", "rot90", "rot180", "rot270", "transpose", "antitranspose")
"""Elements that act alike on a grid of any resolution, and so on the layers of a network, unlike shifts by a pixel."""

_GROUPS: dict[str, tuple[str, ...]] = {
    "paper": ("id", "flip_x", "flip_y", "rot90", "rot180", "shift_x", "shift_y"),
    "c4": ("id", "rot90", "rot180", "rot270"),
    "d4": ("id", "rot90", "rot180", "rot270", "flip_x", "flip_y", "transpose", "antitranspose"),
    "flips": ("id", "flip_x", "flip_y", "rot180"),
    "shifts": ("id", "shift_x", "shift_y"),
    "sign": ("id", "neg"),
}

_SHIFT = re.compile(r"shift\(\s*(-?\d+)\s*,\s*(-?\d+)\s*\)")


def register_action(action: Action) -> Action:
    """Register an action of your own, so that saved detectors find it by name, and return it. It must be orthogonal.

    Parameters
    ----------
    action : the action; its name must not be in use.
    """
    _check(action)
    _ACTIONS[action.name] = action
    return action


def find_action(name: str) -> Action:
    """The action of that name; `shift(2,-1)` is a circular shift of 2 pixels right and 1 up."""
    known = _known(name)
    if known is None:
        hint = nearest(name, [*_ACTIONS, "shift(dx,dy)"])
        raise OptionError(f"unknown group element {name!r}; {hint}; register your own with gepc.register_action")
    return known


def _known(name: str) -> Action | None:
    match = _SHIFT.fullmatch(name.strip())
    return shift(int(match[1]), int(match[2])) if match else _ACTIONS.get(name)


def _check(action: Action) -> None:
    """Refuse another action under a known name, which saved detectors may refer to, and one that is not orthogonal."""
    known = _known(action.name)
    if known is not None:
        if known != action:
            raise OptionError(f"an action named {action.name!r} exists already; choose another name")
        return
    x, y = torch.randn(2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = action.apply(x)
    faults = {
        "its inverse does not undo it": moved.shape != x.shape or not torch.allclose(action.inverse(moved), x),
        "it changes the norm": not torch.isclose(moved.norm(), x.norm()),
        "it is not linear": not torch.allclose(action.apply(x + 2 * y), moved + 2 * action.apply(y)),
    }
    for fault, present in faults.items():
        if present:
            raise OptionError(f"group element {action.name!r} is not an orthogonal action: {fault}")
    wide = x[..., :4, :]
    if not action.square_only and action.apply(wide).shape != wide.shape:
        raise OptionError(f"group element {action.name!r} swaps height and width: declare it with square_only=True")


@dataclass(frozen=True)
class Group:
    """A finite set of actions, the identity first. It need not be closed under composition: the paper's is not."""

    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        if not self.actions or self.actions[0] != IDENTITY:
            raise OptionError("a group begins with the identity; Group.of puts it there")

    @classmethod
    def of(cls, group: Group | str | Iterable[str | Action]) -> Group:
        """A group from a predefined name (`paper`, `d4`), or from actions by name or as objects; adds the identity."""
        if isinstance(group, Group):
            return group
        if isinstance(group, str):
            if group not in _GROUPS and _known(group) is None:
                raise OptionError(f"unknown group {group!r}; {nearest(group, [*_GROUPS, *_ACTIONS])}")
            group = _GROUPS.get(group, (group,))
        actions = [item if isinstance(item, Action) else find_action(item) for item in group]
        for item in actions:
            _check(item)
        moving = [item for item in actions if item.name != "id"]
        if not moving:
            raise OptionError("a group needs at least one element other than the identity")
        names = [item.name for item in moving]
        if len(set(names)) != len(names):
            raise OptionError(f"a group element is given twice: {', '.join(names)}")
        return cls((IDENTITY, *moving))

    def for_size(self, height: int, width: int) -> Group:
        """The group on images of this size: without the elements that need square images if they are not square."""
        if height == width:
            return self
        kept = tuple(action for action in self.actions if not action.square_only)
        if len(kept) < 2:
            raise OptionError(f"no element of this group acts on {height}x{width} images; add flips, rot180 or shifts")
        return Group(kept)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the elements, identity first."""
        return tuple(action.name for action in self.actions)

    @property
    def moving(self) -> tuple[Action, ...]:
        """All elements but the identity, whose residual is zero and is never evaluated."""
        return self.actions[1:]

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)
