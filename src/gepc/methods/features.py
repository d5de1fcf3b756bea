"""The features of GEPC and GEPC+: each is one small function of the answers at one noise level.

With r_g = P_g^-1 s(P_g x_t) - s(x_t), the transported scores s_g = s + r_g, b = pool(s(x_t)^2), the denoising error
e = eps(x_t) - noise, known because we drew the noise, and the activations A of the network's inner layers:

    s         mean_g       pool(r_g^2) / b                        residual energy (the paper's default)
    residual  mean_g       pool(r_g^2)                            the paper's definition, not divided
    cos       mean_g       1 - <s_g, s> / (|s_g| |s|)             over channels and pixels together
    pair      mean_{g<g'}  pool((s_g - s_g')^2) / b               dispersion of the transported scores
    walk      mean_i       pool((s_{g_i} - s_{g_{i+1}})^2) / b    once around the group in its order, closed
    x0        mean_g       pool((x0_g - x0)^2) / pool(x0^2)       the same as s for x0 = (x_t - sigma eps)/sqrt(abar)
    b         pool(s^2)                                           score energy
    d         pool(e^2)                                           denoising error
    ax, ay    <e(p), e(p + 1 pixel)> / <e, e>                     autocorrelation of e along x and along y
    ad        the same on both diagonals;  ax2, ay2               the same at two pixels
    ac        <e_c, e_c'> / <e, e>                                the same between channels: is the error coloured?
    inner     mean_g       mean_p (A - P_g^-1 A_g)^2 / mean_p A^2 the same of inner layers, for each channel
    h         mean_p A and std_p A, for each channel              what the network sees in the image

and after the authors' code, with x_t' the estimate x0 under fresh noise of the same level, and v the log of the learned
variance; `var_raw` is the definition of that code, `var` is not:

    cycle     pool((x_t' - x_t)^2 / (x_t^2 + 1e-8))               does the image survive denoising and noising again?
    var       mean_g       |pool(v_g) - pool(v)|                  the same as s for the learned log-variance
    var_raw   mean_g       |pool(|u_g|) - pool(|u|)|              the same of the network's own variance channels u
    var_g     var_g        pool(r_g^2) / b                        variance over the group

The means include the identity, whose residual is zero and is never evaluated. In `inner` A are the activations for x_t
and A_g those for P_g x_t; the mean is over flips, rotations and transpositions without the identity.

A feature of your own is one function with the decorator `feature`; another package names the module in its entry
points (`gepc.features`). The same holds for the parts of a map, with the decorator `map_part`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from gepc.core.errors import OptionError, check_choice
from gepc.core.plugins import plugins
from gepc.methods.groups import Group
from gepc.methods.passes import ElementAnswers, LevelAnswers
from gepc.methods.pooling import activation_distance, channel_statistics, log_contrast, position_vectors

Array = npt.NDArray[np.float64]
Per = Literal["image", "element", "group"]
Compute = Callable[..., torch.Tensor | None]
Tensors = dict[str, torch.Tensor]
F_ = TypeVar("F_", bound=Compute)
# (down, right) in pixels between the positions that a whiteness feature compares
SHIFTS = {"ax": ((0, 1),), "ay": ((1, 0),), "ad": ((1, 1), (1, -1)), "ax2": ((0, 2),), "ay2": ((2, 0),)}
TINY = 1e-30  # an exactly equivariant network has residuals of 0: constant columns, which calibration reports


# --- from the values of a table to columns ---------------------------------------------------------------------------


def logarithm(values: Array) -> Array:
    """log of positive values, at least `TINY`."""
    return np.log(np.maximum(values, TINY))


def unchanged(values: Array) -> Array:
    """The values themselves."""
    return values


def nanmean(values: Array) -> Array:
    """Mean over the last axis of what was evaluated; NaN where nothing was."""
    seen = ~np.isnan(values)
    total = np.where(seen, values, 0.0).sum(axis=-1)
    count = seen.sum(axis=-1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def mean_over_group(values: Array) -> Array:
    """Mean over g of (N, levels, |G|), identity included; unbiased where a random subset was evaluated."""
    size = values.shape[2]
    return np.asarray(nanmean(values[:, :, 1:]) * ((size - 1) / size))


def variance_over_group(values: Array) -> Array:
    """Variance over g of (N, levels, |G|), identity included."""
    return nanmean((values - nanmean(values)[..., None]) ** 2)


def mean_over_elements(values: Array) -> Array:
    """Mean over the evaluated elements of (N, levels, elements, channels)."""
    return nanmean(np.moveaxis(values, 2, 3))


def mean_over_pairs(values: Array) -> Array:
    """Mean over pairs; unbiased for a random subset of elements, since pairs with the identity are averaged apart."""
    size = (1 + math.isqrt(1 + 8 * values.shape[2])) // 2  # |G| from the number of pairs
    with_identity, others = values[:, :, : size - 1], values[:, :, size - 1 :]
    if others.shape[2] == 0:
        return nanmean(with_identity)
    return np.asarray((2.0 * nanmean(with_identity) + (size - 2) * nanmean(others)) / size)


def logarithm_of_deviations(values: Array) -> Array:
    """Means as they are, and standard deviations, which are positive with a long tail, in logarithms."""
    means, deviations = np.split(values, 2, axis=2)
    return np.concatenate([means, logarithm(deviations)], axis=2)


# --- what a feature is -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """A function of the answers at one noise level, with what it needs and how its values become columns.

    Parameters
    ----------
    name : the name in the option `features`, in tables and in columns.
    per : `image` calls compute(level), which returns (n,) or (n, k); `element` calls compute(level, g) for one group
        element after another, which returns (n_g,) or (n_g, k) for the images `g.rows`; `group` calls
        compute(level, scores) with all transported answers (|G|, n, C, H, W), the identity's first and NaN where an
        image was not evaluated, which returns (n, k).
    compute : the formula. It returns None where the backbone does not have the feature.
    average : from table values (N, levels, ...) to one number, or one per channel: the paper's average over g.
    transform : from averages, or values of single elements, to columns that a calibrator can model.
    layers : whether the feature reads the activations of inner layers. Its columns are calibrated apart from those of
        the network's output. If it compares group elements, it does so for flips, rotations and transpositions.
    log_variance : whether the feature reads the log-variance of the reverse step.
    fresh_noise : whether the feature reads a second draw of noise.
    looks_at : what a change of the feature means, in plain words; see `gepc.Detector.explain`.
    weight : the share of the false-alarm rate that this view of the image gets, relative to others.
    least_elements : the smallest random subset of the group that the feature can be computed from; None: all of it.
    joint : whether a feature per element has columns of all elements together alone.
    """

    name: str
    per: Per
    compute: Compute
    average: Callable[[Array], Array]
    transform: Callable[[Array], Array] = logarithm
    layers: bool = False
    log_variance: bool = False
    fresh_noise: bool = False
    least_elements: int | None = 1
    looks_at: str = "texture and noise"
    weight: float = 1.0
    joint: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values in the table: inner layers have many channels, which are kept in float32."""
        return torch.float32 if self.layers else torch.float64

    @property
    def by_element(self) -> bool:
        """Whether the table has one number for every group element, the identity first."""
        return self.per == "element" and not self.layers and not self.joint

    def elements(self, group: Group) -> tuple[str, ...]:
        """Names of the group elements along the table's third axis, for a feature that is computed per element."""
        return tuple(action.name for action in group if action.on_layers) if self.layers else group.names

    def columns(self, values: Array, each: bool, transformed: bool) -> Array:
        """Columns (N, levels, columns) from the table's values.

        Parameters
        ----------
        values : (N, levels, ...).
        each : whether a feature per element has a column for every element other than the identity, or one for all.
        transformed : whether to apply `transform`; features of inner layers are always transformed.
        """
        columns = values[:, :, 1:] if each and self.by_element else self.average(values)
        if columns.ndim == 2:
            columns = columns[:, :, None]
        return self.transform(columns) if transformed or self.layers else columns


