"""Energy models trained on the in-distribution set: IGEBM, Improved CD, VAEBM."""

from dataclasses import dataclass
from typing import ClassVar

from gepc.backbones.base import Backbone
from gepc.lab.energy.network import EnergyBackbone
from gepc.methods.base import Batch, Cost, Features, WholeImage, register
from gepc.methods.presets import Preset, Presets


@register("energy")
@dataclass(frozen=True)
class Energy(WholeImage):
    """Energy: E(x) of a network that was trained on the in-distribution set itself, without a diffusion model.

    The network is one of `gepc.lab.training.energy_losses`: IGEBM (Du & Mordatch, NeurIPS 2019), Improved CD (Du, Li,
    Tenenbaum & Mordatch, ICML 2021) or VAEBM (Xiao, Kreis, Kautz & Vahdat, ICLR 2021).
    As published the score is one-sided. The preset `two_sided` takes the density of E over ID images, since energies
    may also be too low.
    """

    needs: ClassVar[str | None] = "energies"
    calibration: ClassVar[str] = "raw"
    presets: ClassVar[Presets] = {
        "paper": Preset(),
        "light": Preset(),
        "two_sided": Preset(calibration={"calibration": "kde"}),
    }

    def image_cost(self, backbone: Backbone, size: tuple[int, int]) -> Cost:
        return Cost(forward=1)

    def of_images(self, backbone: Backbone, batch: Batch) -> Features:
        assert isinstance(backbone, EnergyBackbone)
        return {"energy": backbone.energy(batch.clean(backbone))}
