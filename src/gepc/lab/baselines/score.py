"""Methods that read the predicted score at single noise levels: its norm, curvature and transported copies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gepc.backbones.base import Backbone
from gepc.backbones.schedule import Levels, rho_of
from gepc.core.options import at_least, one_of
from gepc.images import noise
from gepc.methods.base import Batch, Cost, Features, PerLevel, register, to_tensor
from gepc.methods.groups import Group, Transform
from gepc.methods.pooling import energy, total
from gepc.methods.presets import Preset, Presets


@register("score_norm")
@dataclass(frozen=True)
class ScoreNorm(PerLevel):
    """Score norm: how large the predicted score is. It does not measure symmetry.

        n_t = mean over draws of |s(x_t, t)|        s = -eps/sigma_t

    Against data smoother than the training set the raw norm falls instead of rising; the density over ID values is
    two-sided and covers both. Near pure noise |eps| tends to sqrt(D) for any image.

    Parameters
    ----------
    levels : noise levels.
    draws : noise draws to average over.
    of : `score`, or `eps` for |eps| = sigma_t |s|. The norm along an inversion is `diffpath` with dim=1, root=eps.
    """

    presets: ClassVar[Presets] = {"paper": Preset({"levels": Levels.rho(0.17)}), "light": Preset()}

    levels: Levels = Levels.rho(0.05, 0.17, 0.52)
    draws: int = at_least(1, 1)
    of: str = one_of("score", "eps")

    def level_cost(self, size: tuple[int, int]) -> Cost:
        return Cost(forward=self.draws)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        sigma = float(np.sqrt(1.0 - backbone.alphas_cumprod[t])) if self.of == "score" else 1.0
        noised = (batch.noised(backbone, t, draw)[0] for draw in range(self.draws))
        norms = [energy(backbone.eps(x_t, t)).sqrt() / sigma for x_t in noised]
        return {"score_norm": torch.stack(norms).mean(0)}


def signs(backbone: Backbone, batch: Batch, *numbers: int) -> Tensor:
    """A Rademacher field (+-1) for each image, shaped like the batch; `numbers` distinguish probes."""
    shape = batch.images.shape[1:]
    generators = (noise.generator(batch.seed, key, "probe", *numbers) for key in batch.keys)
    fields = [generator.integers(0, 2, shape, dtype=np.int8) for generator in generators]
    return to_tensor(np.stack(fields), backbone) * 2.0 - 1.0


def eps_and_trace(backbone: Backbone, x: Tensor, t: int, probes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """eps(x, t) and Hutchinson's estimate tr J = E v^T J v of tr(d eps/dx), (N,) float64, averaged over probes v."""
    found = [backbone.jvp(x, t, probe) for probe in probes]
    traces = [total(probe.double() * tangent.double()) for probe, (_, tangent) in zip(probes, found, strict=True)]
    return found[0][0], torch.stack(traces).mean(0)


@register("scoped")
@dataclass(frozen=True)
class SCOPED(PerLevel):
    """SCOPED: the squared score over its curvature. Barkley, Culbertson & Fridovich-Keil, 2025.

        T = |eps|^2 / (sigma_t tr(d eps/dx)) = |s|^2 / -tr(ds/dx), about 1 on typical images

    at two levels, times a global sign; the score is the largest -log density over the levels, with T standardised at
    each. Their code is not public: the sign factor, which the paper calls necessary on images, is read as the sign of
    sum_i s_i, which is unverified. The curvature -tr(ds/dx), at least D for the exact score of data with a variance up
    to 1, is kept at least D/1000 in size and keeps its sign (the table counts where).

    Parameters
    ----------
    levels : noise levels.
    probes : Hutchinson probes; the trace is averaged over them, not T.
    sign : `sum` multiplies T by the sign of sum_i s_i, `none` does not.
    noised : evaluate the noised image x_t; otherwise sqrt(abar_t) x_0, without noise.
    """

    calibration: ClassVar[str] = "kde:standardise=true"
    aggregate: ClassVar[str] = "max"
    presets: ClassVar[Presets] = {
        "paper": Preset(),
        "light": Preset({"levels": Levels.rho(0.13)}),
        "unsigned": Preset({"levels": Levels.rho(0.13), "sign": "none"}),
    }
    smallest: ClassVar[float] = 1e-3

    levels: Levels = Levels.rho(0.0045, 0.13)
    probes: int = at_least(1, 1)
    sign: str = one_of("sum", "none")
    noised: bool = True

    def level_cost(self, size: tuple[int, int]) -> Cost:
        return Cost(forward=self.probes, jvp=self.probes)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """T as `scoped`, and where its denominator had to be kept away from 0 as `clamped`."""
        x_t = batch.noised(backbone, t)[0] if self.noised else batch.scaled(backbone, t)
        probes = [signs(backbone, batch, t, probe) for probe in range(self.probes)]
        eps, trace = eps_and_trace(backbone, x_t, t, probes)
        sigma = float(np.sqrt(1.0 - backbone.alphas_cumprod[t]))
        kappa = trace * sigma
        floor = self.smallest * eps[0].numel() * sigma**2
        small = kappa.abs() < floor
        value = energy(eps) / kappa.sign().where(kappa != 0, 1.0).mul(floor).where(small, kappa)
        if self.sign == "sum":
            value = value * total(eps).lt(0).double().mul(2.0).sub(1.0)
        return {"scoped": value, "clamped": small.double()}


