"""Extractors turn images into a table of features. Only they call the network, and they keep no state."""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import InputError, OptionError, check_choice
from gepc.core.options import check_fields
from gepc.core.parts import Part
from gepc.core.plugins import plugins
from gepc.images import batches, noise
from gepc.methods.groups import Action, Group
from gepc.methods.presets import Presets

Table = dict[str, npt.NDArray[np.float64]]
Features = Mapping[str, torch.Tensor]
Columns = npt.NDArray[np.float64]
Maps = npt.NDArray[np.float32]
MapParts = dict[str, Maps]
"""Parts of a map by name: fields (N, levels, H, W), or vectors of each position of a grid, (N, levels, C, h, w)."""


@dataclass(frozen=True)
class MapModel:
    """How the maps of a method are compared with those of in-distribution images; see `gepc.maps.statistics`.

    Parameters
    ----------
    positions : the calibrator of the activations at single positions, for maps that have such a part.
    centred : whether a pixel is compared with the median of its own image first, which finds small defects in images
        that differ as a whole, but hides defects that fill an image.
    share : the share of the highest values whose mean is the score of an image by its map.
    window : odd side of the box filter; less on small images, at most an eighth of their shorter side.
    band : the width in pixels of the bands along the border that have statistics of their own, because padding disturbs
        a network there.
    images : the largest number of images that maps are learnt from.
    learnt : the share of these that the model of positions is learnt from; the others are for means and standard
        deviations.
    leading : the parts that make up the whole, for maps that have one of them; for others, all parts do.
    one_sided : the parts of which only large values make an image unusual as a whole. Such is the distance to a memory:
        copies of fitted images have none.
    """

    positions: str = "level_pca:rank=64"
    centred: bool = True
    share: float = 0.003
    window: int = 9
    band: int = 1
    images: int = 64
    learnt: float = 0.5
    leading: tuple[str, ...] = ("error", "activations")
    one_sided: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cost:
    """Passes per image.

    Parameters
    ----------
    forward : int
        F, forward evaluations of the network.
    jvp : int
        J, Jacobian-vector and vector-Jacobian products.
    encoder : int
        E, evaluations of the encoder of a latent backbone.

    Examples
    --------
    >>> from gepc.methods.base import Cost
    >>> str(Cost(forward=2)), str(Cost(forward=2, encoder=1))
    ('2F+0J', '2F+0J+1E')
    """

    forward: int = 0
    jvp: int = 0
    encoder: int = 0

    def __str__(self) -> str:
        return f"{self.forward}F+{self.jvp}J" + (f"+{self.encoder}E" if self.encoder else "")


