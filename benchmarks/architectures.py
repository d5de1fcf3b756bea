"""Small networks trained for the same CPU time: held-out error, cost of a pass, and gepc+ on synthetic outliers.

    python benchmarks/architectures.py --data photos32.npz --out architectures --minutes 5
    python benchmarks/architectures.py --data photos32.npz --out architectures --only 'present;narrow'

Every candidate is a plain diffusers `UNet2DModel`. It is trained by one thread until `--minutes` of CPU time are spent,
with the batches of `gepc train`, a cosine decay over that time and averaged weights. No out-of-distribution image is
used: the errors are those of held-out images, and the outliers are made from in-distribution images.

`--data` has `train_x` to train on and `test_x` to measure on. A finished candidate is kept in OUT
and not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import UNet2DModel
from diffusers.training_utils import EMAModel
from torch.utils.flop_counter import FlopCounterMode

import gepc
from gepc.core.tables import markdown_table
from gepc.images.formats import read_npz
from gepc.images.synthetic import KINDS, synthetic_outlier
from gepc.lab.metrics import auroc
from gepc.lab.training.data import Draw, draw, load_training_images, low_noise_table
from gepc.lab.training.loop import learning_rate
from gepc.lab.training.recipe import Recipe, alphas_cumprod, build_scheduler

Images = npt.NDArray[np.float32]
LEVELS = (0.9999, 0.998, 0.99, 0.97, 0.9, 0.5)
BATCH, MEASURED, FITTED, CHANGED = 32, 512, 200, 100
NOISE_SEED = 1


@dataclass(frozen=True)
class Candidate:
    """A network and how it is trained."""

    channels: tuple[int, ...] = (16, 32, 64)
    options: dict[str, Any] = field(default_factory=dict)  # of UNet2DModel, where they differ from those of `build`
    bfloat16: bool = False
    teacher: str | None = None  # a backbone whose prediction replaces part of the noise as the target
    teacher_share: float = 0.7
    rate: float = 8e-4


ONE_GROUP = {"norm_num_groups": 1}
SCALE_SHIFT = {**ONE_GROUP, "resnet_time_scale_shift": "scale_shift"}
CANDIDATES = {
    "present": Candidate((32, 64, 96)),
    "narrow": Candidate(),
    "narrow, 1 group": Candidate(options=ONE_GROUP),
    "narrow, 1 group, bfloat16": Candidate(options=ONE_GROUP, bfloat16=True),
    "the same, four resolutions": Candidate((16, 32, 64, 64), options=ONE_GROUP, bfloat16=True),
    "the same, no middle block": Candidate(options={**ONE_GROUP, "mid_block_type": None}, bfloat16=True),
    "the same, distilled": Candidate(options=ONE_GROUP, bfloat16=True, teacher="photos-tiny"),
    "the same, scale and shift": Candidate(options=SCALE_SHIFT, bfloat16=True),
    "the same, rate 2e-3": Candidate(options=ONE_GROUP, bfloat16=True, rate=2e-3),
    "the same, scale and shift, rate 2e-3": Candidate(options=SCALE_SHIFT, bfloat16=True, rate=2e-3),
}


def build(candidate: Candidate) -> UNet2DModel:
    """The network with random weights; the same for every run."""
    torch.manual_seed(0)
    levels = len(candidate.channels)
    options: dict[str, Any] = {
        "sample_size": 32,
        "block_out_channels": candidate.channels,
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D",) * levels,
        "up_block_types": ("UpBlock2D",) * levels,
        "norm_num_groups": 8,
        "add_attention": False,
    }
    net = UNet2DModel(**{**options, **candidate.options})
    return net.to(memory_format=torch.channels_last)


def train(candidate: Candidate, images: Images, recipe: Recipe, minutes: float) -> tuple[UNet2DModel, int]:
    """Train for `minutes` of CPU time; the network with its averaged weights, and the number of steps."""
    net = build(candidate)
    teacher = None if candidate.teacher is None else gepc.load_backbone(candidate.teacher).net
    optimizer = torch.optim.AdamW(net.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    average = EMAModel(net.parameters(), decay=recipe.ema_decay, foreach=True)
    abar = alphas_cumprod(recipe)
    table = low_noise_table(recipe, abar)
    begun, step, fraction = time.process_time(), 0, 0.0
    while fraction < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, fraction)
        batch = draw(recipe, len(images), images.shape[1:], table, step)
        noisy, noise, timesteps = noised(batch, images, abar)
        target = noise
        with torch.autocast("cpu", torch.bfloat16, enabled=candidate.bfloat16):
            predicted = net(noisy, timesteps, return_dict=False)[0]
            if teacher is not None:
                with torch.no_grad():
                    known = teacher(noisy, timesteps, return_dict=False)[0]
                target = torch.lerp(noise, known.float(), candidate.teacher_share)
        loss = torch.nn.functional.mse_loss(predicted.float(), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), recipe.gradient_clip)
        optimizer.step()
        optimizer.zero_grad()
        average.step(net.parameters())
        step += 1
        fraction = (time.process_time() - begun) / (60.0 * minutes)
    average.copy_to(net.parameters())
    return net.eval(), step


def noised(batch: Draw, images: Images, abar: npt.NDArray[np.float64]) -> tuple[torch.Tensor, ...]:
    """The noisy images of a step, their noise and their timesteps."""
    chosen = images[batch.indices]
    chosen[batch.flip_x] = chosen[batch.flip_x][..., ::-1]
    level = abar[batch.timesteps][:, None, None, None]
    noisy = np.sqrt(level) * chosen + np.sqrt(1.0 - level) * batch.noise
    x = torch.from_numpy(noisy.astype(np.float32)).to(memory_format=torch.channels_last)
    return x, torch.from_numpy(batch.noise), torch.from_numpy(batch.timesteps)


@torch.no_grad()
def held_out_errors(net: UNet2DModel, images: Images, abar: npt.NDArray[np.float64]) -> list[float]:
    """Mean squared error of the predicted noise at each of the `LEVELS`; the noise is the same for every network."""
    errors = []
    for level in LEVELS:
        timestep = int(np.abs(np.sqrt(abar) - level).argmin())
        noise = np.random.default_rng([NOISE_SEED, timestep]).standard_normal(images.shape, dtype=np.float32)
        noisy = np.sqrt(abar[timestep]) * images + np.sqrt(1.0 - abar[timestep]) * noise
        total = 0.0
        for start in range(0, len(images), BATCH):
            x = torch.from_numpy(noisy[start : start + BATCH].astype(np.float32)).to(memory_format=torch.channels_last)
            missed = net(x, timestep, return_dict=False)[0] - torch.from_numpy(noise[start : start + BATCH])
            total += float(missed.double().square().sum())
        errors.append(total / images.size)
    return errors


def outlier_aurocs(net: UNet2DModel, recipe: Recipe, images: Images) -> dict[str, float]:
    """AUROC of gepc+ between images and their synthetic outliers, by kind; fitted on other images of the same kind."""
    backbone = gepc.load_backbone(net, scheduler=build_scheduler(recipe))
    normal = images[FITTED : FITTED + CHANGED]
    detector = gepc.create_detector(backbone).fit(images[:FITTED])
    inside = detector.score(normal)
    outside = {kind: np.stack([synthetic_outlier(image, kind) for image in normal]) for kind in KINDS}
    return {kind: auroc(inside, detector.score(changed)) for kind, changed in outside.items()}


@torch.no_grad()
def cost(net: UNet2DModel) -> tuple[float, float]:
    """Thousands of floating-point operations per pixel, and milliseconds per 32x32 image in a batch of 32."""
    x = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    with FlopCounterMode(display=False) as counter:
        net(x, 100)
    seconds = []
    for _ in range(9):
        begun = time.process_time()
        net(x, 100)
        seconds.append(time.process_time() - begun)
    return counter.get_total_flops() / (BATCH * 32 * 32) / 1e3, 1e3 * float(np.median(seconds)) / BATCH


def measure(name: str, data: Path, minutes: float) -> dict[str, Any]:
    """Train a candidate and measure it."""
    candidate = CANDIDATES[name]
    recipe = Recipe(
        diffusion_steps=4000, image_channels=3, learning_rate=candidate.rate, batch_size=BATCH, warmup_steps=100
    )
    found = load_training_images(data, recipe)
    test = read_npz(data, "test_x").astype(np.float32) / 127.5 - 1.0
    test = np.ascontiguousarray(test.transpose(0, 3, 1, 2))
    net, steps = train(candidate, found.images, recipe, minutes)
    kiloflop, milliseconds = cost(net)
    abar = alphas_cumprod(recipe)
    return {
        "candidate": asdict(candidate),
        "weights": sum(parameter.numel() for parameter in net.parameters()),
        "kiloflop per pixel": kiloflop,
        "milliseconds per pass": milliseconds,
        "minutes": minutes,
        "steps": steps,
        "levels": LEVELS,
        "held-out crops": held_out_errors(net, found.held_out, abar),
        "held-back pictures": held_out_errors(net, test[-MEASURED:], abar),
        "synthetic outliers": outlier_aurocs(net, recipe, test),
    }


def table(results: dict[str, dict[str, Any]]) -> str:
    """One row per candidate; errors are those on held-back pictures."""
    rows = []
    for name, result in results.items():
        errors = [f"{error:.4f}" for error in result["held-back pictures"]]
        mean = float(np.mean(list(result["synthetic outliers"].values())))
        rows.append(
            (
                name,
                str(tuple(result["candidate"]["channels"])),
                f"{result['weights'] / 1e6:.2f} M",
                f"{result['kiloflop per pixel']:.0f}",
                f"{result['milliseconds per pass']:.2f}",
                str(result["steps"]),
                *errors,
                f"{mean:.3f}",
            )
        )
    errors = [f"error at {level:g}" for level in LEVELS]
    head = ("network", "channels", "weights", "kFLOP per pixel", "ms per pass", "steps", *errors, "outliers")
    return markdown_table(head, rows)


def main() -> None:
    """Train the candidates that are not in OUT yet, then print the table of all that are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="an npz file with train_x and test_x")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the results")
    parser.add_argument("--only", help="train only these candidates, by name, separated by semicolons")
    parser.add_argument("--minutes", type=float, default=5.0, help="CPU time of each candidate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in CANDIDATES if options.only is None else options.only.split(";"):
        path = options.out / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(measure(name, options.data, options.minutes), indent=1) + "\n")
        elif json.loads(path.read_text())["minutes"] != options.minutes:
            parser.error(f"{path} is a result of other --minutes; give another folder")
    finished = {name: options.out / f"{name}.json" for name in CANDIDATES}
    results = {name: json.loads(path.read_text()) for name, path in finished.items() if path.exists()}
    print(table(results))


if __name__ == "__main__":
    main()
