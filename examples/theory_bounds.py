"""The residual and its bounds for growing mean shift, anisotropy and distance, and cases where printed bounds fail.

Run it with `python examples/theory_bounds.py`; it writes `theory-bounds.png`. The derivations are in docs/theory.md.
"""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from gepc.lab import theory
from gepc.lab.analytic import MixtureBackbone
from gepc.lab.theory import Affine, CrossBounds, Gaussian, ResidualBounds, Subspace

SHAPE, D, ABAR = (1, 4, 4), 16, 0.9
BLUE, GREY, RED = "#2a6a9e", "#59626e", "#b9501b"
RAMP = np.repeat(np.linspace(-1, 1, 4), 4)  # dark above, light below, as a vector


def trained_on(p: Gaussian, images: int = 2000) -> Affine:
    """The score of the Gaussian fitted to `images` draws of p: a well-trained backbone, with an honest error."""
    draws = np.random.default_rng(0).multivariate_normal(p.mean, p.cov, images)
    return Gaussian(draws.mean(0), np.cov(draws.T)).score


def mean_shift(length: float) -> ResidualBounds:
    """N(mu, I/2) with |mu| = length under {Id, -Id}, seen by a backbone trained on it."""
    p = Gaussian(length * RAMP / np.linalg.norm(RAMP), 0.5 * np.eye(D))
    return theory.expected_bounds(trained_on(p), p, theory.matrices_of("sign", SHAPE))


def anisotropy(ratio: float) -> ResidualBounds:
    """The upper half of the image varies `ratio` times as much as the lower one; quarter turns do not keep that."""
    p = Gaussian(np.zeros(D), np.diag(np.repeat([0.5 * ratio, 0.5], D // 2)))
    return theory.expected_bounds(trained_on(p), p, theory.matrices_of("c4", SHAPE))


def equivariant_backbone(length: float) -> ResidualBounds:
    """A backbone that learned N(0, I/2) perfectly, shown N(mu, I/2): it is equivariant everywhere and sees nothing."""
    p = Gaussian(length * RAMP / np.linalg.norm(RAMP), 0.5 * np.eye(D))
    return theory.expected_bounds(Gaussian(np.zeros(D), p.cov).score, p, theory.matrices_of("sign", SHAPE))


def wrong_variance(ratio: float) -> ResidualBounds:
    """A backbone whose variance is `ratio` times that of p = N(0, I): still equivariant; the printed bound is not 0."""
    p = Gaussian(np.zeros(D), np.eye(D))
    return theory.expected_bounds(Gaussian(p.mean, ratio * p.cov).score, p, theory.matrices_of("sign", SHAPE))


def off_manifold(distance: float, points: int = 40) -> CrossBounds:
    """A mixture on the plane of brightness and gradients, probed `distance` away from it in random directions."""
    plane = Subspace.spanned_by(np.stack([np.ones(D), RAMP, RAMP.reshape(4, 4).T.ravel()], axis=1))
    off = np.eye(D) - plane.basis @ plane.basis.T
    rng = np.random.default_rng(1)
    uneven = off @ np.diag(rng.uniform(0.01, 0.1, D)) @ off
    covs = [0.1 * (np.eye(D) - off) + scale * uneven for scale in (1.0, 2.0)]
    backbone = MixtureBackbone([0.6, 0.4], [0.3, -0.3], covs, SHAPE, [ABAR])
    step = rng.standard_normal((points, D)) @ off
    step *= distance / np.linalg.norm(step, axis=1, keepdims=True)
    x = plane.project(0.5 * rng.standard_normal((points, D))) + step
    return theory.cross_bounds(theory.field_of(backbone, 0), x, plane, theory.matrices_of("c4", SHAPE))


def linear_score(distance: float) -> CrossBounds:
    """s(x) = -A x under {Id, -Id}: odd, so the residual is 0 at every distance."""
    directions = np.random.default_rng(2).standard_normal((40, 2))
    return theory.cross_counter_example(distance * directions / np.linalg.norm(directions, axis=1, keepdims=True))


PANELS = [
    ("mean shift", r"$|\mu|$", mean_shift, np.linspace(0, 3, 13)),
    ("anisotropy", "variance above / below", anisotropy, np.linspace(1, 8, 15)),
    ("distance to the manifold", "d", off_manifold, np.geomspace(0.05, 5, 15)),
    ("no guarantee: an equivariant backbone", r"$|\mu|$", equivariant_backbone, np.linspace(0, 3, 13)),
    ("the printed lower bound fails", "variance learned / true", wrong_variance, np.linspace(1, 4, 13)),
    ("the printed cross-backbone bound fails", "d", linear_score, np.geomspace(0.05, 5, 15)),
]


def draw(panels: list, thin: int = 1) -> Figure:
    """Residual (blue) between its bounds (grey), with the printed lower bound dashed."""
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    for axes, (title, label, terms, values) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        grid = values[::thin]
        bounds = [terms(value) for value in grid]
        lower, residual, upper, printed = (
            np.array([np.mean(getattr(b, name)) for b in bounds])
            for name in ("lower", "residual", "upper", "printed_lower")
        )
        if (lower > residual * (1 + 1e-9) + 1e-12).any() or (residual > upper * (1 + 1e-9)).any():
            raise SystemExit(f"{title}: the residual leaves its bounds")
        axes.fill_between(grid, lower, upper, color=GREY, alpha=0.15, linewidth=0, label="between the bounds")
        axes.plot(grid, residual, color=BLUE, linewidth=2, label="residual")
        axes.plot(grid, printed, color=RED, linestyle="--", linewidth=1.3, label="printed lower bound")
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(label)
        axes.set_yscale("symlog", linthresh=1.0)
        axes.set_ylim(-0.15, None)  # a residual of 0 stays visible
        if label == "d":
            axes.set_xscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("theory-bounds.png"))
    parser.add_argument("--small", action="store_true", help="a few points only")
    options = parser.parse_args()
    draw(PANELS, thin=6 if options.small else 1).savefig(options.out, dpi=110)
    print(f"every residual lies between its bounds; {options.out} written")


if __name__ == "__main__":
    main()
