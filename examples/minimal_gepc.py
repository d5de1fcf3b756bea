"""The whole method on one page: add noise, transform the image, predict again, map the prediction back, compare.

Run it with `python examples/minimal_gepc.py`. The library (`gepc.GEPC`) adds noise that depends on the image instead of
the batch, any backbone, p-values, maps and saved detectors.
"""

import os

import numpy as np
import torch
from skimage import data

import gepc

# The paper's group: each action with its inverse.
GROUP = [
    (lambda x: x.flip(-1), lambda x: x.flip(-1)),
    (lambda x: x.flip(-2), lambda x: x.flip(-2)),
    (lambda x: x.rot90(1, (-2, -1)), lambda x: x.rot90(-1, (-2, -1))),
    (lambda x: x.rot90(2, (-2, -1)), lambda x: x.rot90(-2, (-2, -1))),
    (lambda x: x.roll(1, -1), lambda x: x.roll(-1, -1)),
    (lambda x: x.roll(1, -2), lambda x: x.roll(-1, -2)),
]


def pool(energy: torch.Tensor, share: float = 0.3) -> torch.Tensor:
    """Mean over channels, then over the 30 % largest pixels."""
    pixels = energy.mean(1).flatten(1)
    return pixels.topk(int(share * pixels.shape[1])).values.mean(1)


def gepc_s(backbone: gepc.Backbone, x0: torch.Tensor, t: int) -> torch.Tensor:
    """z_t = mean_g pool(|P_g^-1 s(P_g x_t) - s(x_t)|^2) / pool(|s(x_t)|^2), the identity's residual being zero."""
    abar = backbone.alphas_cumprod[t]
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(t))
    x_t = abar**0.5 * x0 + (1 - abar) ** 0.5 * noise
    score = backbone.score(x_t, t)
    residuals = [pool((inverse(backbone.score(action(x_t), t)) - score).square()) for action, inverse in GROUP]
    return sum(residuals) / (len(GROUP) + 1) / pool(score.square())


def log_density(values: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """A Gaussian kernel density of the in-distribution values, Silverman's bandwidth."""
    spread = min(samples.std(), np.subtract(*np.percentile(samples, [75, 25])) / 1.34)
    z = (values[:, None] - samples) / (0.9 * spread * len(samples) ** -0.2)
    return np.logaddexp.reduce(-0.5 * z**2, axis=1)


def patches(image: np.ndarray, count: int, seed: int) -> torch.Tensor:
    """Random 32x32 patches of a grey image, as RGB in [-1, 1]."""
    rng = np.random.default_rng(seed)
    corners = zip(rng.integers(0, image.shape[0] - 32, count), rng.integers(0, image.shape[1] - 32, count), strict=True)
    cut = np.stack([image[row : row + 32, column : column + 32] for row, column in corners])
    return torch.from_numpy(cut / 127.5 - 1.0).float()[:, None].repeat(1, 3, 1, 1)


def main(count: int = 60) -> float:
    """Fit on gravel and separate gravel from grass."""
    backbone = gepc.load_backbone("celeba32-small")
    timesteps = gepc.Levels((0.9999, 0.9979, 0.99, 0.97)).timesteps(backbone.alphas_cumprod)
    sets = {
        "train": patches(data.gravel()[:256], 2 * count, 0),
        "inside": patches(data.gravel()[256:], count, 1),
        "outside": patches(data.grass(), count, 2),
    }
    with torch.no_grad():
        z = {name: torch.stack([gepc_s(backbone, x, t) for t in timesteps]).numpy() for name, x in sets.items()}
    cv = z["train"].std(1) / z["train"].mean(1)
    kept = np.argsort(cv)[:2]  # the most stable levels on in-distribution images
    weights = (1 / cv[kept]) / (1 / cv[kept]).sum()
    score = {
        name: -sum(w * log_density(z[name][k], z["train"][k]) for k, w in zip(kept, weights, strict=True))
        for name in ("inside", "outside")
    }
    auroc = float((score["outside"][:, None] > score["inside"][None, :]).mean())
    print(f"kept timesteps {[timesteps[k] for k in kept]}, AUROC gravel against grass {auroc:.3f}")
    return auroc


if __name__ == "__main__":
    main(3 if os.environ.get("GEPC_EXAMPLE_SIZE") == "small" else 60)
