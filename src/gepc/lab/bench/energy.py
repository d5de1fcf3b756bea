"""The energy models of the paper's table, which need no diffusion model: a network is trained on each ID set."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from gepc.backbones.base import Backbone
from gepc.backbones.load import load_backbone
from gepc.core.files import replacing
from gepc.core.tables import ResultTable
from gepc.images.batches import load_all
from gepc.images.preprocessing import Preprocessing
from gepc.lab.bench import published
from gepc.lab.bench.detector_tables import Row, published_note, published_rows
from gepc.lab.bench.protocol import Protocol
from gepc.lab.datasets import open_dataset
from gepc.lab.energy.method import Energy
from gepc.lab.metrics import auroc
from gepc.lab.training.choices import recipe_for
from gepc.lab.training.loop import train
from gepc.methods.extraction import ExtractionSpec, extract_all

ROWS = {"igebm": "IGEBM", "improved_cd": "Improved CD", "vaebm": "VAEBM"}
"""Objective of `gepc train` -> its row in the paper."""


def energy_table(
    protocol: Protocol, data: Path, out: Path, minutes: float, on_network: Callable[[int], None] = lambda _: None
) -> ResultTable:
    """Train every model on every ID set, and measure the AUROC of its energy, one-sided as published.

    Parameters
    ----------
    protocol, data : the pairs, and the folder with their data sets.
    out : folder for the networks; a run that is there is resumed, if it is on the same training images.
    minutes : training time of each network.
    on_network : called with 1 after every network.
    """
    for name in protocol.pairs:
        _write_images(protocol, name, data, out)
    rows: list[Row] = []
    for objective, name in ROWS.items():
        values = []
        for inside, others in protocol.pairs.items():
            network, scores = _trained(objective, protocol, inside, out, minutes), {}
            spec = ExtractionSpec(Energy(), Energy().timesteps(network), rows=protocol.batch_size)
            for other in (inside, *others):
                images, preprocessing = protocol.open(data, (other, "test")), protocol.preprocessing(other, network)
                scores[other] = extract_all(images, preprocessing, network, spec).columns[:, 0, 0]
            values += [auroc(scores[inside], scores[other]) for other in others]
            on_network(1)
        rows.append((name, "measured", *values, float(np.mean(values))))
        rows += published_rows(protocol, (name, "published"), published.MAIN[f"{name} (ID-trained)"][0])
    header = ("model", "source", *protocol.pair_labels, "average")
    note = f"A small network for each ID set, trained for {minutes:g} minutes. {published_note(protocol)}"
    return ResultTable("energy", "Energy models trained on each ID set", header, tuple(rows), note)


def _write_images(protocol: Protocol, name: str, data: Path, out: Path) -> None:
    """Write all training images of an ID set to the file that its networks are trained on."""
    source = protocol.datasets[name]
    preprocessing = Preprocessing(source.value_range, (protocol.size, protocol.size))
    pixels = load_all(open_dataset(source.dataset, data, "train"), preprocessing)
    with replacing(out / f"{name}.npz") as draft, draft.open("wb") as handle:
        np.savez(handle, train_x=np.rint((pixels.transpose(0, 2, 3, 1) + 1.0) * 127.5).astype(np.uint8))


def _trained(objective: str, protocol: Protocol, name: str, out: Path, minutes: float) -> Backbone:
    """The network of an objective on the images that were written for an ID set."""
    images, folder = out / f"{name}.npz", out / f"{objective}-{name}"
    recipe, _ = recipe_for(images, folder, overrides={"objective": objective, "image_size": protocol.size})
    train(recipe, images, folder, minutes)
    return load_backbone(folder)
