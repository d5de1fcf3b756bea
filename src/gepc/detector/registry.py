"""Detectors by name: `create_detector` for every registered method, `GEPC` for the paper's, and saved ones."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels
from gepc.core.errors import OptionError
from gepc.core.files import StrPath
from gepc.detector.detector import Detector
from gepc.detector.parameters import divided, with_preset
from gepc.detector.storage import load_fitted
from gepc.methods.base import find_method, methods
from gepc.methods.combined import Combined
from gepc.methods.gepc import GepcExtractor

DEFAULT_METHOD = "gepc+"


class GEPC(Detector):
    """Group-equivariant posterior consistency, the paper's detector.

    Without a preset its candidate levels are wider than the paper's, so that they suit networks other than the paper's;
    `preset="paper"` has the paper's own.

    Parameters
    ----------
    backbone : Backbone
        The network that predicts noise.
    levels : Levels or str or numbers
        Noise levels: sqrt(abar) as plain numbers, a `gepc.Levels`, or text such as `rho:0.05,0.17`.
    preset : {"paper", "paper-celeba", "released", "released-svhn", "released-celeba", "inner"}, optional
        A named set of options; options that are given take precedence.
    **options
        The other parameters of `gepc.methods.gepc.GepcExtractor` (`features`, `pool`, `topk`, `window`, `group`,
        `mc_samples`, `group_samples`, `level_samples`, `layers`) and of `gepc.Detector` (`keep`, `calibration`, ...).

    Examples
    --------
    >>> import gepc
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> detector = gepc.GEPC(GaussianBackbone(0.0, 0.04, (1, 8, 8)), preset="paper")
    >>> detector.keep
    2
    """

    def __init__(
        self,
        backbone: Backbone,
        levels: Levels | str | float | Iterable[float] | None = None,
        preset: str | None = None,
        **options: Any,
    ) -> None:
        given = options if levels is None else {"levels": levels, **options}
        given = {"keep": GepcExtractor.keep, **with_preset(GepcExtractor, preset, given)}
        own, shared = divided(GepcExtractor, given, "GEPC")
        super().__init__(backbone, GepcExtractor(**own), **shared)


def list_detectors() -> list[str]:
    """List the names of the methods that `create_detector` knows.

    Returns
    -------
    list of str

    Examples
    --------
    >>> import gepc
    >>> "gepc+" in gepc.list_detectors()
    True
    """
    return list(methods())


def create_detector(
    backbone: Backbone, method: str | Sequence[str] | None = DEFAULT_METHOD, preset: str | None = None, **options: Any
) -> Detector:
    """Create a detector that is not fitted yet.

    Parameters
    ----------
    backbone : Backbone
        The network that predicts noise; see `gepc.load_backbone`.
    method : str or sequence of str
        Name of the method, `gepc+` by default; see `gepc.list_detectors`. Several names, in a sequence or separated
        by commas, are combined into one detector; see `gepc.methods.combined`.
    preset : str, optional
        A named set of options of the method.
    **options
        Parameters of the method and of `gepc.Detector`; they take precedence over the preset.

    Returns
    -------
    Detector

    Raises
    ------
    OptionError
        If the method, the preset or an option is unknown, or if the method cannot use the backbone.

    See Also
    --------
    load_detector : load a detector that was saved.

    Examples
    --------
    >>> import gepc
    >>> backbone = gepc.load_backbone("photos-small")
    >>> gepc.create_detector(backbone, "msma", size=32).is_fitted
    False
    """
    if isinstance(method, Backbone) and not isinstance(backbone, Backbone):
        backbone, method = _in_old_order(backbone, method)
    if isinstance(method, str) and "," in method:
        method = [name.strip() for name in method.split(",")]
    if isinstance(method, list | tuple) and all(isinstance(name, str) for name in method):
        method, options = Combined.name, {"methods": tuple(method), **options}
    if not isinstance(method, str | None):
        raise OptionError(f"method must be a name, such as 'gepc', got {type(method).__name__}")
    extractor_class = find_method(DEFAULT_METHOD if method is None else method)
    if extractor_class is GepcExtractor:
        return GEPC(backbone, preset=preset, **options)
    options = with_preset(extractor_class, preset, options)
    own, shared = divided(extractor_class, options, f"method {extractor_class.name!r}")
    defaults = {name: getattr(extractor_class, name) for name in ("keep", "weights", "aggregate")}
    return Detector(backbone, extractor_class(**own), **{**defaults, **shared})


def _in_old_order(method: Any, backbone: Backbone) -> tuple[Backbone, str | Sequence[str] | None]:
    """The arguments of version 0.2, which had the method first, in their present order."""
    message = "create_detector(method, backbone) is deprecated; call create_detector(backbone, method)"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return backbone, method


def load_detector(
    folder: StrPath,
    backbone: Backbone | str | None = None,
    device: str | torch.device = "auto",
    trust: bool | None = None,
) -> Detector:
    """Load a saved detector. Its backbone is loaded from where it came from, or given, and must have the same weights.

    The folder may come from anyone: everything in it is checked before it is used, and no code in it is run.

    Parameters
    ----------
    folder : where `save` wrote it, or a repository on the Hugging Face hub ("org/name").
    backbone : used instead of the one that the detector names.
    device : where a backbone that is loaded runs: "auto" is CUDA if available, otherwise MPS, otherwise the CPU.
    trust : follow the paths and hub ids of networks that the folder names. Otherwise only networks that ship with the
        package are loaded by name, and any other must be given. None trusts if the environment variable GEPC_TRUST
        is 1.

    Returns
    -------
    Detector
        The fitted detector.

    See Also
    --------
    gepc.Detector.save : writes the folder.

    Examples
    --------
    >>> import tempfile
    >>> import gepc, numpy as np
    >>> images = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)
    >>> detector = gepc.create_detector(gepc.load_backbone("photos-small"), "pixel_stats").fit(images)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     detector.save(f"{folder}/det")
    ...     again = gepc.load_detector(f"{folder}/det")
    >>> bool((again.score(images[:2]) == detector.score(images[:2])).all())
    True
    """
    fitted = load_fitted(folder, backbone, device, trust)
    kind = GEPC if type(fitted.method) is GepcExtractor else Detector
    return kind.of(fitted)
