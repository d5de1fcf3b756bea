"""Export the network of a detector to ONNX, check it with onnxruntime, and score with it.

    python examples/export_onnx.py DETECTOR IMAGES --out net.onnx

ONNX runs where torch does not: in a browser, on a phone, in a C++ program. The file holds the noise network eps(x, t)
and, as metadata, what else a backbone needs (the noise schedule, sizes, the SHA-256 of the weights), so that
`OnnxBackbone` replaces the original in `gepc.load_detector(folder, OnnxBackbone("net.onnx"))`. The script compares the
scores of both and prints the speed of ONNX relative to torch in the same process.

Needs `pip install 'gepc[onnx]'`. For pixel-space diffusers networks that predict the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import gepc
from gepc.backbones.diffusers import DiffusersBackbone
from gepc.images.sources import open_images

AGREEMENT = 1e-4  # largest difference of scores, relative to the spread of the calibration scores
KEY = "gepc"


class Network(torch.nn.Module):
    """The network as one function of images and times; diffusers returns an object."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """eps, or eps and the variance."""
        answer: torch.Tensor = self.net(x, times, return_dict=False)[0]
        return answer


def export(backbone: gepc.Backbone, path: Path, size: tuple[int, int]) -> None:
    """Write the network for images of `size`, any number at once, with the facts that `OnnxBackbone` reads."""
    import onnx

    facts = backbone.describe()
    plain = isinstance(backbone, DiffusersBackbone) and not backbone.conditioning and backbone.encoder is None
    if not plain or facts.get("prediction_type") != "epsilon":
        raise gepc.GepcError("only unconditional pixel-space diffusers networks that predict the noise can be exported")
    x = torch.zeros(2, backbone.channels, *size)
    batch = torch.export.Dim("batch", min=1, max=4096)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Network(backbone.net).eval(),
            (x, backbone._times[torch.tensor([0, 1])]),
            path,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=["x", "times"],
            output_names=["eps"],
            dynamic_shapes={"x": {0: batch}, "times": {0: batch}},
        )
    model = onnx.load(path)
    about = {"describe": facts, "alphas_cumprod": backbone.alphas_cumprod.tolist(), "times": backbone._times.tolist()}
    onnx.helper.set_model_props(model, {KEY: json.dumps({**about, "size": size})})
    onnx.save(model, path)


class OnnxBackbone(gepc.Backbone):
    """An exported network, run by onnxruntime; forward passes only, no derivatives.

    Parameters
    ----------
    path : written by `export`.
    threads : of onnxruntime; 0 leaves it to the library.
    """

    family = "onnx"

    def __init__(self, path: Path, threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        found = json.loads(self._session.get_modelmeta().custom_metadata_map[KEY])
        self._facts = found["describe"]
        super().__init__(found["alphas_cumprod"], self._facts["channels"], tuple(found["size"]))
        self._times = np.asarray(found["times"], dtype=np.float32)
        self.sha256 = self._facts["sha256"]  # of the weights, so that a detector accepts the exported network

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        inputs = {"x": x.detach().numpy(), "times": self._times[t.numpy()]}
        (answer,) = self._session.run(["eps"], inputs)
        return torch.from_numpy(answer[:, : self.channels])

    def describe(self) -> dict[str, object]:
        """That of the original, on which saved detectors insist."""
        return {**self._facts, "source": None}


def speed_ratio(first: gepc.Backbone, second: gepc.Backbone, size: tuple[int, int], repeats: int = 5) -> float:
    """Median time of a pass of the first network over that of the second; measured in turns, after a warm-up."""
    x = torch.zeros(8, first.channels, *size)
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for place, backbone in enumerate((first, second)):
            begun = time.perf_counter()
            backbone.eps(x, 0)
            times[place].append(time.perf_counter() - begun)
    return statistics.median(times[0][1:]) / statistics.median(times[1][1:])


def main(detector_folder: str, images: str, out: Path) -> tuple[float, float]:
    """Export, compare, report: the largest difference of the scores, and the speed relative to torch."""
    detector = gepc.load_detector(detector_folder)
    size = detector.input_size
    export(detector.backbone, out, size)
    exported = OnnxBackbone(out, threads=torch.get_num_threads())
    again = gepc.load_detector(detector_folder, exported)
    collection = open_images(images)
    expected, found = detector.score(collection), again.score(collection)
    difference = float(np.abs(found - expected).max() / np.ptp(detector.calibration_scores_))
    ratio = speed_ratio(detector.backbone, exported, size)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB, largest difference of {len(found)} scores {difference:.1e}")
    print(f"speed relative to torch on this machine: {ratio:.2f}")
    if difference > AGREEMENT:
        raise gepc.GepcError(f"the exported network gives other scores: {difference:.1e} > {AGREEMENT:g}")
    return difference, ratio


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("detector")
    parser.add_argument("images")
    parser.add_argument("--out", type=Path, default=Path("net.onnx"))
    options = parser.parse_args()
    main(options.detector, options.images, options.out)
