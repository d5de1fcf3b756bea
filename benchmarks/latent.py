"""gepc+ in latents against gepc+ in pixels: train a small autoencoder and a small latent network, score every pair.

    python benchmarks/latent.py --data data/ --out results/latent --minutes 20,40

Both are trained on the training images of CelebA-32 alone, for that many minutes each. An interrupted run resumes. OUT
holds `pipeline`, a diffusers folder that `gepc.load_backbone` loads, and the table `latent.md`: AUROC of every pair of
the protocol small32, with what an image costs. Nothing of it is embedded in the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

import gepc
from gepc.core.allocator import keep_freed_memory
from gepc.core.files import replacing
from gepc.core.tables import ResultTable, write_tables
from gepc.images.batches import load_all
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images
from gepc.lab.bench.protocol import Protocol, load_protocol
from gepc.lab.metrics import auroc
from gepc.lab.training.loop import train
from gepc.lab.training.recipe import Recipe

Array = npt.NDArray[np.float32]
BATCH, KL_WEIGHT = 64, 1e-4
SAVE_EVERY = 60.0
SPREAD = 3.0  # standard deviations of the latents that become 1


def new_autoencoder(width: int) -> Any:
    """3x32x32 to 4x16x16: a third as many values, in cells of 2x2 pixels."""
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(width, 2 * width),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=32,
    )


def train_autoencoder(images: Array, out: Path, minutes: float, width: int) -> Any:
    """|x - decode(z)|^2 + 1e-4 KL(q(z|x), N(0, I)) per value; the state is saved every minute."""
    net = new_autoencoder(width).train()
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)
    state: dict[str, float] = {"step": 0, "seconds": 0.0}
    path, history = out / "autoencoder.pt", out / "autoencoder.jsonl"
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["net"])
        optimiser.load_state_dict(saved["optimiser"])
        state = saved["state"]
    pixels, saved_at = torch.from_numpy(images), state["seconds"]
    while state["seconds"] < 60.0 * minutes:
        begun, generator = time.monotonic(), torch.Generator().manual_seed(int(state["step"]))
        x = pixels[torch.randint(len(pixels), (BATCH,), generator=generator)]
        posterior = net.encode(x).latent_dist
        error = functional.mse_loss(net.decode(posterior.sample(generator)).sample, x)
        loss = error + KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * (1.0 - 0.95 * min(1.0, state["seconds"] / (60.0 * minutes)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        state = {"step": state["step"] + 1, "seconds": state["seconds"] + time.monotonic() - begun}
        if state["seconds"] - saved_at > SAVE_EVERY or state["seconds"] >= 60.0 * minutes:
            saved_at = state["seconds"]
            with replacing(path) as draft:
                torch.save({"net": net.state_dict(), "optimiser": optimiser.state_dict(), "state": state}, draft)
            with open(history, "a", encoding="utf-8") as log:
                log.write(json.dumps({**state, "error": float(error.detach())}) + "\n")
    return net.eval().requires_grad_(False)


def latents_of(net: Any, images: Array) -> Array:
    """The modes of the posteriors."""
    parts = torch.split(torch.from_numpy(images), 256)
    return np.concatenate([net.encode(part).latent_dist.mode().numpy() for part in parts])


def make_pipeline(data: Path, out: Path, minutes: tuple[float, float], images: int, width: int) -> Path:
    """Train both and put them together as a diffusers pipeline."""
    source = open_images(f"{data / 'celeba32.npz'}:train_x")
    pixels = load_all(source, Preprocessing())[:images]
    net = train_autoencoder(pixels, out, minutes[0], width)
    latents = latents_of(net, pixels)
    scale = float(1.0 / (SPREAD * latents.std()))
    net.register_to_config(scaling_factor=scale)
    np.savez(out / "latents.npz", x=np.clip(latents * scale, -1.0, 1.0))
    recipe = Recipe(
        channels=(width, 2 * width, 3 * width),
        image_channels=4,
        flips="none",
        value_range=(-1.0, 1.0),
        steps=1_000_000,
        held_out=min(512, images // 4),
    )
    train(recipe, out / "latents.npz", out / "net", minutes[1])
    pipeline = out / "pipeline"
    net.save_pretrained(pipeline / "vae")
    parts = {"unet": ("config.json", "diffusion_pytorch_model.safetensors"), "scheduler": ("scheduler_config.json",)}
    for folder, names in parts.items():
        (pipeline / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(out / "net" / name, pipeline / folder / name)
    return pipeline


def scores_of(backbone: gepc.Backbone, protocol: Protocol, data: Path) -> tuple[dict[str, float], str, float]:
    """AUROC of every pair, the cost of an image, and its seconds."""
    found: dict[str, float] = {}
    cost, spent, seen = "", 0.0, 0
    for name, others in protocol.pairs.items():
        detector = gepc.create_detector(backbone, "gepc+", size=protocol.size)
        detector.fit(protocol.open(data, (name, "train")))
        cost = str(detector.cost())
        sets = {other: protocol.open(data, (other, "test")) for other in (name, *others)}
        begun = time.perf_counter()
        scores = {other: detector.score(images) for other, images in sets.items()}
        spent, seen = spent + time.perf_counter() - begun, seen + sum(map(len, sets.values()))
        found |= {protocol.label(name, other): auroc(scores[name], scores[other]) for other in others}
    return found, cost, spent / seen


def reconstruction_error(pipeline: Path, data: Path) -> float:
    """Mean squared error of the autoencoder on the test images of CelebA-32, in [-1, 1]."""
    from diffusers import AutoencoderKL

    net = AutoencoderKL.from_pretrained(pipeline / "vae").eval().requires_grad_(False)
    x = torch.from_numpy(load_all(open_images(f"{data / 'celeba32.npz'}:test_x"), Preprocessing())[:500])
    return float(functional.mse_loss(net.decode(net.encode(x).latent_dist.mode()).sample, x))


def table_of(pixel: gepc.Backbone, latent: gepc.Backbone, protocol: Protocol, data: Path, note: str) -> ResultTable:
    """One row per backbone."""
    rows = []
    for name, backbone in (("pixels", pixel), ("latents", latent)):
        found, cost, seconds = scores_of(backbone, protocol, data)
        rows.append((name, *found.values(), float(np.mean(list(found.values()))), cost, f"{1e3 * seconds:.2f} ms"))
    header = ("network in", *protocol.pair_labels, "mean", "passes", "time per image")
    return ResultTable("latent", "gepc+ in latents and in pixels (AUROC)", header, tuple(rows), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the data sets")
    parser.add_argument("--out", type=Path, required=True, help="a folder for networks and table")
    parser.add_argument("--minutes", default="20,40", help="minutes for the autoencoder and for the network")
    parser.add_argument("--images", type=int, default=20_000, help="training images")
    parser.add_argument("--width", type=int, default=32, help="channels of the first level of both networks")
    parser.add_argument("--fit", type=int, help="ID-train images of the protocol, instead of its own number")
    parser.add_argument("--test", type=int, help="test images of each set, instead of the protocol's number")
    options = parser.parse_args()
    keep_freed_memory()
    options.out.mkdir(parents=True, exist_ok=True)
    first, second = (float(part) for part in options.minutes.split(","))
    pipeline = make_pipeline(options.data, options.out, (first, second), options.images, options.width)
    given = {"train_images": options.fit, "test_images": options.test}
    protocol = load_protocol("small32", {name: value for name, value in given.items() if value is not None})
    latent, pixel = gepc.load_backbone(pipeline), gepc.load_backbone(protocol.backbone)
    error = reconstruction_error(pipeline, options.data)
    note = (
        f"Autoencoder: {first:g} minutes, mean squared error {error:.4f} on test faces in [-1, 1]. Latent network: "
        f"{latent.parameters:,} weights, {second:g} minutes; pixel network: {pixel.parameters:,} weights."
    )
    table = table_of(pixel, latent, protocol, options.data, note)
    print(
        write_tables(
            options.out, "latent", [table], {"protocol": dataclasses.asdict(protocol), "scale": latent.describe()}
        )
    )


if __name__ == "__main__":
    main()
