"""A feature network of others as a detector: which positions of an image have activations unlike those of ID images?

The encoder, for instance an ImageNet network, sees the clean image in one pass; the diffusion network is not called.
The activations of its layers are put on a common grid. The map compares each position with the activations of ID images
at any position: with a memory of them (as PatchCore does) or with their Gaussian (as PaDiM does, without positions).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.encoders import Encoder
from gepc.core.errors import OptionError
from gepc.core.options import one_of
from gepc.methods.base import Batch, Columns, Cost, Features, HasMaps, MapModel, MapParts, Table, WholeImage, register
from gepc.methods.features import logarithm_of_deviations
from gepc.methods.pooling import activation_distance, channel_statistics, position_vectors
from gepc.methods.presets import Preset, Presets

CELLS = 256  # the largest side of the grid of positions; it is that of the finest layer on images that are not larger
POSITION_MODELS = {"memory": "level_local_memory", "gaussian": "level_pca:rank=64"}


@register("encoder")
@dataclass(frozen=True)
class EncoderMethod(HasMaps, WholeImage):
    """Activations of a feature network, for images and for maps.

    An image is scored by the mean and the logarithm of the standard deviation of every channel, in the metric of their
    principal components; with `score_from="map"`, as in the preset `inspect`, by the highest values of its map. See
    Roth et al. (PatchCore, CVPR 2022) and Defard et al. (PaDiM, ICPR 2021).

    Parameters
    ----------
    encoder : a `gepc.Encoder`, or what `Encoder.load` takes: `timm:efficientnet_lite0`, the path of an ONNX file. A
        saved detector holds its description.
    encoder_weights, layers : `weights` and `layers` of `Encoder.load`, for an encoder that is named.
    positions : how maps compare a position with those of ID images: `memory`, the distance to the nearest of a coreset
        of them, or `gaussian`, the Mahalanobis distance from all of them.

    Examples
    --------
    >>> import gepc, numpy as np, torch
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 8, stride=8), torch.nn.Conv2d(4, 4, 2, stride=2))
    >>> encoder = gepc.Encoder.load(net, ("0",), mean=(0.5,), std=(0.5,), device="cpu")
    >>> detector = gepc.create_detector(GaussianBackbone(0.0, 0.1, (1, 16, 16)), "encoder", encoder=encoder)
    >>> images = np.random.default_rng(0).uniform(-1, 1, (60, 1, 16, 16)).astype(np.float32)
    >>> detector.fit(images).score_map(images[:2]).shape
    (2, 16, 16)
    """

    needs: ClassVar[str | None] = None
    calibration: ClassVar[str] = "level_pca"
    pixels_only: ClassVar[str | None] = "the encoder sees images, not latents"
    raw_part: ClassVar[str] = "contrast"  # the distances within each image, which need no calibration
    presets: ClassVar[Presets] = {
        "inspect": Preset(preprocessing={"resize": "native"}, calibration={"score_from": "map"}),
    }

    encoder: Any = None
    encoder_weights: str | None = None
    layers: tuple[str, ...] | None = None
    positions: str = one_of(*POSITION_MODELS)

    @cached_property
    def network(self) -> Encoder:
        """The encoder, loaded when it is first asked for."""
        if self.encoder is None:
            raise OptionError(
                "the method 'encoder' needs a feature network; set `encoder`, for instance to timm:efficientnet_lite0",
                options=("encoder",),
            )
        if isinstance(self.encoder, Encoder):
            return self.encoder
        if isinstance(self.encoder, Mapping):  # from a saved detector
            return Encoder.rebuild(self.encoder, trust=os.environ.get("GEPC_TRUST") == "1")
        return Encoder.load(self.encoder, self.layers, weights=self.encoder_weights)

    def options(self) -> dict[str, Any]:
        """The parameters, with the encoder as its description, which has its weights and layers."""
        return {"encoder": self.network.describe(), "positions": self.positions}

    @property
    def map_model(self) -> MapModel:
        """Positions are compared with those of ID images as they are, near the border with those near the border.

        The numbers were chosen on good tiles with synthetic defects. Eight bands of 4 pixels are two cells of a layer
        with 16 pixels per cell. Without them, the border decides the largest values of many good tiles. A pass costs
        little, so more images are learnt from than with a diffusion network.
        """
        return MapModel(POSITION_MODELS[self.positions], centred=False, share=0.01, band=4, images=160, learnt=0.8)

    def network_files(self) -> dict[str, Path]:
        """The file that the encoder was loaded from, if there is one."""
        path = self.network.weights or self.network.source
        return {self.network.sha256: Path(path)} if path is not None and Path(path).is_file() else {}

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        """No pass of the diffusion network."""
        return Cost()

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        """`encoder`: mean and standard deviation of every channel, (N, 2 C)."""
        return {"encoder": channel_statistics(self.network.activations(batch.clean(backbone)))}

    def map_parts(self, backbone: Backbone, batch: Batch, timesteps: Sequence[int]) -> tuple[Table, MapParts]:
        """The vectors of each position, `activations`, and their distances within the image, `contrast`."""
        activations = self.network.activations(batch.clean(backbone))
        finest = max((field.shape[2], field.shape[3]) for field in activations.values())
        parts = {
            "activations": position_vectors(activations, finest, CELLS),
            "contrast": activation_distance(activations, batch.size),
        }
        table = {"encoder": channel_statistics(activations)[:, None].double().cpu().numpy()}
        return table, {name: values[:, None].cpu().numpy() for name, values in parts.items()}

    def columns(self, table: Table) -> Columns:
        """Means as they are, standard deviations in logarithms."""
        return np.asarray(logarithm_of_deviations(table["encoder"]))
