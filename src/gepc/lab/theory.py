"""The paper's statements as functions: each term of each formula, computed where scores are known exactly.

Images are row vectors here, (N, D), D = C H W in C order, and everything is float64. A field is any function from
such vectors to such vectors; `field_of` makes one from a backbone at one timestep. Group elements are matrices; see
`matrices_of`. The page Theory derives the bounds.

The expected residual (proposition "Expected GEPC residual bounds"), with e = s_theta - s_p and
Delta_E = E|P_g^-1 e(P_g x) - e(x)|^2:

    (sqrt(B) - sqrt(Delta_E))^2  <=  E R  <=  2 B + 4 E|e(x)|^2 + 4 E|e(P_g x)|^2

The residual away from the backbone's own data (proposition "Cross-backbone pointwise bounds"), with z = pi(x) the
nearest point of a set that the group maps to itself, d = |x - z|, delta(x) = s(x) - s(z), rho^2 = E_g R(z), and beta
the largest number with E_g|P_g^-1 delta(P_g x) - delta(x)|^2 >= beta^2 d^2:

    max(0, beta d - rho)^2  <=  E_g R(x)  <=  2 E_g R(z) + 8 L^2 d^2

The paper prints other lower bounds, which do not hold: `error_term_counter_example`, `cross_counter_example`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import softmax
from scipy.stats import multivariate_normal

from gepc.backbones.base import Backbone
from gepc.core.errors import InputError
from gepc.lab.analytic import MixtureBackbone
from gepc.methods.groups import Group

Array: TypeAlias = npt.NDArray[np.float64]
Field: TypeAlias = Callable[[Array], Array]


@dataclass(frozen=True)
class Affine:
    """The field f(x) = A x + c. Scores of Gaussians are affine, which gives closed forms for expectations.

    Parameters
    ----------
    A : float array (D, D)
    c : float array (D,)

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import Affine
    >>> Affine(2.0 * np.eye(2), np.array([1.0, 0.0]))(np.array([[1.0, 1.0]])).tolist()
    [[3.0, 2.0]]
    """

    A: Array
    c: Array

    def __call__(self, x: Array) -> Array:
        """f at the rows of x (N, D)."""
        return x @ self.A.T + self.c

    def __sub__(self, other: Affine) -> Affine:
        return Affine(self.A - other.A, self.c - other.c)

    def after(self, P: Array) -> Affine:
        """x -> f(P x).

        Parameters
        ----------
        P : float array (D, D)

        Returns
        -------
        Affine

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Affine
        >>> field = Affine(np.diag([2.0, 1.0]), np.zeros(2))
        >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
        >>> field.after(swap)(np.array([[1.0, 0.0]])).tolist()
        [[0.0, 1.0]]
        """
        return Affine(self.A @ P, self.c)

    def residual(self, P: Array) -> Affine:
        """Delta_g f: x -> P^-1 f(P x) - f(x), with P^-1 = P^T.

        Parameters
        ----------
        P : orthogonal float array (D, D)

        Returns
        -------
        Affine

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Affine
        >>> field = Affine(np.diag([2.0, 1.0]), np.zeros(2))
        >>> swap = np.array([[0.0, 1.0], [1.0, 0.0]])
        >>> field.residual(swap)(np.array([[1.0, 0.0]])).tolist()
        [[-1.0, 0.0]]
        """
        return Affine(P.T @ self.A @ P, P.T @ self.c) - self

    def energy(self, p: Gaussian) -> float:
        """E_p |f(x)|^2 = tr(A Sigma A^T) + |A mu + c|^2.

        Parameters
        ----------
        p : Gaussian

        Returns
        -------
        float

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Affine, Gaussian
        >>> Affine(2.0 * np.eye(3), np.zeros(3)).energy(Gaussian(np.zeros(3), np.eye(3)))
        12.0
        """
        return float(np.einsum("ij,jk,ik->", self.A, p.cov, self.A) + np.square(self.A @ p.mean + self.c).sum())


@dataclass(frozen=True)
class Gaussian:
    """N(mean, cov) on vectors.

    Parameters
    ----------
    mean : float array (D,)
    cov : float array (D, D)

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import Gaussian
    >>> p = Gaussian(np.zeros(2), 4.0 * np.eye(2))
    >>> p.noised(0.5).cov.tolist()
    [[2.5, 0.0], [0.0, 2.5]]
    >>> p.score(np.array([[2.0, 0.0]])).tolist()
    [[-0.5, 0.0]]
    """

    mean: Array
    cov: Array

    @property
    def score(self) -> Affine:
        """grad log p(x) = -Sigma^-1 (x - mu)."""
        precision: Array = np.linalg.inv(self.cov).astype(np.float64)
        return Affine(-precision, precision @ self.mean)

    def noised(self, abar: float) -> Gaussian:
        """The law of x_t = sqrt(abar) x_0 + sqrt(1 - abar) noise: N(sqrt(abar) mu, abar Sigma + (1 - abar) I).

        Parameters
        ----------
        abar : float

        Returns
        -------
        Gaussian

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Gaussian
        >>> law = Gaussian(np.ones(1), np.eye(1))
        >>> law.noised(0.25).mean
        array([0.5])
        """
        return Gaussian(np.sqrt(abar) * self.mean, abar * self.cov + (1.0 - abar) * np.eye(len(self.mean)))

    def log_density(self, x: Array) -> Array:
        """log p at the rows of x.

        Parameters
        ----------
        x : float array (N, D)

        Returns
        -------
        float array (N,)

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Gaussian
        >>> law = Gaussian(np.ones(1), np.eye(1))
        >>> law.log_density(np.ones((1, 1))).round(3)
        array([-0.919])
        """
        return np.asarray(multivariate_normal(self.mean, self.cov).logpdf(x), dtype=np.float64).reshape(len(x))


def components_of(backbone: MixtureBackbone) -> list[tuple[float, Gaussian]]:
    """The law of x_0 for which an analytic backbone is exact: (share, Gaussian) of each component.

    Parameters
    ----------
    backbone : MixtureBackbone
        An analytic backbone.

    Returns
    -------
    list of (float, Gaussian)

    Examples
    --------
    >>> from gepc.lab.analytic import MixtureBackbone
    >>> from gepc.lab.theory import components_of
    >>> [share for share, _ in components_of(MixtureBackbone([1, 3], [0.2, -0.2], [0.1, 0.1], (1, 2, 2)))]
    [0.25, 0.75]
    """
    found = []
    for weight, part in zip(backbone.shares, backbone.components, strict=True):
        values = part.values.numpy()
        vectors = np.eye(len(values)) if part.vectors is None else part.vectors.numpy()
        found.append((float(weight), Gaussian(part.mu.numpy().ravel(), (vectors * values) @ vectors.T)))
    return found


def image_shape(backbone: Backbone) -> tuple[int, int, int]:
    """(C, H, W) of a backbone with a fixed image size."""
    if backbone.image_size is None:
        raise InputError("this backbone takes images of any size; set its `image_size` to treat images as vectors")
    return (backbone.channels, *backbone.image_size)


def field_of(backbone: Backbone, t: int) -> Field:
    """s(., t) of any backbone with a fixed image size, on vectors.

    Parameters
    ----------
    backbone : Backbone
        A backbone with a fixed image size.
    t : int
        The timestep.

    Returns
    -------
    A function from vectors (N, D) to scores (N, D).

    Raises
    ------
    InputError
        If the backbone takes images of any size.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.lab.theory import field_of
    >>> score = field_of(GaussianBackbone(0.0, 1.0, (1, 1, 2)), t=3)
    >>> score(np.array([[0.5, -1.0]])).round(6).tolist()
    [[-0.5, 1.0]]
    """
    shape = image_shape(backbone)

    def score(x: Array) -> Array:
        images = torch.from_numpy(np.ascontiguousarray(x)).reshape(-1, *shape).to(backbone.dtype)
        return np.asarray(backbone.score(images, t).detach().double().flatten(1).numpy(), dtype=np.float64)

    return score


def matrices_of(group: Group | str, shape: tuple[int, int, int]) -> list[Array]:
    """P_g of every element, identity first, as (D, D) matrices on images of this shape.

    Parameters
    ----------
    group : Group or str
        The group, or its name.
    shape : (int, int, int)
        (C, H, W) of the images.

    Returns
    -------
    list of arrays (D, D)

    Examples
    --------
    >>> from gepc.lab.theory import matrices_of
    >>> [matrix.tolist() for matrix in matrices_of("sign", (1, 1, 1))]
    [[[1.0]], [[-1.0]]]
    """
    size = int(np.prod(shape))
    basis = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    actions = Group.of(group).for_size(*shape[1:])
    return [np.asarray(action.apply(basis).reshape(size, size).numpy().T) for action in actions]


def residuals(field: Field, x: Array, matrices: Sequence[Array]) -> Array:
    """R(x, g) = |P_g^-1 f(P_g x) - f(x)|^2, (N, |G|). Means over G include the identity, whose residual is 0.

    Parameters
    ----------
    field : function from arrays (N, D) to arrays (N, D)
        f, such as a score.
    x : array (N, D)
        The points.
    matrices : sequence of arrays (D, D)
        P_g of every element; see `matrices_of`.

    Returns
    -------
    An array (N, |G|).

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import residuals
    >>> residuals(lambda x: 1.0 - x, np.array([[0.3, 0.1]]), [np.eye(2), -np.eye(2)]).tolist()
    [[0.0, 8.0]]
    """
    here = field(x)
    return np.stack([np.square(field(x @ P.T) @ P - here).sum(1) for P in matrices], axis=1)


@dataclass(frozen=True)
class Posterior:
    """The moments of the clean image given a noisy one, E[x_0 | x_t] and Cov(x_0 | x_t).

    Parameters
    ----------
    mean : float array (N, D)
    cov : float array (N, D, D)

    See Also
    --------
    posterior : computes it.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.lab.theory import posterior
    >>> moments = posterior(GaussianBackbone(0.0, 0.1, (1, 2, 2)), np.zeros((3, 4)), t=5)
    >>> moments.mean.shape, moments.cov.shape
    ((3, 4), (3, 4, 4))
    """

    mean: Array
    cov: Array


def posterior(backbone: MixtureBackbone, x: Array, t: int) -> Posterior:
    """The posterior of x_0 given x_t = x by Bayes' rule, without the score.

    For one Gaussian, with the gain K = sqrt(abar) Sigma Sigma_t^-1: mean mu + K (x - sqrt(abar) mu), covariance
    Sigma - sqrt(abar) K Sigma. For a mixture the parts are weighted by their posterior shares, and the spread of their
    means adds to the covariance.

    Parameters
    ----------
    backbone : MixtureBackbone
        An analytic backbone.
    x : array (N, D)
        The noisy images.
    t : int
        The timestep.

    Returns
    -------
    Posterior

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.lab.theory import posterior
    >>> found = posterior(GaussianBackbone(0.0, 1.0, (1, 1, 2), [0.25]), np.array([[1.0, 0.0]]), 0)
    >>> found.mean.tolist(), found.cov[0].round(6).tolist()
    ([[0.5, 0.0]], [[0.75, 0.0], [0.0, 0.75]])
    """
    abar = float(backbone.alphas_cumprod[t])
    logs, means, covs = [], [], []
    for share, prior in components_of(backbone):
        marginal = prior.noised(abar)
        gain = np.sqrt(abar) * np.linalg.solve(marginal.cov, prior.cov).T
        logs.append(np.log(share) + marginal.log_density(x))
        means.append(prior.mean + (x - marginal.mean) @ gain.T)
        covs.append(prior.cov - np.sqrt(abar) * gain @ prior.cov)
    weights = softmax(np.stack(logs), axis=0)
    mean = np.einsum("kn,kni->ni", weights, np.stack(means))
    spread = np.stack(means) - mean
    cov = np.einsum("kn,kij->nij", weights, np.stack(covs)) + np.einsum("kn,kni,knj->nij", weights, spread, spread)
    return Posterior(mean, cov)


def tweedie(score: Field, x: Array, abar: float) -> Array:
    """m(x_t) = (x_t + sigma_t^2 s(x_t)) / sqrt(abar): the posterior mean, from the score alone.

    Parameters
    ----------
    score : function from arrays (N, D) to arrays (N, D)
        The score at this level.
    x : array (N, D)
        The noisy images.
    abar : float
        The share of the signal's energy at this level.

    Returns
    -------
    An array (N, D).

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import tweedie
    >>> tweedie(lambda x: -x, np.array([[1.0, 0.0]]), 0.25).tolist()
    [[0.5, 0.0]]
    """
    return np.asarray((x + (1.0 - abar) * score(x)) / np.sqrt(abar), dtype=np.float64)


def denoiser_jacobian(backbone: Backbone, x: Array, t: int) -> Array:
    """dm/dx_t = (I + sigma_t^2 ds/dx_t) / sqrt(abar) at every row, (N, D, D), by D Jacobian-vector products each.

    Parameters
    ----------
    backbone : Backbone
        A backbone with a fixed image size.
    x : array (N, D)
        The noisy images.
    t : int
        The timestep.

    Returns
    -------
    An array (N, D, D).

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.lab.theory import denoiser_jacobian
    >>> backbone = GaussianBackbone(0.0, 1.0, (1, 1, 2), [0.25])
    >>> denoiser_jacobian(backbone, np.zeros((1, 2)), 0).round(6).tolist()
    [[[0.5, 0.0], [0.0, 0.5]]]
    """
    shape = image_shape(backbone)
    abar = float(backbone.alphas_cumprod[t])
    size = x.shape[1]
    basis = torch.eye(size, dtype=backbone.dtype).reshape(size, *shape)
    answers = []
    for row in x:
        point = torch.from_numpy(row).to(backbone.dtype).reshape(1, *shape).expand(size, *shape).contiguous()
        _, columns = backbone.jvp(point, t, basis)
        eps_jacobian = columns.detach().double().flatten(1).numpy().T
        answers.append((np.eye(size) - np.sqrt(1.0 - abar) * eps_jacobian) / np.sqrt(abar))
    return np.stack(answers)


def posterior_covariance(backbone: Backbone, x: Array, t: int) -> Array:
    """Cov(x_0 | x_t) = (sigma_t^2 / sqrt(abar)) dm/dx_t; in the paper's coordinates C(y) = sigma~^2 dm/dy.

    Parameters
    ----------
    backbone : Backbone
        A backbone with a fixed image size.
    x : array (N, D)
        The noisy images.
    t : int
        The timestep.

    Returns
    -------
    An array (N, D, D).

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.analytic import GaussianBackbone
    >>> from gepc.lab.theory import posterior_covariance
    >>> backbone = GaussianBackbone(0.0, 1.0, (1, 1, 2), [0.25])
    >>> posterior_covariance(backbone, np.zeros((1, 2)), 0).round(6).tolist()
    [[[0.75, 0.0], [0.0, 0.75]]]
    """
    abar = float(backbone.alphas_cumprod[t])
    return np.asarray((1.0 - abar) / np.sqrt(abar) * denoiser_jacobian(backbone, x, t), dtype=np.float64)


def contraction(score: Field, x: Array, z: Array, abar: float) -> Array:
    """kappa(x, z) = 1 - <m(x) - m(z), y_x - y_z> / |y_x - y_z|^2, y = x_t / sqrt(abar), one for each pair of rows.

    Positive where the denoiser moves the two points closer along the line through them. At most 1, since the Jacobian
    of m is a covariance; negative where it moves them apart, for example between two modes of a mixture.

    Parameters
    ----------
    score : function from arrays (N, D) to arrays (N, D)
        The score at this level.
    x, z : arrays (N, D)
        Pairs of points.
    abar : float
        The share of the signal's energy at this level.

    Returns
    -------
    An array (N,).

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import contraction
    >>> contraction(lambda x: -x, np.array([[1.0, 0.0]]), np.zeros((1, 2)), 0.25).tolist()
    [0.75]
    """
    gap = x - z
    pull = np.einsum("ni,ni->n", tweedie(score, x, abar) - tweedie(score, z, abar), gap)
    return np.asarray(1.0 - np.sqrt(abar) * pull / np.square(gap).sum(1), dtype=np.float64)


def directional_growth(score: Field, x: Array, z: Array) -> Array:
    """m(x, z) = -<s(x) - s(z), x - z> / |x - z|^2: how fast the score pulls back along the line from z to x.

    Tweedie makes it kappa(x, z) / sigma_t^2, an equality; the appendix states it as an inequality.

    Parameters
    ----------
    score : function from arrays (N, D) to arrays (N, D)
        The score.
    x, z : arrays (N, D)
        Pairs of points.

    Returns
    -------
    An array (N,).

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import directional_growth
    >>> directional_growth(lambda x: -2.0 * x, np.array([[1.0, 0.0]]), np.zeros((1, 2))).tolist()
    [2.0]
    """
    gap = x - z
    return np.asarray(-np.einsum("ni,ni->n", score(x) - score(z), gap) / np.square(gap).sum(1), dtype=np.float64)


@dataclass(frozen=True)
class ResidualBounds:
    """Every term of the bounds on the expected residual.

    Parameters
    ----------
    residual : E R_t(x, g), what GEPC measures.
    breaking : B(p), the same for the true score of p.
    error_breaking : Delta_E = E|P_g^-1 e(P_g x) - e(x)|^2.
    printed_error_breaking : E|e(P_g x) - e(x)|^2, the form printed in the paper.
    error : E|e(x)|^2.
    moved_error : E|e(P_g x)|^2.

    Examples
    --------
    >>> from gepc.lab.theory import ResidualBounds
    >>> bounds = ResidualBounds(2.0, 1.0, 4.0, 4.0, 0.5, 0.5)
    >>> bounds.lower, bounds.upper
    (1.0, 6.0)

    See Also
    --------
    expected_bounds, empirical_bounds : compute the terms.
    """

    residual: float
    breaking: float
    error_breaking: float
    printed_error_breaking: float
    error: float
    moved_error: float

    @property
    def upper(self) -> float:
        """u_b = 2 B + 4 E|e(x)|^2 + 4 E|e(P_g x)|^2."""
        return 2.0 * self.breaking + 4.0 * self.error + 4.0 * self.moved_error

    @property
    def lower(self) -> float:
        """l_b = B + Delta_E - 2 sqrt(B Delta_E) = (sqrt(B) - sqrt(Delta_E))^2."""
        return float(np.square(np.sqrt(self.breaking) - np.sqrt(self.error_breaking)))

    @property
    def printed_lower(self) -> float:
        """l_b with the printed Delta_E. Not a bound."""
        return float(np.square(np.sqrt(self.breaking) - np.sqrt(self.printed_error_breaking)))


def expected_bounds(model: Affine, p: Gaussian, matrices: Sequence[Array]) -> ResidualBounds:
    """The terms in closed form, for the score `model` of a Gaussian backbone and a Gaussian test law `p`.

    Parameters
    ----------
    model : Affine
        The score that the backbone has learnt.
    p : Gaussian
        The distribution of test images.
    matrices : sequence of arrays (D, D)
        P_g of every element; see `matrices_of`.

    Returns
    -------
    ResidualBounds

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import Gaussian, expected_bounds
    >>> p, q = Gaussian(np.ones(2), np.eye(2)), Gaussian(np.zeros(2), np.eye(2))
    >>> found = expected_bounds(q.score, p, [np.eye(2), -np.eye(2)])
    >>> found.lower <= found.residual <= found.upper
    True
    """

    def mean(field: Callable[[Array], Affine]) -> float:
        return float(np.mean([field(P).energy(p) for P in matrices]))

    truth, e = p.score, model - p.score
    return ResidualBounds(
        residual=mean(model.residual),
        breaking=mean(truth.residual),
        error_breaking=mean(e.residual),
        printed_error_breaking=mean(lambda P: e.after(P) - e),
        error=e.energy(p),
        moved_error=mean(e.after),
    )


def empirical_bounds(model: Field, truth: Field, x: Array, matrices: Sequence[Array]) -> ResidualBounds:
    """The terms as averages over the rows of x, for any model and true score: exact bounds for their empirical law.

    Parameters
    ----------
    model, truth : functions from arrays (N, D) to arrays (N, D)
        The learnt and the true score.
    x : array (N, D)
        The test images.
    matrices : sequence of arrays (D, D)
        P_g of every element; see `matrices_of`.

    Returns
    -------
    ResidualBounds

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import empirical_bounds
    >>> x = np.random.default_rng(0).standard_normal((20, 2))
    >>> found = empirical_bounds(lambda x: 1.0 - x, lambda x: -x, x, [np.eye(2), -np.eye(2)])
    >>> found.lower <= found.residual <= found.upper
    True
    """

    def e(y: Array) -> Array:
        return model(y) - truth(y)

    here, moved = e(x), [e(x @ P.T) for P in matrices]
    return ResidualBounds(
        residual=float(residuals(model, x, matrices).mean()),
        breaking=float(residuals(truth, x, matrices).mean()),
        error_breaking=float(residuals(e, x, matrices).mean()),
        printed_error_breaking=_mean_square([there - here for there in moved]),
        error=_mean_square([here]),
        moved_error=_mean_square(moved),
    )


def _mean_square(values: Sequence[Array]) -> float:
    return float(np.mean([np.square(value).sum(1) for value in values]))


def equivariance_breaking(p: Gaussian, matrices: Sequence[Array]) -> float:
    """B(p) = E_{x ~ p, g} |Delta_g grad log p(x)|^2. Zero if and only if p is invariant under every g.

    Parameters
    ----------
    p : Gaussian
        The distribution.
    matrices : sequence of arrays (D, D)
        P_g of every element; see `matrices_of`.

    Returns
    -------
    float

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import Gaussian, equivariance_breaking
    >>> equivariance_breaking(Gaussian(np.ones(2), np.eye(2)), [np.eye(2), -np.eye(2)])
    4.0
    """
    return float(np.mean([p.score.residual(P).energy(p) for P in matrices]))


def mean_shift_residual(mean: npt.ArrayLike, variance: float) -> float:
    """E_g R = 2 |mu|^2 / sigma^4 for N(mu, sigma^2 I) under {Id, -Id}, at every x.

    Parameters
    ----------
    mean : array (D,)
        mu.
    variance : float
        sigma^2.

    Returns
    -------
    float

    Examples
    --------
    >>> from gepc.lab.theory import mean_shift_residual
    >>> mean_shift_residual([1.0, 1.0], 1.0)
    4.0
    """
    return float(2.0 * np.square(np.asarray(mean, dtype=np.float64)).sum() / variance**2)


def anisotropy_residual(first: float, second: float) -> float:
    """E R = (1/2)(1/v2 - 1/v1)^2 (v1 + v2) for N(0, diag(v1, v2)) under the quarter turns of the plane.

    Parameters
    ----------
    first, second : float
        v1 and v2.

    Returns
    -------
    float

    Examples
    --------
    >>> from gepc.lab.theory import anisotropy_residual
    >>> anisotropy_residual(1.0, 0.5)
    0.75
    """
    return float(0.5 * (1.0 / second - 1.0 / first) ** 2 * (first + second))


def error_term_counter_example(size: int = 4) -> ResidualBounds:
    """p = N(0, I), s_theta the score of N(0, 2 I), {Id, -Id}: all scores are equivariant, yet the printed bound is D/2.

    e(x) = x/2, so -e(-x) - e(x) = 0 while e(-x) - e(x) = -x: E|x|^2 = D, halved by the identity.

    Parameters
    ----------
    size : int
        The dimension D.

    Returns
    -------
    ResidualBounds

    Examples
    --------
    >>> from gepc.lab.theory import error_term_counter_example
    >>> found = error_term_counter_example()
    >>> found.residual, found.lower, round(found.printed_lower, 6)
    (0.0, 0.0, 2.0)
    """
    p = Gaussian(np.zeros(size), np.eye(size))
    return expected_bounds(Gaussian(p.mean, 2.0 * p.cov).score, p, [np.eye(size), -np.eye(size)])


@dataclass(frozen=True)
class Subspace:
    """The affine set origin + span(basis), basis (D, k) orthonormal: the manifold of the source images.

    Parameters
    ----------
    origin : float array (D,)
    basis : float array (D, k)
        Orthonormal columns.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import Subspace
    >>> line = Subspace.spanned_by(np.array([[1.0], [0.0]]))
    >>> line.project(np.array([[3.0, 4.0]])).tolist(), line.distance(np.array([[3.0, 4.0]])).tolist()
    ([[3.0, 0.0]], [4.0])
    """

    origin: Array
    basis: Array

    @classmethod
    def spanned_by(cls, vectors: Array, origin: Array | None = None) -> Subspace:
        """The span of the columns of `vectors` (D, k), through `origin` (default: 0).

        Parameters
        ----------
        vectors : float array (D, k)
        origin : float array (D,), optional

        Returns
        -------
        Subspace

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Subspace
        >>> line = Subspace.spanned_by(np.array([[1.0], [0.0]]))
        >>> np.abs(line.basis).tolist()
        [[1.0], [0.0]]
        """
        basis, triangle = np.linalg.qr(vectors)
        if np.abs(np.diag(triangle)).min(initial=np.inf) < 1e-10:
            raise InputError("the vectors that span a subspace must be linearly independent")
        return cls(np.zeros(len(vectors)) if origin is None else origin, basis)

    def project(self, x: Array) -> Array:
        """pi(x), the nearest point of the set.

        Parameters
        ----------
        x : float array (N, D)

        Returns
        -------
        float array (N, D)

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Subspace
        >>> line = Subspace.spanned_by(np.array([[1.0], [0.0]]))
        >>> line.project(np.array([[3.0, 4.0]])).tolist()
        [[3.0, 0.0]]
        """
        return self.origin + (x - self.origin) @ self.basis @ self.basis.T

    def distance(self, x: Array) -> Array:
        """d(x) = |x - pi(x)|.

        Parameters
        ----------
        x : float array (N, D)

        Returns
        -------
        float array (N,)

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Subspace
        >>> line = Subspace.spanned_by(np.array([[1.0], [0.0]]))
        >>> line.distance(np.array([[3.0, 4.0]]))
        array([4.])
        """
        return np.asarray(np.linalg.norm(x - self.project(x), axis=1), dtype=np.float64)

    def invariant_under(self, matrices: Sequence[Array]) -> bool:
        """Whether every P_g maps the set to itself; then pi(P_g x) = P_g pi(x), since P_g keeps distances.

        Parameters
        ----------
        matrices : orthogonal float arrays (D, D)

        Returns
        -------
        bool

        Examples
        --------
        >>> import numpy as np
        >>> from gepc.lab.theory import Subspace
        >>> line = Subspace.spanned_by(np.array([[1.0], [0.0]]))
        >>> line.invariant_under([-np.eye(2)])
        True
        """
        corners = np.vstack([self.origin, self.origin + self.basis.T])
        return all(bool(np.allclose(self.distance(corners @ P.T), 0.0, atol=1e-10)) for P in matrices)


@dataclass(frozen=True)
class CrossBounds:
    """Every term of the cross-backbone bounds at the points x (N, D).

    Parameters
    ----------
    residual : E_g R(x).
    residual_at_projection : E_g R(pi(x)).
    distance : d(x).
    lipschitz : L, given or the largest |s(y) - s(pi(y))| / d(y) over y = P_g x, which is all that the proof uses.
    growth : m, the smallest -<s(x) - s(pi(x)), u> / d(x), u the unit vector from pi(x) to x.
    breaking_growth : beta, the smallest sqrt(E_g|b_g(x)|^2) / d(x).

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import CrossBounds
    >>> bounds = CrossBounds(np.array([4.0]), np.array([1.0]), np.array([2.0]), 1.0, 0.5, 1.0)
    >>> bounds.lower.tolist(), bounds.upper.tolist()
    ([1.0], [34.0])

    See Also
    --------
    cross_bounds : computes the terms.
    """

    residual: Array
    residual_at_projection: Array
    distance: Array
    lipschitz: float
    growth: float
    breaking_growth: float

    @property
    def upper(self) -> Array:
        """2 E_g R(pi(x)) + 8 L^2 d(x)^2."""
        return 2.0 * self.residual_at_projection + 8.0 * np.square(self.lipschitz * self.distance)

    @property
    def lower(self) -> Array:
        """max(0, beta d - rho)^2, rho^2 = E_g R(pi(x))."""
        rho = np.sqrt(self.residual_at_projection)
        return np.square(np.maximum(self.breaking_growth * self.distance - rho, 0.0))

    @property
    def printed_lower(self) -> Array:
        """((m - L) d - rho)^2. Not a bound."""
        rho = np.sqrt(self.residual_at_projection)
        return np.square((self.growth - self.lipschitz) * self.distance - rho)


def cross_bounds(
    score: Field, x: Array, manifold: Subspace, matrices: Sequence[Array], lipschitz: float | None = None
) -> CrossBounds:
    """Every term at the rows of x, none of which may lie on the manifold.

    Parameters
    ----------
    score : function from arrays (N, D) to arrays (N, D)
        The score of the backbone.
    x : array (N, D)
        Points off the manifold.
    manifold : Subspace
        The source images. The group must map it to itself.
    matrices : sequence of arrays (D, D)
        P_g of every element; see `matrices_of`.
    lipschitz : float, optional
        The constant L. By default it is measured on the points.

    Returns
    -------
    CrossBounds

    Raises
    ------
    InputError
        If a point lies on the manifold, or if the group does not map the manifold to itself.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import Subspace, cross_bounds
    >>> line = Subspace.spanned_by(np.array([[1.0], [0.0]]))
    >>> found = cross_bounds(lambda x: 1.0 - x, np.array([[1.0, 2.0]]), line, [np.eye(2), -np.eye(2)])
    >>> bool((found.lower <= found.residual).all() and (found.residual <= found.upper).all())
    True
    """
    if not manifold.invariant_under(matrices):
        raise InputError("the group does not map this manifold to itself, so the projection does not commute with it")
    z, d = manifold.project(x), manifold.distance(x)
    if len(x) == 0 or d.min() < 1e-12:
        raise InputError("every point must lie off the manifold, where growth per distance is not defined")
    deviation = score(x) - score(z)
    moved = [score(x @ P.T) - score(z @ P.T) for P in matrices]
    steepest = max(float((np.linalg.norm(delta, axis=1) / d).max()) for delta in moved)
    b = np.stack([delta @ P - deviation for delta, P in zip(moved, matrices, strict=True)])
    return CrossBounds(
        residual=residuals(score, x, matrices).mean(1),
        residual_at_projection=residuals(score, z, matrices).mean(1),
        distance=d,
        lipschitz=steepest if lipschitz is None else lipschitz,
        growth=float((-np.einsum("ni,ni->n", deviation, x - z) / d**2).min()),
        breaking_growth=float((np.sqrt(np.square(b).sum(2).mean(0)) / d).min()),
    )


def cross_counter_example(x: Array, slopes: Sequence[float] = (1.0, 3.0)) -> CrossBounds:
    """s(x) = -A x, A = diag(slopes), {Id, -Id}, the manifold {0}: R = 0 everywhere, but the printed bound is positive.

    All assumptions hold, with m the smallest and L the largest slope: s(-x) = -s(x), whatever A is.

    Parameters
    ----------
    x : float array (N, number of slopes)
    slopes : list of float
        The diagonal of A.

    Returns
    -------
    CrossBounds

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.lab.theory import cross_counter_example
    >>> found = cross_counter_example(np.array([[1.0, 0.0]]))
    >>> found.residual.tolist(), found.printed_lower.tolist()
    ([0.0], [4.0])
    """
    size = len(slopes)
    score = Affine(-np.diag(np.asarray(slopes, dtype=np.float64)), np.zeros(size))
    origin = Subspace(np.zeros(size), np.zeros((size, 0)))
    return cross_bounds(score, x, origin, [np.eye(size), -np.eye(size)], lipschitz=max(slopes))