@dataclass(frozen=True)
class MapPart:
    """A field over the image at one noise level; fields of group elements are averaged over g.

    Parameters are as for a `Feature`, and `compute` returns (n, H, W), or vectors of each position of a grid,
    (n, C, h, w).
    """

    name: str
    per: Per
    compute: Compute
    layers: bool = False


_FEATURES: dict[str, Feature] = {}
MAP_PARTS: dict[str, MapPart] = {}


def feature(name: str, per: Per = "image", **declared: Any) -> Callable[[F_], F_]:
    """Function decorator: register a feature.

    Parameters
    ----------
    name, per : as in `Feature`.
    **declared : the other fields of `Feature`. `average` is by default the mean over the group for a feature per
        element, and nothing for a feature per image. `looks_at` is by default the orientation for a feature that
        compares group elements, and texture and noise for a feature per image.

    Returns
    -------
    A function that takes the formula, registers the feature and returns the formula.

    Raises
    ------
    OptionError
        If there is a feature of that name.

    Examples
    --------
    The page on the architecture has a complete feature. A name is given once:

    >>> from gepc.methods.features import feature, find_feature
    >>> denoising_error = find_feature("d")  # a function with the decorator @feature("d")
    >>> feature("d")(denoising_error.compute)
    Traceback (most recent call last):
        ...
    gepc.core.errors.OptionError: a feature named 'd' exists already
    """

    def add(compute: F_) -> F_:
        if name in _FEATURES:
            raise OptionError(f"a feature named {name!r} exists already")
        declared.setdefault("average", mean_over_group if per == "element" else unchanged)
        declared.setdefault("looks_at", "texture and noise" if per == "image" else "orientation")
        _FEATURES[name] = Feature(name, per, compute, **declared)
        return compute

    return add