@dataclass
class Batch:
    """Images, with the keys that their noise is drawn from.

    Parameters
    ----------
    images : float32 array (N, C, H, W)
        Preprocessed images in [-1, 1].
    keys : sequence of bytes
        One key per image, from its content; see `gepc.images.noise.image_key`.
    seed : int
        The noise of an image is a function of this number, its key, the timestep and the draw.
    rows : int
        The largest number of images to pass to the network at once.
    fixed_noise : mapping (timestep, draw) -> array (N, C, H, W), optional
        Noise to take instead of drawing it.
    pixels : float32 array (N, C', H', W'), optional
        The images, where `images` are their latents.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.methods.base import Batch
    >>> backbone = GaussianBackbone(0.0, 0.1, (1, 8, 8))
    >>> batch = Batch(np.zeros((2, 1, 8, 8), dtype=np.float32), [b"first", b"second"])
    >>> x_t, noise = batch.noised(backbone, 10)
    >>> tuple(x_t.shape), len(batch)
    ((2, 1, 8, 8), 2)
    """

    images: npt.NDArray[np.float32]
    keys: Sequence[bytes]
    seed: int = 0
    rows: int = 64
    fixed_noise: Mapping[tuple[int, int], npt.NDArray[Any]] | None = None
    pixels: npt.NDArray[np.float32] | None = None
    _latents: Batch | None = field(default=None, repr=False, compare=False)
    _moved: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W)."""
        return self.images.shape[2], self.images.shape[3]

    def encoded(self, backbone: Backbone) -> Batch:
        """Return the batch that the network sees: with an encoder its latents, encoded once, with the same keys."""
        if backbone.encoder is None or self.pixels is not None:
            return self
        if self._latents is None:
            latents = backbone.encode(self.clean(backbone)).cpu().numpy()
            self._latents = Batch(latents, self.keys, self.seed, self.rows, self.fixed_noise, self.images)
        return self._latents

    def moved(self, backbone: Backbone, action: Action) -> torch.Tensor:
        """encode(P_g x), the latents of the images moved by an action on their pixels; encoded once."""
        if action.name not in self._moved:
            assert self.pixels is not None
            pixels = action.on_pixels(backbone.factor).apply(to_tensor(self.pixels, backbone))
            self._moved[action.name] = backbone.encode(pixels.contiguous())
        return self._moved[action.name]

    def clean(self, backbone: Backbone) -> torch.Tensor:
        """Return x_0 on the backbone's device and in its precision.

        Parameters
        ----------
        backbone : Backbone
            The network.

        Returns
        -------
        torch.Tensor (N, C, H, W)

        See Also
        --------
        noised : the same images with noise.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> from gepc.methods.base import Batch
        >>> batch = Batch(np.zeros((2, 1, 8, 8), dtype=np.float32), [b"first", b"second"])
        >>> batch.clean(GaussianBackbone(0.0, 0.1, (1, 8, 8))).dtype  # a Gaussian computes in double precision
        torch.float64
        """
        return to_tensor(self.images, backbone)

    def scaled(self, backbone: Backbone, t: int) -> torch.Tensor:
        """sqrt(abar_t) x_0: the noised image without its noise."""
        root: float = float(backbone.alphas_cumprod[t]) ** 0.5
        return self.clean(backbone) * root

    def noise(self, backbone: Backbone, t: int, draw: int = 0) -> torch.Tensor:
        """Draw the noise of every image at timestep `t`, a function of its key, the seed and the draw.

        Parameters
        ----------
        backbone : Backbone
            The network.
        t : int
            The timestep.
        draw : int
            The number of the draw.

        Returns
        -------
        torch.Tensor (N, C, H, W)

        Raises
        ------
        InputError
            If `fixed_noise` was given without this timestep and draw, or in another shape.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> from gepc.methods.base import Batch
        >>> batch = Batch(np.zeros((2, 1, 8, 8), dtype=np.float32), [b"one", b"one"])  # two images of equal content
        >>> first, second = batch.noise(GaussianBackbone(0.0, 0.1, (1, 8, 8)), 10)
        >>> bool((first == second).all())
        True
        """
        if self.fixed_noise is None:
            return to_tensor(noise.normal(self.seed, self.keys, self.images.shape[1:], t, draw), backbone)
        if (t, draw) not in self.fixed_noise:
            raise InputError(f"no noise is given for timestep {t}, draw {draw}; give it, or use fewer draws")
        given = np.asarray(self.fixed_noise[t, draw])
        if given.shape != self.images.shape:
            raise InputError(f"noise of shape {given.shape} does not fit images of shape {self.images.shape}")
        return to_tensor(given, backbone)

    def noised(self, backbone: Backbone, t: int, draw: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Add noise to the images: x_t = sqrt(abar_t) x_0 + sigma_t noise.

        Parameters
        ----------
        backbone, t, draw : as in `noise`.

        Returns
        -------
        The noisy images x_t and the noise, torch.Tensor (N, C, H, W) each.

        Raises
        ------
        InputError
            As in `noise`.

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.analytic import GaussianBackbone
        >>> from gepc.methods.base import Batch
        >>> backbone = GaussianBackbone(0.0, 0.1, (1, 8, 8))
        >>> batch = Batch(np.zeros((2, 1, 8, 8), dtype=np.float32), [b"first", b"second"])
        >>> x_t, noise = batch.noised(backbone, 10)  # of black images there is only the noise
        >>> bool(np.allclose(x_t, backbone.sigma(x_t, 10) * noise))
        True
        """
        field = self.noise(backbone, t, draw)
        return noised(self.clean(backbone), field, float(backbone.alphas_cumprod[t])), field


