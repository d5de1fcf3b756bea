"""The expected residual between its bounds (proposition "Expected GEPC residual bounds").

With e = s_theta - s_p, the residual operator is linear: Delta_g s_theta = Delta_g s_p + Delta_g e. In L2 over x ~ p and
g ~ nu the two parts have norms sqrt(B) and sqrt(Delta_E), and the triangle inequality gives

    (sqrt(B) - sqrt(Delta_E))^2  <=  E R  <=  2 B + 4 E|e(x)|^2 + 4 E|e(P_g x)|^2

with Delta_E = E|P_g^-1 e(P_g x) - e(x)|^2 = E|e(P_g x) - P_g e(x)|^2. The paper prints Delta_E = E|e(P_g x) - e(x)|^2,
which is another number: taking P_g^-1 off the first term puts P_g on the second. `error_term_counter_example` shows the
printed bound fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gepc.theory.fields import Affine, Array, Field, Gaussian, residuals


@dataclass(frozen=True)
class ResidualBounds:
    """Every term of the proposition.

    residual : E R_t(x, g), what GEPC measures.
    breaking : B(p), the same for the true score of p.
    error_breaking : Delta_E = E|P_g^-1 e(P_g x) - e(x)|^2.
    printed_error_breaking : E|e(P_g x) - e(x)|^2, the form in print.
    error, moved_error : E|e(x)|^2 and E|e(P_g x)|^2.
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
    """The terms in closed form, for the score `model` of a Gaussian backbone and a Gaussian test law `p`."""

    def mean(field: Callable[[Array], Affine]) -> float:
        return float(np.mean([field(P).energy(p) for P in matrices]))

    truth = p.score
    e = model - truth
    return ResidualBounds(
        residual=mean(model.residual),
        breaking=mean(truth.residual),
        error_breaking=mean(e.residual),
        printed_error_breaking=mean(lambda P: e.after(P) - e),
        error=e.energy(p),
        moved_error=mean(e.after),
    )


def empirical_bounds(model: Field, truth: Field, x: Array, matrices: Sequence[Array]) -> ResidualBounds:
    """The terms as averages over the rows of x, for any model and any true score.

    The bounds are only triangle inequalities in L2, so they hold for the empirical law of the rows as they do for p:
    there is no sampling error in the inequality, whatever the number of rows.
    """

    def e(y: Array) -> Array:
        return model(y) - truth(y)

    moved = [e(x @ P.T) for P in matrices]
    here = e(x)
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
    """B(p) = E_{x ~ p, g} |Delta_g grad log p(x)|^2. Zero exactly when p is invariant under every g."""
    return float(np.mean([p.score.residual(P).energy(p) for P in matrices]))


def mean_shift_residual(mean: npt.ArrayLike, variance: float) -> float:
    """E_g R = 2 |mu|^2 / sigma^4 for N(mu, sigma^2 I) under {Id, -Id}, at every x."""
    return float(2.0 * np.square(np.asarray(mean, dtype=np.float64)).sum() / variance**2)


def anisotropy_residual(first: float, second: float) -> float:
    """E R = (1/2)(1/v2 - 1/v1)^2 (v1 + v2) for N(0, diag(v1, v2)) under the quarter turns of the plane."""
    return float(0.5 * (1.0 / second - 1.0 / first) ** 2 * (first + second))


def error_term_counter_example(size: int = 4) -> ResidualBounds:
    """p = N(0, I), s_theta the score of N(0, 2 I), {Id, -Id}: everything is equivariant, yet the printed bound is D/2.

    e(x) = x/2, so -e(-x) - e(x) = 0 while e(-x) - e(x) = -x: E|x|^2 = D, halved by the identity.
    """
    p = Gaussian(np.zeros(size), np.eye(size))
    return expected_bounds(Gaussian(p.mean, 2.0 * p.cov).score, p, [np.eye(size), -np.eye(size)])