def map_part(name: str, per: Per = "image", layers: bool = False) -> Callable[[F_], F_]:
    """Function decorator: register a part of a map. The parameters are those of `MapPart`."""

    def add(compute: F_) -> F_:
        MAP_PARTS[name] = MapPart(name, per, compute, layers)
        return compute

    return add


def features() -> dict[str, Feature]:
    """Every registered feature by name, with those of other packages."""
    plugins("gepc.features")
    return dict(_FEATURES)


def find_feature(name: str) -> Feature:
    """The feature of that name; other packages are asked only if it is not one of this module.

    >>> find_feature("s").per, find_feature("ax").transform is unchanged
    ('element', True)
    """
    if name not in _FEATURES:
        check_choice("feature", name, features())
    return _FEATURES[name]


# --- one number per image --------------------------------------------------------------------------------------------


@feature("b")
def score_energy(level: LevelAnswers) -> torch.Tensor:
    """b = pool(s^2) = pool(eps^2)/sigma^2."""
    return level.energy.double() / (1.0 - level.abar)


@feature("d")
def denoising_error(level: LevelAnswers) -> torch.Tensor:
    """pool(e^2): how much of the noise does the network miss?"""
    return level.pooling(level.error.square())


@map_part("error")
def error_map(level: LevelAnswers) -> torch.Tensor:
    """mean_c e^2 / b."""
    return level.error.square().mean(1) / level.energy[:, None, None]


