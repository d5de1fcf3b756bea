"""The paper's statements as functions: each term of each formula, computed where scores are known exactly.

Images are row vectors here, (N, D), D = C H W in C order, and everything is float64. A *field* is any function from
such vectors to such vectors; `field_of` makes one from a backbone at one timestep. Group elements are matrices; see
`matrices_of`. The statements, and where they are in the paper:

- `residuals`, `equivariance_breaking`: the residual R_t(x, g) and the functional B(p_t) (section "GEPC");
- `expected_bounds`, `empirical_bounds`: the proposition "Expected GEPC residual bounds", with the corrected error term;
- `cross_bounds`: the proposition "Cross-backbone pointwise bounds": its upper bound, and a lower bound that holds;
- `tweedie`, `posterior`, `posterior_covariance`, `contraction`, `directional_growth`: the appendix on score identities;
- `mean_shift_residual`, `anisotropy_residual`: the appendix "Gaussian sanity checks".
"""

from gepc.theory.bounds import (
    CrossBounds,
    ResidualBounds,
    Subspace,
    anisotropy_residual,
    cross_bounds,
    cross_counter_example,
    empirical_bounds,
    equivariance_breaking,
    error_term_counter_example,
    expected_bounds,
    mean_shift_residual,
)
from gepc.theory.fields import (
    Affine,
    Field,
    Gaussian,
    Posterior,
    components_of,
    contraction,
    denoiser_jacobian,
    directional_growth,
    field_of,
    matrices_of,
    posterior,
    posterior_covariance,
    residuals,
    tweedie,
)

__all__ = [
    "Affine",
    "CrossBounds",
    "Field",
    "Gaussian",
    "Posterior",
    "ResidualBounds",
    "Subspace",
    "anisotropy_residual",
    "components_of",
    "contraction",
    "cross_bounds",
    "cross_counter_example",
    "denoiser_jacobian",
    "directional_growth",
    "empirical_bounds",
    "equivariance_breaking",
    "error_term_counter_example",
    "expected_bounds",
    "field_of",
    "matrices_of",
    "mean_shift_residual",
    "posterior",
    "posterior_covariance",
    "residuals",
    "tweedie",
]