def noised(x0: torch.Tensor, noise: torch.Tensor, abar: float) -> torch.Tensor:
    """sqrt(abar) x_0 + sqrt(1 - abar) noise."""
    scaled: torch.Tensor = x0 * abar**0.5 + noise * (1.0 - abar) ** 0.5
    return scaled


class Extractor(ABC):
    """Base class of detection methods, which compute a table of features from images.

    A method is a frozen dataclass whose fields are its parameters.
    `at_least` and `one_of` of `gepc.core.options` declare which values a parameter may have. Levels, groups and tuples
    may be given in any form that `Levels.of`, `Group.of` and `tuple` read; a single word is a tuple of one.

    A method implements `timesteps`, `cost` and `extract`; `PerLevel` and `WholeImage` leave less to implement. All else
    has defaults. A method with maps is a `HasMaps`, one whose table follows from those of other methods a `Derived`.
    The functions `extract_table`, `extract_map_parts` and `cost_of` include the encoder of a latent backbone.

    See Also
    --------
    PerLevel : features at each noise level.
    WholeImage : features of the whole image.
    Derived : features that follow from those of other methods.

    Examples
    --------
    >>> import gepc
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> backbone = GaussianBackbone(0.0, 0.1, (1, 8, 8))
    >>> method = gepc.create_detector(backbone, "msma").extractor
    >>> len(method.timesteps(backbone)), str(method.cost(backbone, (8, 8)))
    (10, '10F+0J')
    """

    name: ClassVar[str]
    calibration: ClassVar[str] = "kde"  # this and the next three: defaults of `gepc.Detector`
    keep: ClassVar[int | None] = None
    weights: ClassVar[str] = "uniform"
    aggregate: ClassVar[str] = "wmean"
    presets: ClassVar[Presets] = {}
    pixels_only: ClassVar[str | None] = None  # why the method cannot work on latents; None if it can
    needs: ClassVar[str | None] = Backbone.gives  # what the backbone must give; None if it is not called
    revision: ClassVar[int] = 1  # increased when the numbers change: features cached before are not reused

    def __post_init__(self) -> None:
        for parameter in _parameters(self):
            value = getattr(self, parameter.name)
            takes_tuple = isinstance(parameter.default, tuple) or str(parameter.type).startswith("tuple[")
            if isinstance(parameter.default, (Levels, Group)):
                value = type(parameter.default).of(value)
            elif takes_tuple and value is not None:
                value = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(self, parameter.name, value)
        check_fields(self)

    @abstractmethod
    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """Return the timesteps that index the level axis of the columns.

        Parameters
        ----------
        backbone : Backbone
            The network, on whose schedule the timesteps are.

        Returns
        -------
        tuple of int
        """

    @abstractmethod
    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """Count the network passes for one image.

        Parameters
        ----------
        backbone : Backbone
            The network.
        size : (int, int)
            (H, W) of the image.
        levels : int, optional
            The number of levels; all of them by default.

        Returns
        -------
        Cost
        """

    @abstractmethod
    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """Compute the features at some timesteps. This is the only method that calls the network.

        Parameters
        ----------
        backbone : Backbone
            The network.
        batch : Batch
            The images.
        timesteps : sequence of int
            Some of the timesteps that `timesteps` returns.

        Returns
        -------
        mapping name -> array (N, levels[, ...])
        """

    def encoder_passes(self, backbone: Backbone, size: tuple[int, int]) -> int:
        """Encoder passes for one image of that size: one with a latent backbone, otherwise none."""
        return int(backbone.encoder is not None)

    @property
    def square_only(self) -> bool:
        """Whether images must be square: a transform of its group, or of one it builds on, swaps height and width."""
        return any(part.square_only for part in (*getattr(self, "group", ()), *self.builds_on()))

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the last axis of `columns`, as a tuple of str; by default the name of the method."""
        return (self.name,)

    def columns(self, table: Table) -> Columns:
        """Select from the table what calibration sees; by default the features that `column_names` names.

        Parameters
        ----------
        table : mapping name -> array (N, levels[, ...])
            The features, as `extract` returns them.

        Returns
        -------
        array (N, levels, columns)
        """
        features = [table[name] for name in self.column_names]
        return np.concatenate([values.reshape(*values.shape[:2], -1) for values in features], axis=2)

    def parts(self, table: Table) -> tuple[Part, ...]:
        """The columns that are calibrated together, each part being one test of an image; empty: all of them."""
        return ()

    @property
    def calibration_name(self) -> str:
        """The calibrator to use where none is named; `calibration` unless it depends on the options."""
        return self.calibration

    @property
    def label(self) -> str:
        """The method's name in result tables, with the options its numbers depend on (a distance, a compressor)."""
        return self.name

    def stability(self, table: Table) -> npt.NDArray[np.float64]:
        """Return the feature whose coefficient of variation over in-distribution images selects levels.

        Parameters
        ----------
        table : mapping name -> array (N, levels[, ...])
            The features, as `extract` returns them.

        Returns
        -------
        array (N, levels)
            The feature; by default the first of the columns.
        """
        return self.columns(table)[:, :, 0]

    @property
    def by_level(self) -> bool:
        """Whether the table at a timestep is the same whichever other timesteps are extracted with it."""
        return True

    @property
    def memory(self) -> float:
        """The memory for each pixel of a chunk, relative to a plain network pass: more if it holds several answers."""
        return max((method.memory for method in self.builds_on()), default=1.0)

    @property
    def chunk_pixels(self) -> int:
        """The largest number of pixels of several images that are evaluated together."""
        return int(batches.MAX_CHUNK_PIXELS / self.memory)

    @property
    def has_maps(self) -> bool:
        """Whether the method has anomaly maps; see `HasMaps`."""
        return False

    @property
    def map_model(self) -> MapModel:
        """How its maps are compared with those of in-distribution images; with the method's `window` if it has one."""
        return MapModel(window=getattr(self, "window", None) or MapModel.window)

    def builds_on(self) -> tuple[Extractor, ...]:
        """The methods whose tables this one is computed from, sharing their passes and cache; none for most."""
        return ()

    def complete(self, tables: Sequence[Table], batch: Batch) -> Table:
        """This method's table from the tables of `builds_on`, without a network pass."""
        return {name: values for table in tables for name, values in table.items()}

    def network_files(self) -> dict[str, Path]:
        """Digest -> file of the networks other than the backbone, which a user who saves a detector trusts."""
        return {}

    def for_fitting(self) -> Extractor:
        """The method on all levels, which fitting needs to select among them."""
        return self

    def as_scored(self, columns: Columns, keys: Sequence[bytes], seed: int) -> Columns:
        """Columns of `for_fitting`, with NaN for the levels that scoring these images leaves out."""
        return columns

    def options(self) -> dict[str, Any]:
        """The parameters as plain values, enough to build the same extractor again."""
        return {parameter.name: getattr(self, parameter.name) for parameter in _parameters(self)}