def whiteness(level: LevelAnswers, shifts: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The mean over `shifts` of <e(p), e(p + shift)> / <e, e>."""
    return autocorrelation(level.error, shifts)


for _name, _shifts in SHIFTS.items():
    feature(_name, transform=unchanged)(partial(whiteness, shifts=_shifts))


@feature("ac", transform=unchanged, looks_at="colour")
def channel_whiteness(level: LevelAnswers) -> torch.Tensor | None:
    """<e_c, e_c'> / <e, e> over pairs of channels; a network of one channel does not have it."""
    return channel_correlation(level.error) if level.error.shape[1] > 1 else None


@feature("cycle", fresh_noise=True)
def renoised(level: LevelAnswers) -> torch.Tensor:
    """pool((x_t' - x_t)^2/(x_t^2 + 1e-8)); x_t' - x_t = sigma (fresh noise - eps)."""
    assert level.fresh_noise is not None
    change = (1.0 - level.abar) * (level.fresh_noise - level.eps).square()
    return level.pooling(change / (level.x_t.square() + 1e-8))


@feature("h", transform=logarithm_of_deviations, layers=True)
def activation_statistics(level: LevelAnswers) -> torch.Tensor | None:
    """mean_p A and std_p A of every channel, (n, 2 C)."""
    return channel_statistics(level.activations) if level.activations else None


@map_part("activations", layers=True)
def activation_vectors(level: LevelAnswers) -> torch.Tensor | None:
    """The activations at every position of a grid, (n, C, h, w), for a model of usual ones."""
    return position_vectors(level.grids, level.size) if level.grids else None


@map_part("target", layers=True)
def target_map(level: LevelAnswers) -> torch.Tensor:
    """The squared log-contrast of the image, plus d^2/C of the activations in the first half of the layers."""
    contrast = log_contrast(level.images.float().mean(1), level.pooling.window).square()
    if not level.grids:
        return contrast
    first_half = dict(list(level.grids.items())[: (len(level.grids) + 1) // 2])
    return contrast + activation_distance(first_half, level.size)


# --- one number per image and group element --------------------------------------------------------------------------


@feature("s", per="element")
def relative_residual(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
    """pool(r_g^2) / b, the paper's default; sigma cancels."""
    return level.pooling.pixels(g.gap) / level.energy[g.rows]


feature("var_g", per="element", average=variance_over_group)(relative_residual)


@map_part("residual", per="element")
def residual_map(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
    """mean_c r_g^2 / b."""
    return g.gap / level.energy[g.rows, None, None]


@feature("residual", per="element")
def residual_energy(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
    """pool(r_g^2) = pool((eps_g - eps)^2)/sigma^2: Definition 4.1 of the paper, not divided by b."""
    return level.pooling.pixels(g.gap) / (1.0 - level.abar)


@feature("cos", per="element")
def angle(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
    """1 - <s_g, s> / (|s_g| |s|)."""
    a, b = g.eps.flatten(1), level.eps[g.rows].flatten(1)
    norms = (a.square().sum(1) * b.square().sum(1)).sqrt()
    return 1.0 - (a * b).sum(1) / norms.clamp_min(TINY)


@feature("x0", per="element")
def estimate_residual(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
    """pool((x0_g - x0)^2) / pool(x0^2), where x0_g - x0 = -(sigma/sqrt(abar)) (eps_g - eps)."""
    pooled = level.pooling.pixels(g.gap) * ((1.0 - level.abar) / level.abar)
    return pooled / level.estimate_energy[g.rows]


@feature("var", per="element", log_variance=True)
def variance_residual(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
    """|pool(v_g) - pool(v)|, v the log-variance of the reverse step."""
    assert level.log_variance is not None
    assert g.log_variance is not None
    here, moved = level.pooling(level.log_variance[g.rows]), level.pooling(g.log_variance)
    return (moved.double() - here.double()).abs()


@feature("var_raw", per="element", log_variance=True)
def raw_variance_residual(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
    """|pool(|u_g|) - pool(|u|)|, u the network's channels in v = (1 + u)/2 ln beta + (1 - u)/2 ln btilde."""
    assert level.log_variance is not None
    assert g.log_variance is not None
    large, small = level.log_range
    fields = (level.log_variance[g.rows], g.log_variance)
    here, moved = (level.pooling((2.0 * (v.double() - small) / (large - small) - 1.0).abs()) for v in fields)
    return (moved - here).abs()


@feature("inner", per="element", average=mean_over_elements, layers=True)
def inner_residual(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor | None:
    """mean_p (A - P_g^-1 A_g)^2 / mean_p A^2 for every channel, (n_g, C)."""
    ratios = [gap.mean((2, 3)) / energy for gap, energy in _layer_gaps(level, g)]
    return torch.cat(ratios, 1) if ratios else None


@map_part("inner", per="element", layers=True)
def inner_map(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor | None:
    """(A - P_g^-1 A_g)^2 / mean_p A^2 at the size of the image, averaged over channels and over layers."""
    fields = []
    for gap, energy in _layer_gaps(level, g):
        ratio = (gap / energy[:, :, None, None]).mean(1, keepdim=True)
        fields.append(interpolate(ratio, level.size, mode="bilinear")[:, 0])
    return torch.stack(fields).mean(0) if fields else None


def _layer_gaps(level: LevelAnswers, g: ElementAnswers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(A - P_g^-1 A_g)^2 (n_g, C, h, w) and mean_p A^2 (n_g, C) of every layer that the element acts on."""
    if not g.action.on_layers:
        return
    for name, activations in level.grids.items():
        here = activations if len(g.rows) == len(activations) else activations[g.rows]
        gap = (here - g.action.inverse(g.activations[name])).float().square_()
        yield gap, here.float().square().mean((2, 3)).clamp_min(TINY)


# --- comparisons of transported scores with each other ---------------------------------------------------------------


@feature("pair", per="group", average=mean_over_pairs, least_elements=2)
def dispersion(level: LevelAnswers, scores: torch.Tensor) -> torch.Tensor:
    """pool((s_g - s_g')^2) / b for all pairs g < g', those with the identity first."""
    return _between(level, scores, combinations(range(len(scores)), 2))


@feature("walk", per="group", average=nanmean, least_elements=None)
def walk(level: LevelAnswers, scores: torch.Tensor) -> torch.Tensor:
    """pool((s_{g_i} - s_{g_{i+1}})^2) / b, once around the group in its order, closed."""
    size = len(scores)
    return _between(level, scores, [(i, (i + 1) % size) for i in range(size)])


def _between(level: LevelAnswers, scores: torch.Tensor, pairs: Iterable[tuple[int, int]]) -> torch.Tensor:
    gaps = [level.pooling((scores[i] - scores[j]).square()) / level.energy for i, j in pairs]
    return torch.stack(gaps, 1)


# --- all features of one level ---------------------------------------------------------------------------------------


def compute_row(
    wanted: Sequence[Feature],
    map_parts: Sequence[MapPart],
    group: Group,
    level: LevelAnswers,
    answers: Iterable[ElementAnswers],
) -> tuple[Tensors, Tensors]:
    """The features, and the parts of the map, of the images at one noise level.

    The answers for group elements are read one after another and not kept. Only features of the whole group (`pair`,
    `walk`) keep the transported answers, without the activations.

    Parameters
    ----------
    wanted : the features.
    map_parts : the parts of the map.
    group : the group that acts on images of this size.
    level : the answers for x_t.
    answers : the answers for P_g x_t; empty if no feature compares group elements.

    Returns
    -------
    Values by feature, (n, ...), float32 for features of inner layers and float64 for others, NaN for elements that were
    not evaluated; fields by part of the map, float32. What the backbone does not have is left out.
    """
    row = _present({kind.name: kind.compute(level) for kind in wanted if kind.per == "image"})
    fields = _present({part.name: part.compute(level) for part in map_parts if part.per == "image"})
    of_group = [kind for kind in wanted if kind.per == "group"]
    scores = level.eps.new_full((len(group), *level.eps.shape), torch.nan) if of_group else None
    sums: Tensors = {}
    evaluated = 0
    for g in answers:
        evaluated += len(g.rows)
        for kind in wanted:
            if kind.per == "element":
                _add_values(row, kind, group, level, g)
        for part in map_parts:
            field = part.compute(level, g) if part.per == "element" else None
            if field is not None:
                if part.name not in sums:
                    sums[part.name] = field.new_zeros((len(level.eps), *level.size))
                sums[part.name][g.rows] += field
        if scores is not None:
            scores[group.names.index(g.action.name), g.rows] = g.eps
    if scores is not None:
        scores[0] = level.eps
        row |= _present({kind.name: kind.compute(level, scores) for kind in of_group})
    if sums:  # means over g, identity included; a random subset of elements is scaled up to the group
        share = (len(group) - 1) / len(group) / (evaluated / len(level.eps))
        fields |= {name: total * share for name, total in sums.items()}
    dtypes = {kind.name: kind.dtype for kind in wanted}
    row = {name: values.to(dtypes[name]) for name, values in row.items()}
    return row, {name: field.float() for name, field in fields.items()}


def _present(values: Mapping[str, torch.Tensor | None]) -> Tensors:
    return {name: value for name, value in values.items() if value is not None}


def _add_values(row: Tensors, kind: Feature, group: Group, level: LevelAnswers, g: ElementAnswers) -> None:
    """Write a feature under g into its table (n, elements, ...), which begins with 0 for the identity and NaN else."""
    names = kind.elements(group)
    values = kind.compute(level, g) if g.action.name in names else None
    if values is None:
        return
    if kind.name not in row:
        row[kind.name] = values.new_full((len(level.eps), len(names), *values.shape[1:]), torch.nan, dtype=kind.dtype)
        if names[0] == "id":
            row[kind.name][:, 0] = 0.0
    row[kind.name][g.rows, names.index(g.action.name)] = values.to(kind.dtype)


# --- correlations of the denoising error -----------------------------------------------------------------------------


def autocorrelation(field: torch.Tensor, shifts: Sequence[tuple[int, int]]) -> torch.Tensor:
    """mean f(p) f(p + shift) / mean f^2 over pixels and shifts, without wrap-around; 0 if a shift exceeds the image.

    Parameters
    ----------
    field : (N, C, H, W).
    shifts : (down, right) in pixels.

    Returns
    -------
    (N,) float64.
    """
    power = field.square().flatten(1).mean(1, dtype=torch.float64).clamp_min(1e-30)
    total = power.new_zeros(len(field))
    for down, right in shifts:
        height, width = field.shape[-2] - down, field.shape[-1] - abs(right)
        if height < 1 or width < 1:
            continue
        left = max(0, -right)
        here = field[..., :height, left : left + width]
        there = field[..., down : down + height, left + right : left + right + width]
        total += (here * there).flatten(1).mean(1, dtype=power.dtype) / power
    return total / len(shifts)


def channel_correlation(field: torch.Tensor) -> torch.Tensor:
    """mean f_c f_c' / mean f^2 over pixels and pairs of channels c != c': ((sum_c f_c)^2/sum_c f_c^2 - 1)/(C - 1)."""
    power = field.square().flatten(1).sum(1, dtype=torch.float64).clamp_min(1e-30)
    together = field.sum(1).square().flatten(1).sum(1, dtype=torch.float64)
    return (together / power - 1.0) / (field.shape[1] - 1)
