"""Put a trained network into the package, with its weights rounded to 16 bits, which halves the size of the wheel.

    python benchmarks/embed.py RUN photos-small

`RUN` is a folder that `gepc train` wrote, or any other diffusers folder. The weights become float16 in
`src/gepc/weights/NAME`; they are computed with in float32 all the same. The script prints the mean squared difference
between the predictions of both networks at every level of a model card, which should be far below the error of the
network. Write `LICENSE.md` beside the weights by hand.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import gepc
from gepc.core.tables import markdown_table
from gepc.lab.training.evaluate import LEVELS

FOLDER = Path(__file__).parents[1] / "src" / "gepc" / "weights"
CONFIGS = ("config.json", "scheduler_config.json")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def embed(run: Path, name: str) -> Path:
    """Write the folder of the embedded network `name`."""
    folder = FOLDER / name
    folder.mkdir(exist_ok=True)
    tensors = load_file(run / WEIGHTS)
    for config in CONFIGS:
        if run.resolve() != folder.resolve():
            shutil.copy(run / config, folder / config)
    save_file({key: tensor.half() for key, tensor in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    return folder


def differences(before: gepc.Backbone, after: gepc.Backbone, images: int = 64) -> str:
    """The mean squared difference of the predicted noise, for pure noise as the input of every level."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(images, before.channels, 32, 32, generator=generator)
    rows = []
    for level in LEVELS:
        (t,) = gepc.Levels.sqrt_abar(level).timesteps(before.alphas_cumprod)
        change = (before.eps(x, t) - after.eps(x, t)).square().mean().item()
        rows.append((f"{level:g}", f"{change:.2g}"))
    return markdown_table(("level", "mean squared difference"), rows, aligned=True)


def main() -> None:
    """Embed one network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder with the trained network")
    parser.add_argument("name", help="its name in the package")
    options = parser.parse_args()
    before = gepc.load_backbone(str(options.run))
    folder = embed(options.run, options.name)
    print(f"{folder / WEIGHTS}: {(folder / WEIGHTS).stat().st_size:,} bytes")
    print(differences(before, gepc.load_backbone(str(folder))))


if __name__ == "__main__":
    main()