def _parameters(extractor: Any) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of an extractor; every subclass that has any is a dataclass."""
    return dataclasses.fields(extractor)


class HasMaps(ABC):
    """Mixin, placed before `Extractor`: a method that shows where in the image its features come from."""

    raw_part: ClassVar[str] = "residual"  # the part that is the map before calibration, if there are several

    @property
    def has_maps(self) -> bool:
        """Overridden where some options leave the method without maps."""
        return True

    @abstractmethod
    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        """The table, and the parts of the map from the same passes; NaN at levels left out."""

    def raw_map(self, parts: MapParts) -> Maps:
        """The map per level, (N, levels, H, W), before calibration: by default the only part, or `raw_part`."""
        return next(iter(parts.values())) if len(parts) == 1 else parts[self.raw_part]


class Derived(Extractor):
    """A method that computes its table from those of `builds_on`."""

    by_level = False

    @abstractmethod
    def builds_on(self) -> tuple[Extractor, ...]:
        """The methods whose tables this one is computed from, at least one."""

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """One entry, for the whole image."""
        return (0,)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """The table, with the passes of all methods that this one builds on."""
        tables = [method.extract(backbone, batch, method.timesteps(backbone)) for method in self.builds_on()]
        return self.complete(tables, batch)

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """The passes of all methods that this one builds on."""
        costs = [method.cost(backbone, size) for method in self.builds_on()]
        return Cost(sum(cost.forward for cost in costs), sum(cost.jvp for cost in costs))


def extract_map_parts(
    extractor: Extractor, backbone: Backbone, batch: Batch, timesteps: Sequence[int]
) -> tuple[Table, MapParts]:
    """The table and the parts of the maps; parts have the size of the latents, if any."""
    return _with_maps(extractor).map_parts(backbone, batch.encoded(backbone), timesteps)


def raw_maps(extractor: Extractor, backbone: Backbone, parts: MapParts) -> Maps:
    """The maps before calibration, (N, levels, H, W) in pixels of the image; not every part of a map has one."""
    raw = _with_maps(extractor).raw_map(parts)
    return raw.repeat(backbone.factor, axis=-2).repeat(backbone.factor, axis=-1)


def _with_maps(extractor: Extractor) -> HasMaps:
    if not isinstance(extractor, HasMaps) or not extractor.has_maps:
        raise OptionError(f"the method {extractor.name!r} has no maps")
    return extractor


def extract_table(extractor: Extractor, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
    """The table of a batch of images, which are encoded first where the backbone is latent."""
    return extractor.extract(backbone, batch.encoded(backbone), timesteps)


def cost_of(extractor: Extractor, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
    """Passes of the network and of the encoder for one image of that size, on all levels or on that many."""
    return replace(extractor.cost(backbone, size, levels), encoder=extractor.encoder_passes(backbone, size))


E_ = TypeVar("E_", bound=type[Extractor])
_EXTRACTORS: dict[str, type[Extractor]] = {}


def register(name: str) -> Callable[[E_], E_]:
    """Class decorator: register an extractor as a detection method.

    Parameters
    ----------
    name : str
        The name in `gepc.create_detector`, `--method` and saved detectors.

    Returns
    -------
    A function that takes the class, sets its `name` and returns it.

    Raises
    ------
    OptionError
        If there is a method of that name.

    Examples
    --------
    The page on the architecture has a complete method. A name is given once:

    >>> from gepc.methods.base import find_method, register
    >>> method = find_method("pixel_stats")  # a class with the decorator @register("pixel_stats")
    >>> register("pixel_stats")(method)
    Traceback (most recent call last):
        ...
    gepc.core.errors.OptionError: a method named 'pixel_stats' exists already
    """

    def add(cls: E_) -> E_:
        if name in _EXTRACTORS:
            raise OptionError(f"a method named {name!r} exists already")
        cls.name = name
        _EXTRACTORS[name] = cls
        return cls

    return add


def methods() -> dict[str, type[Extractor]]:
    """Every registered method. Modules register their methods when they are imported, those of other packages too."""
    for module in ("gepc_plus", "baselines", "diffpath", "combined", "encoder"):
        import_module(f"gepc.methods.{module}")
    plugins("gepc.methods")
    return dict(sorted(_EXTRACTORS.items()))


def find_method(name: str) -> type[Extractor]:
    """The extractor class of that name; `plus` at its end is understood as +."""
    known = methods()
    name = name if name in known else re.sub(r"[ _-]?plus$", "+", name)
    check_choice("method", name, known)
    return known[name]


@dataclass(frozen=True)
class PerLevel(Extractor):
    """A method with the same features, and the same cost, at every noise level.

    A subclass implements `at_level`, and `level_cost` if it takes more than one pass.

    Parameters
    ----------
    levels : Levels
        The candidate noise levels.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> import gepc
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.methods.base import PerLevel
    >>> @dataclass(frozen=True)
    ... class ScoreNorm(PerLevel):
    ...     name = "score_norm"
    ...     levels: gepc.Levels = gepc.Levels.rho(0.1, 0.3)
    ...     def at_level(self, backbone, batch, t):
    ...         x_t, _ = batch.noised(backbone, t)
    ...         return {"score_norm": backbone.eps(x_t, t).square().mean((1, 2, 3))}
    >>> str(ScoreNorm().cost(GaussianBackbone(0.0, 0.1, (1, 8, 8)), (8, 8)))
    '2F+0J'
    """

    levels: Levels

    @abstractmethod
    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """Compute the features at one timestep.

        Parameters
        ----------
        backbone : Backbone
            The network.
        batch : Batch
            The images.
        t : int
            The timestep.

        Returns
        -------
        mapping name -> torch.Tensor (N,) or (N, features)
        """

    def level_cost(self, size: tuple[int, int]) -> Cost:
        """Count the network passes per image and level; one by default.

        Parameters
        ----------
        size : (int, int)
            (H, W) of the image.

        Returns
        -------
        Cost
        """
        return Cost(forward=1)

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """The levels on the backbone's schedule."""
        return self.levels.timesteps(backbone.alphas_cumprod)

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """The cost of one level, times the number of levels."""
        count = len(self.timesteps(backbone)) if levels is None else levels
        each = self.level_cost(size)
        return Cost(count * each.forward, count * each.jvp)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """name -> (N, levels)."""
        rows = [self.at_level(backbone, batch, int(t)) for t in timesteps]
        return {name: np.stack([to_numpy(row[name]) for row in rows], axis=1) for name in rows[0]}


