"""Write the saved detectors, their expected answers and the cache keys that `tests/test_pinned.py` holds fixed.

    python tests/data/pinned/make.py

Run it only to add a case: what is there was written by version 0.1 and must not change.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from diffusers import DDPMScheduler, UNet2DModel

import gepc

HERE = Path(__file__).parent
PLUS = ("s", "d", "ax", "ay", "ad", "ax2", "ay2", "ac")  # gepc+ before it had features of inner layers
PAPER = {"preset": "paper"}
CASES = {
    "gepc": ("gepc", {**PAPER, "features": ("s", "cos", "pair", "x0"), "keep": 3}),
    "gepc-mvn": ("gepc", {**PAPER, "calibration": "mvn", "pool": "mean", "group": "d4", "mc_samples": 2}),
    "gepc+fast": ("gepc+", {"preset": "fast", "features": PLUS}),
    "gepc+full": ("gepc+", {"preset": "full", "features": PLUS}),
    "msma": ("msma", {}),
    "diffpath": ("diffpath", {}),
    "grouped": ("gepc", PAPER),
}
GROUPS = ("a", "b")


def images(count: int, seed: int, blur: int = 3) -> np.ndarray:
    """Smooth coloured noise, uint8 (N, 16, 16, 3); the same on every machine."""
    rng = np.random.default_rng(seed)
    field = rng.integers(0, 256, (count, 16, 16, 3)).astype(np.float64)
    for _ in range(blur):
        field = (field + np.roll(field, 1, 1) + np.roll(field, 1, 2) + np.roll(field, (1, 1), (1, 2))) / 4
    low, high = field.min((1, 2, 3), keepdims=True), field.max((1, 2, 3), keepdims=True)
    return np.floor(255 * (field - low) / (high - low)).astype(np.uint8)


def groups_for(name: str, count: int) -> list[str] | None:
    """Alternating labels for the grouped detector."""
    return [GROUPS[index % 2] for index in range(count)] if name == "grouped" else None


def make_net(folder: Path) -> None:
    """A small network with random weights, large enough not to be equivariant."""
    torch.manual_seed(0)
    net = UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4, add_attention=False,
    )  # fmt: skip
    net.save_pretrained(folder)
    DDPMScheduler(num_train_timesteps=4000, beta_schedule="squaredcos_cap_v2").save_pretrained(folder)


def main() -> None:
    net = HERE / "net"
    if not net.exists():
        make_net(net)
    backbone = gepc.load_backbone(net, dtype="float64")
    scored = np.concatenate([images(4, 2), images(4, 3, blur=1)])
    for name, (method, options) in CASES.items():
        if (HERE / name).exists():
            continue
        options = dict(options)
        preset = options.pop("preset", None)
        detector = gepc.create_detector(backbone, method, preset=preset, **options)
        detector.fit(images(30, 0), images(20, 1), groups=groups_for(name, 20))
        detector.backbone.source = "net"
        detector.save(HERE / name)
        results = list(detector.results(scored, groups=groups_for(name, len(scored))))
        answers = {field: np.array([getattr(result, field) for result in results]) for field in ("score", "p_value")}
        if detector.extractor.has_maps:
            answers["map"] = detector.score_map(scored)
        np.savez_compressed(HERE / name / "expected.npz", **answers)
    keys = HERE / "cache_keys.json"
    if not keys.exists():
        keys.write_text(json.dumps(cache_keys(backbone), indent=1) + "\n")


def cache_keys(backbone: gepc.Backbone) -> dict[str, list[str]]:
    """For each method the names of the files that its features of three images are cached under."""
    from gepc.images.batches import OnBadImage, chunks
    from gepc.images.preprocessing import Preprocessing
    from gepc.images.sources import open_images
    from gepc.methods.extraction import ExtractionSpec, FeatureCache, extract_chunks

    found = {}
    for name, (method, options) in CASES.items():
        folder = Path(tempfile.mkdtemp())
        options = dict(options)
        detector = gepc.create_detector(backbone, method, preset=options.pop("preset", None), **options)
        spec = ExtractionSpec(detector.extractor, detector.extractor.timesteps(backbone))
        read = chunks(open_images(images(3, 4)), Preprocessing(size=(16, 16)), 64, OnBadImage.NONE)
        list(extract_chunks(backbone, spec, read, FeatureCache(folder)))
        found[name] = sorted(path.name for path in folder.rglob("*.safetensors"))
        shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    main()
