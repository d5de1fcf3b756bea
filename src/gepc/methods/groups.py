"""Actions on images with their inverses, and the groups (finite sets of them) that GEPC averages over.

An action has a name, by which options and saved detectors refer to it. Those with numbers are `shift(dx,dy)`,
`rotate(degrees)`, `shear(slope)`, `scale(factor)`, `hue(degrees)`, `channels(matrix)`, `gain(factor)` and
`gamma(power)`; see `gepc.methods.operators`. A range `low..high` in place of a number means that the
number is drawn for every image, uniformly and as a function of its content, and `#1`, `#2`, ... tells the draws apart:
`rotate(-180..180)#1`. A weight in front, `0.5*rot90`, multiplies r_g^2.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import orthogonal_procrustes

from gepc.core.errors import OptionError, check_choice, check_names, nearest, raising
from gepc.methods.operators import FAMILIES, PIXELS, Operator, PixelMap

LARGEST = 1e6  # number in the name of an action
LARGEST_SIDE = 32  # of images whose pixels an action is learned on
Transform = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Action:
    """A transform P_g of tensors (..., H, W), with its inverse.

    Parameters
    ----------
    name : how options and saved detectors refer to it.
    apply : P_g.
    inverse : P_g^-1.
    square_only : whether it swaps height and width, and so needs square images.
    kind : `orthogonal`; `approximate` if P_g^-1 P_g is not exactly the identity; or `intensity` if it acts on the clean
        image alone, so that the noise and the network's answer stay as they are.
    on_layers : whether it acts alike on grids of any resolution, and so on the layers of a network.
    weight : what r_g^2 is multiplied by.

    See Also
    --------
    gepc.register_action : make an action known by its name.

    Examples
    --------
    >>> import gepc
    >>> mirror = gepc.Action("mirror", apply=lambda x: x.flip(-1), inverse=lambda x: x.flip(-1))
    >>> gepc.Group.of([mirror]).names
    ('id', 'mirror')
    """

    name: str
    apply: Transform
    inverse: Transform
    square_only: bool = False
    kind: str = "orthogonal"
    on_layers: bool = False
    weight: float = 1.0

    def on_pixels(self, factor: int) -> Action:
        """The same action on images with `factor` pixels per side of a cell: shifts are that many times longer."""
        if not isinstance(self.apply, Operator) or not FAMILIES[self.apply.family].in_pixels:
            return self
        longer = self.apply.times(factor)
        return replace(self._with(longer), name=longer.name)

    def drawn(self, seed: int, keys: Sequence[bytes]) -> Action:
        """The action on the images with these keys; differs from the action itself if its numbers are random."""
        if not isinstance(self.apply, Operator) or not self.apply.is_random:
            return self
        return self._with(self.apply.drawn(seed, keys, self.name.rpartition("*")[2]))

    def _with(self, operator: Operator) -> Action:
        return replace(self, apply=operator, inverse=replace(operator, inverted=True))

    def error(self, x: torch.Tensor) -> torch.Tensor:
        """P_g^-1 P_g x - x: what the operator itself changes, without a network."""
        return self.inverse(self.apply(x)) - x

    def transported(self, answer: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """P_g^-1 eps(P_g x_t), without what the operator itself changes in eps(x_t).

        For an equivariant network, eps(P_g x_t) = P_g eps(x_t), the result is eps(x_t) whatever the operator loses.

        Parameters
        ----------
        answer : eps(P_g x_t).
        here : eps(x_t).
        """
        if self.kind == "intensity":
            return answer
        back = self.inverse(answer)
        return back if self.kind == "orthogonal" else back - self.error(here)

    def __repr__(self) -> str:
        return f"Action({self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # by name, so that an unpickled action equals the registered one
        if _known(self.name) == self:
            return find_action, (self.name,)
        return Action, (self.name, self.apply, self.inverse, self.square_only, self.kind, self.on_layers, self.weight)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _antitransposed(x: torch.Tensor) -> torch.Tensor:
    return x.rot90(2, PIXELS).transpose(*PIXELS)


def _involution(name: str, transform: Transform, square_only: bool = False, on_layers: bool = True) -> Action:
    return Action(name, transform, transform, square_only, on_layers=on_layers)


def _rotation(name: str, turns: int) -> Action:
    apply, inverse = partial(torch.rot90, k=turns, dims=PIXELS), partial(torch.rot90, k=-turns, dims=PIXELS)
    return Action(name, apply, inverse, square_only=turns % 2 == 1, on_layers=True)


def _from_operator(operator: Operator, name: str | None = None) -> Action:
    family, inverse = FAMILIES[operator.family], replace(operator, inverted=True)
    return Action(name or operator.name, operator, inverse, kind=family.kind, on_layers=family.on_layers)


IDENTITY = _involution("id", _same, on_layers=False)

_ACTIONS: dict[str, Action] = {
    action.name: action
    for action in (
        IDENTITY,
        _involution("flip_x", partial(torch.flip, dims=(-1,))),
        _involution("flip_y", partial(torch.flip, dims=(-2,))),
        _rotation("rot90", 1),
        _rotation("rot180", 2),
        _rotation("rot270", 3),
        _from_operator(Operator("shift", (1.0, 0.0)), "shift_x"),
        _from_operator(Operator("shift", (0.0, 1.0)), "shift_y"),
        _involution("transpose", partial(torch.transpose, dim0=-2, dim1=-1), square_only=True),
        _involution("antitranspose", _antitransposed, square_only=True),
        _involution("neg", torch.neg, on_layers=False),
    )
}

_GROUPS: dict[str, tuple[str, ...]] = {
    "paper": ("id", "flip_x", "flip_y", "rot90", "rot180", "shift_x", "shift_y"),
    "c4": ("id", "rot90", "rot180", "rot270"),
    "d4": ("id", "rot90", "rot180", "rot270", "flip_x", "flip_y", "transpose", "antitranspose"),
    "flips": ("id", "flip_x", "flip_y", "rot180"),
    "shifts": ("id", "shift_x", "shift_y"),
    "colours": ("id", "hue(120)", "hue(240)"),
    "sign": ("id", "neg"),
}

_RANDOM = ("shift(-2..2,-2..2)#1", "rotate(-15..15)#1", "rotate(-180..180)#1")
_CANDIDATES = (*_GROUPS["paper"], *_RANDOM)  # what `auto` chooses from

_WITH_NUMBERS = re.compile(r"(\w+)\(([^()]*)\)(#\d+)?")


def register_action(action: Action) -> Action:
    """Register an action of your own, so that saved detectors find it by name. It must be orthogonal.

    Parameters
    ----------
    action : Action
        The action. Its name must not be in use.

    Returns
    -------
    The same action.

    Raises
    ------
    OptionError
        If the action is not linear, does not keep norms, is not undone by its inverse, or has a name that is in use.

    Examples
    --------
    >>> import gepc
    >>> gepc.register_action(gepc.Action("half", lambda x: x / 2, lambda x: 2 * x))
    Traceback (most recent call last):
        ...
    gepc.core.errors.OptionError: group element 'half' is not an orthogonal action: it changes the norm
    """
    _check(action)
    _ACTIONS[action.name] = action
    return action


def find_action(name: str) -> Action:
    """The action of that name; `shift(2,-1)` is a circular shift of 2 pixels right and 1 up.

    >>> find_action("rotate(30)"), find_action("rotate(-180..180)#1"), find_action("0.5*rot90").weight
    (Action('rotate(30)'), Action('rotate(-180..180)#1'), 0.5)
    """
    known = _known(name)
    if known is None:
        hint = nearest(name, [*_ACTIONS, "shift(dx,dy)", *(f"{family}(number)" for family in FAMILIES)])
        raise OptionError(f"unknown group element {name!r}; {hint}; register your own with gepc.register_action")
    return known


def _known(name: str) -> Action | None:
    weight, star, rest = name.strip().rpartition("*")
    match = _WITH_NUMBERS.fullmatch(rest)
    known = _with_numbers(match[1], match[2], match[3] or "") if match else _ACTIONS.get(rest)
    if known is None or not star:
        return known
    factor = _number(weight)
    if known is IDENTITY or not 0.0 < factor < math.inf:
        return None
    return replace(known, name=f"{factor:g}*{known.name}", weight=float(f"{factor:g}"))


def _with_numbers(family_name: str, text: str, draw: str) -> Action | None:
    """The action of a family with numbers or ranges; None if there is no such family or it has no such numbers."""
    family = FAMILIES.get(family_name)
    ends = [[_number(end) for end in part.split("..")] for part in text.split(",")]
    if family is None or not all(len(pair) in (1, 2) and all(abs(end) <= LARGEST for end in pair) for pair in ends):
        return None
    low, high = [min(pair) for pair in ends], [max(pair) for pair in ends]
    random = low != high
    if (
        random != bool(draw)
        or (random and family_name == "channels")
        or not (family.allows(low) and family.allows(high))
    ):
        return None
    numbers = [(a, b) if a < b else a for a, b in zip(low, high, strict=True)]
    operator = Operator(family_name, tuple(numbers))
    return _from_operator(operator, operator.name + draw)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _check(action: Action) -> None:
    """Refuse another action under a known name, which saved detectors may refer to, and one that is not orthogonal."""
    known = _known(action.name)
    if known is not None:
        if known != action:
            raise OptionError(f"an action named {action.name!r} exists already; choose another name")
        return
    side = action.apply.side if isinstance(action.apply, PixelMap) else 8
    x, y = torch.randn(2, 2, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with raising(OptionError, f"group element {action.name!r} fails on 3x{side}x{side} images: {{error}}", Exception):
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
    """A finite set of actions, the identity first. It need not be closed under composition: the paper's is not.

    `Group.of` makes a group from names, and adds the identity.

    Parameters
    ----------
    actions : tuple of Action
        The elements. The first one is the identity.
    auto : bool
        Whether fitting chooses some of the actions, and their weights, from in-distribution images.

    See Also
    --------
    gepc.Action : one element.

    Examples
    --------
    >>> Group.of("so2:samples=2").names
    ('id', 'rotate(-180..180)#1', 'rotate(-180..180)#2')
    """

    actions: tuple[Action, ...]
    auto: bool = False

    def __post_init__(self) -> None:
        if not self.actions or self.actions[0] != IDENTITY:
            raise OptionError("a group begins with the identity; Group.of puts it there")

    @classmethod
    def of(cls, group: Group | str | Iterable[str | Action]) -> Group:
        """Make a group from a predefined name, or from actions by name or as objects. The identity is added.

        Parameters
        ----------
        group : str or sequence of str and Action
            A name such as `paper`, `d4`, `flips`, `shifts` or `so2:samples=4`, or the elements.

        Returns
        -------
        Group

        Raises
        ------
        OptionError
            If a name is not known.

        Examples
        --------
        >>> Group.of(["rot90", "shift(2,-1)"]).names
        ('id', 'rot90', 'shift(2,-1)')
        """
        if isinstance(group, Group):
            return group
        if isinstance(group, str):
            name, _, options = group.partition(":")
            if group == "auto":
                return cls(cls.of(_CANDIDATES).actions, auto=True)
            if name in _CONTINUOUS:
                return _CONTINUOUS[name](**_read_options(name, options))
            if group not in _GROUPS and _known(group) is None:
                known = ["auto", *_GROUPS, *_CONTINUOUS, *_ACTIONS]
                raise OptionError(f"unknown group {group!r}; {nearest(group, known)}; give several elements as a list")
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

    @classmethod
    def so2(cls, samples: float = 4, max: float = 180) -> Group:  # noqa: A002
        """Make a group of rotations by angles that are drawn for every image, uniformly.

        In options: `so2`, `so2:samples=8`, `so2:samples=4,max=30`.

        Parameters
        ----------
        samples : int
            The number of rotations.
        max : float
            The largest angle either way, in degrees.

        Returns
        -------
        Group

        Raises
        ------
        OptionError
            If `samples` is not a whole number between 1 and 1000.

        Examples
        --------
        >>> Group.so2(samples=2, max=30).names
        ('id', 'rotate(-30..30)#1', 'rotate(-30..30)#2')
        """
        return cls._random(f"rotate({-max}..{max})", samples)

    @classmethod
    def translations(cls, max: float = 2, samples: float = 4) -> Group:  # noqa: A002
        """Make a group of shifts by fractions of a pixel that are drawn for every image, uniformly.

        In options: `translations`, `translations:max=2,samples=4`.

        Parameters
        ----------
        max : float
            The largest shift along x and y, in pixels.
        samples : int
            The number of shifts.

        Returns
        -------
        Group

        Raises
        ------
        OptionError
            If `samples` is not a whole number between 1 and 1000.

        Examples
        --------
        >>> Group.translations(max=2, samples=1).names
        ('id', 'shift(-2..2,-2..2)#1')
        """
        return cls._random(f"shift({-max}..{max},{-max}..{max})", samples)

    @classmethod
    def _random(cls, name: str, samples: float) -> Group:
        if samples not in range(1, 1001):
            raise OptionError(f"samples must be a whole number between 1 and 1000, got {samples:g}")
        return cls.of([f"{name}#{number}" for number in range(1, int(samples) + 1)])

    @classmethod
    def learned(cls, images: npt.ArrayLike, counterparts: npt.ArrayLike, on: str = "channels") -> Group:
        """Learn the orthogonal map that takes images to what you declare equivalent, such as another sensor's.

        The map solves the orthogonal Procrustes problem min_M sum |M x - y|^2 with M^T M = I. With `channels`, x and y
        are the vectors of all channels at each pixel. With `pixels` they are the vectors of all pixels of each channel.

        Parameters
        ----------
        images, counterparts : float arrays (N, C, H, W)
            Images in [-1, 1], pair by pair. Fewer vectors than they have entries do not determine the map: N H W is at
            least C for channels. For pixels N C is at least H W, and the images are square with a side of at most 32.
        on : {"channels", "pixels"}
            What the map mixes.

        Returns
        -------
        Group
            The identity and the learned action. The name of an action on channels contains its matrix. An action on
            pixels has a name from a hash of its matrix: register it with `gepc.register_action` before you load a
            detector that was saved with it.

        Raises
        ------
        OptionError
            If the arrays differ in shape, are not finite or have too few pairs, or if an action on pixels has images
            that are too large or not square.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc import Group
        >>> images = np.random.default_rng(0).uniform(-1.0, 1.0, (20, 3, 4, 4))
        >>> mirror = Group.learned(images, images[..., ::-1], on="pixels").moving[0]
        >>> bool(np.allclose(mirror.apply(images[0]), images[0, ..., ::-1]))
        True
        """
        check_choice("on", on, ("channels", "pixels"))
        x, y = (np.asarray(values, dtype=np.float64) for values in (images, counterparts))
        if x.ndim != 4 or x.shape != y.shape or not np.isfinite([x, y]).all():
            raise OptionError(f"give two arrays (N, C, H, W) of finite numbers and one shape, got {x.shape}, {y.shape}")
        if on == "channels":
            x, y = (np.moveaxis(values, 1, -1) for values in (x, y))
        elif x.shape[2] != x.shape[3] or x.shape[3] > LARGEST_SIDE:
            square = f"square images with a side of at most {LARGEST_SIDE}"
            raise OptionError(f"an action on pixels is learned from {square}; got {x.shape}")
        entries = x.shape[3] if on == "channels" else x.shape[3] ** 2
        if x.size < entries**2:
            raise OptionError(f"{x.size // entries} vectors of {entries} {on} do not determine a map; give more pairs")
        matrix, _ = orthogonal_procrustes(y.reshape(-1, entries), x.reshape(-1, entries))
        if on == "channels":
            return cls.of([f"channels({','.join(map(repr, matrix.ravel().tolist()))})"])
        name = f"pixels {hashlib.sha256(matrix.tobytes()).hexdigest()[:12]}"
        apply, inverse = PixelMap(torch.from_numpy(matrix)), PixelMap(torch.from_numpy(matrix.T.copy()))
        return cls((IDENTITY, Action(name, apply, inverse, square_only=True)))

    def for_size(self, height: int, width: int) -> Group:
        """Leave out the elements that need square images, if the images are not square.

        Parameters
        ----------
        height, width : int
            The size of the images.

        Returns
        -------
        Group

        Warns
        -----
        UserWarning
            If no flip, rotation or transposition is left of those in the group: there is then no feature of inner
            layers that compares elements.

        Raises
        ------
        OptionError
            If only the identity is left.

        Examples
        --------
        >>> Group.of("paper").for_size(32, 48).names
        ('id', 'flip_x', 'flip_y', 'rot180', 'shift_x', 'shift_y')
        """
        if height == width:
            return self
        kept = tuple(action for action in self.actions if not action.square_only)
        if len(kept) < 2:
            raise OptionError(f"no element of this group acts on {height}x{width} images; add flips, rot180 or shifts")
        lost = [action.name for action in self.actions if action.on_layers]
        if lost and not any(action.on_layers for action in kept):
            loses = f"images of {height}x{width} are not square, so the group loses {', '.join(lost)}"
            warnings.warn(f"{loses}; the feature inner needs a flip or a rotation: add flip_x or rot180", stacklevel=2)
        return Group(kept, self.auto)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the elements as a tuple of str, the identity first."""
        return tuple(action.name for action in self.actions)

    @property
    def moving(self) -> tuple[Action, ...]:
        """All elements but the identity, whose residual is zero and is never evaluated."""
        return self.actions[1:]

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)


_CONTINUOUS: dict[str, Callable[..., Group]] = {"so2": Group.so2, "translations": Group.translations}


def _read_options(name: str, text: str) -> dict[str, float]:
    """Read `samples=4,max=2`."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    check_names(f"group {name!r}", [key.strip() for key, _, _ in pairs], ("samples", "max"))
    with raising(OptionError, f"group {name!r} takes samples=NUMBER and max=NUMBER, got {text!r}", ValueError):
        return {key.strip(): float(value) for key, _, value in pairs}
