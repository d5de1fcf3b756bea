"""A backbone away from the images it was trained on (proposition "Cross-backbone pointwise bounds").

Let z = pi(x) be the nearest point of a set that the group maps to itself, d = |x - z| and delta(x) = s(x) - s(z). Then

    Delta_g s(x) = Delta_g s(z) + b_g(x),    b_g(x) = P_g^-1 delta(P_g x) - delta(x).

Both parts of b_g are at most L d long, which gives the upper bound E_g R(x) <= 2 E_g R(z) + 8 L^2 d^2.

The printed lower bound, ((m - L) d - rho)^2 with rho^2 = E_g R(z), squares a number that is never positive: the
directional condition says |delta| >= m d and the Lipschitz condition |delta| <= L d, so m <= L. A residual that grows
with the distance needs more than a score that grows: the growth itself must break the symmetry. If
E_g|b_g(x)|^2 >= beta^2 d^2, the triangle inequality in L2 over g gives

    E_g R(x) >= (beta d - rho)^2 where beta d >= rho, and nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gepc.core.errors import InputError
from gepc.theory.fields import Affine, Array, Field, residuals


@dataclass(frozen=True)
class Subspace:
    """The affine set origin + span(basis), basis (D, k) orthonormal: the manifold of the source images."""

    origin: Array
    basis: Array

    @classmethod
    def spanned_by(cls, vectors: Array, origin: Array | None = None) -> Subspace:
        """The span of the columns of `vectors` (D, k), through `origin` (default: 0)."""
        basis, triangle = np.linalg.qr(vectors)
        if np.abs(np.diag(triangle)).min(initial=np.inf) < 1e-10:
            raise InputError("the vectors that span a subspace must be linearly independent")
        return cls(np.zeros(len(vectors)) if origin is None else origin, basis)

    def project(self, x: Array) -> Array:
        """pi(x), the nearest point of the set."""
        return self.origin + (x - self.origin) @ self.basis @ self.basis.T

    def distance(self, x: Array) -> Array:
        """d(x) = |x - pi(x)|."""
        return np.asarray(np.linalg.norm(x - self.project(x), axis=1), dtype=np.float64)

    def invariant_under(self, matrices: Sequence[Array]) -> bool:
        """Whether every P_g maps the set to itself; then pi(P_g x) = P_g pi(x), since P_g keeps distances."""
        corners = np.vstack([self.origin, self.origin + self.basis.T])
        return all(bool(np.allclose(self.distance(corners @ P.T), 0.0, atol=1e-10)) for P in matrices)


@dataclass(frozen=True)
class CrossBounds:
    """Every term of the proposition at the points x (N, D).

    residual, residual_at_projection : E_g R(x) and E_g R(pi(x)).
    distance : d(x).
    lipschitz : L, given, or the largest |s(y) - s(pi(y))| / d(y) met over y = P_g x: all that the proof uses.
    growth : m, the smallest -<s(x) - s(pi(x)), u> / d(x), u the unit vector from pi(x) to x.
    breaking_growth : beta, the smallest sqrt(E_g|b_g(x)|^2) / d(x).
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
    """Measure every term at the rows of x, none of which may lie on the manifold."""
    if not manifold.invariant_under(matrices):
        raise InputError("the group does not map this manifold to itself, so the projection does not commute with it")
    z, d = manifold.project(x), manifold.distance(x)
    if len(x) == 0 or d.min() < 1e-12:
        raise InputError("every point must lie off the manifold; growth per distance is not defined on it")
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
    """s(x) = -A x, A = diag(slopes), {Id, -Id}, the manifold {0}: R = 0 everywhere, the printed bound is not.

    All assumptions hold, with m the smallest and L the largest slope: s(-x) = -s(x), whatever A is.
    """
    size = len(slopes)
    score = Affine(-np.diag(np.asarray(slopes, dtype=np.float64)), np.zeros(size))
    origin = Subspace(np.zeros(size), np.zeros((size, 0)))
    return cross_bounds(score, x, origin, [np.eye(size), -np.eye(size)], lipschitz=max(slopes))