class WholeImage(Extractor):
    """A method whose features do not belong to a noise level: the level axis has one entry, for the whole image.

    A subclass implements `of_images` and `image_cost`.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.methods.base import Cost, WholeImage
    >>> @dataclass(frozen=True)
    ... class Brightness(WholeImage):
    ...     name = "brightness"
    ...     def image_cost(self, backbone, size):
    ...         return Cost()
    ...     def of_images(self, backbone, batch):
    ...         return {"brightness": batch.clean(backbone).mean((1, 2, 3))}
    >>> Brightness().timesteps(GaussianBackbone(0.0, 0.1, (1, 8, 8)))
    (0,)
    """

    by_level = False

    @abstractmethod
    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """Compute the features of the images.

        Parameters
        ----------
        backbone : Backbone
            The network.
        batch : Batch
            The images.

        Returns
        -------
        mapping name -> torch.Tensor (N,) or (N, features)
        """

    @abstractmethod
    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """Count the network passes per image.

        Parameters
        ----------
        backbone : Backbone
            The network.
        size : (int, int)
            (H, W) of the image.

        Returns
        -------
        Cost
        """

    def timesteps(self, backbone: Backbone) -> tuple[int, ...]:
        """One entry."""
        return (0,)

    def cost(self, backbone: Backbone, size: tuple[int, int], levels: int | None = None) -> Cost:
        """The cost of the image, whatever the number of levels."""
        return self.image_cost(backbone, size)

    def extract(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> Table:
        """name -> (N, 1) or (N, 1, features)."""
        return {name: to_numpy(values)[:, None] for name, values in self.of_images(backbone, batch).items()}


def to_tensor(values: npt.NDArray[Any], backbone: Backbone) -> torch.Tensor:
    """An array as a tensor on the backbone's device and in its precision."""
    tensor, on_gpu = torch.from_numpy(np.ascontiguousarray(values)), backbone.device.type == "cuda"
    if on_gpu:
        tensor = tensor.pin_memory()
    return tensor.to(device=backbone.device, dtype=backbone.dtype, non_blocking=on_gpu)


def to_numpy(values: torch.Tensor) -> npt.NDArray[np.float64]:
    """A tensor as a float64 array."""
    return np.asarray(values.detach().double().cpu().numpy())