@register("eigenscore")
@dataclass(frozen=True)
class EigenScore(PerLevel):
    """EigenScore: the largest eigenvalues of the posterior covariance. Shoushtari et al., 2025.

        Cov[x_0 | y] = rho^2 d xhat0/dy,  y = x_t/sqrt(abar)      m_t = mean over draws of lambda_1 + ... + lambda_K

    summed over levels as z-scores. The eigenvectors come from subspace iteration with central differences
    J v = [xhat0(y + c v) - xhat0(y - c v)]/(2c), and the eigenvalues are Rayleigh quotients rho^2 v^T J v. The step is
    c = |y|/100 within [0.05, 1]: below, float32 rounding dominates. The authors' code discards draws that do not
    converge and chooses aggregation with OOD images; here iterations and levels are given, and every draw counts.

    Parameters
    ----------
    levels : noise levels.
    k : number of eigenvalues to sum.
    iterations : products with the Jacobian per eigenvalue; the last one gives the quotient.
    draws : noise draws.
    """

    calibration: ClassVar[str] = "z"
    presets: ClassVar[Presets] = {
        "paper": Preset(
            {"levels": Levels.rho(0.342, 0.522, 0.724, 0.958, 1.24), "k": 3, "iterations": 50, "draws": 20}
        ),
        "light": Preset(),
    }

    levels: Levels = Levels.rho(0.342, 0.724, 1.24)
    k: int = at_least(1, 1)
    iterations: int = at_least(1, 8)
    draws: int = at_least(1, 2)

    def level_cost(self, size: tuple[int, int]) -> Cost:
        return Cost(forward=2 * self.k * self.iterations * self.draws)

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        found = torch.stack([self.eigenvalues(backbone, batch, t, draw).sum(1) for draw in range(self.draws)], 1)
        return {self.name: found.mean(1)}

    def eigenvalues(self, backbone: Backbone, batch: Batch, t: int, draw: int) -> Tensor:
        """(N, k) float64, largest first."""
        rho = float(rho_of(backbone.alphas_cumprod[t]))
        y = batch.noised(backbone, t, draw)[0] / float(backbone.alphas_cumprod[t]) ** 0.5
        # the starting vectors are noise of their own: draws beyond those that noise the image
        first = self.draws + draw * self.k
        vectors = [batch.noise(backbone, t, first + place) for place in range(self.k)]
        for _ in range(self.iterations):
            columns = torch.linalg.qr(torch.stack([vector.flatten(1) for vector in vectors], 2))[0]
            basis = [columns[:, :, place].reshape(y.shape) for place in range(self.k)]
            vectors = [_product(backbone, y, t, v) for v in basis]
        quotients = [total(v.double() * product.double()) for v, product in zip(basis, vectors, strict=True)]
        return rho**2 * torch.stack(quotients, 1).sort(dim=1, descending=True).values


def _product(backbone: Backbone, y: Tensor, t: int, v: Tensor) -> Tensor:
    """d xhat0/dy times unit vectors v: v - rho d eps/dy v, by a central difference of eps."""
    root = float(backbone.alphas_cumprod[t]) ** 0.5
    rho = float(rho_of(backbone.alphas_cumprod[t]))
    c: Tensor = (0.01 * y.flatten(1).norm(dim=1)).clamp(0.05, 1.0).reshape(-1, 1, 1, 1)
    slope = (backbone.eps(root * (y + c * v), t) - backbone.eps(root * (y - c * v), t)) / (2.0 * c)
    return v - rho * slope


@register("idecode")
@dataclass(frozen=True)
class IDecode(PerLevel):
    """iDECODe on the GEPC residual. Kaur et al., AAAI 2022, without its trained network.

        alpha_j = |P_g^-1 s(P_g x_t) - s(x_t)|^2 / |s(x_t)|^2,  g_j uniform on G without the identity, j = 1 ... n

    The statistic is sum_j alpha_j; calibration images draw noise and elements of their own, as every image does.

    Parameters
    ----------
    levels : noise levels.
    n : number of random elements per image.
    group : the actions to draw from; see `Group.of`.
    """

    calibration: ClassVar[str] = "raw"
    presets: ClassVar[Presets] = {"paper": Preset(), "light": Preset()}

    levels: Levels = Levels.rho(0.065)
    n: int = at_least(1, 5)
    group: Group = Group.of("paper")

    def level_cost(self, size: tuple[int, int]) -> Cost:
        return Cost(forward=self.n + 1)  # the reference, and an element drawn twice is evaluated twice

    def at_level(self, backbone: Backbone, batch: Batch, t: int) -> Features:
        """sum_j alpha_j, from eps, where sigma cancels."""
        x_t, _ = batch.noised(backbone, t)
        actions = self.group.for_size(*batch.size).moving
        chosen = self._choose(batch, t, len(actions))
        base = backbone.eps(x_t, t)
        gaps = base.new_zeros(len(batch)).double()
        for picks in chosen.T:
            moved = backbone.eps(_each(x_t, picks, [action.apply for action in actions]), t)
            gaps += energy(_each(moved, picks, [action.inverse for action in actions]) - base)
        return {"idecode": gaps / energy(base)}

    def _choose(self, batch: Batch, t: int, count: int) -> npt.NDArray[np.int64]:
        """Positions of the n elements of every image, (N, n), independent and with repetition."""
        draws = [noise.generator(batch.seed, key, "idecode", t).integers(0, count, self.n) for key in batch.keys]
        return np.stack(draws)


def _each(x: Tensor, picks: npt.NDArray[np.int64], transforms: Sequence[Transform]) -> Tensor:
    """Every image moved by its own transform."""
    out = torch.empty_like(x)
    for position in np.unique(picks):
        rows = torch.from_numpy(np.flatnonzero(picks == position)).to(x.device)
        out[rows] = transforms[int(position)](x[rows])
    return out
