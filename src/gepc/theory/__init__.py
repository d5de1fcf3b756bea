"""The paper's statements as functions: each term of each formula, computed where scores are known exactly.

Images are row vectors here, (N, D), D = C H W in C order, and everything is float64. A *field* is any function from
such vectors to such vectors; `field_of` makes one from a backbone at one timestep. Group elements are matrices; see
`matrices_of`.
"""

from gepc.theory.bounds import CrossBounds as CrossBounds
from gepc.theory.bounds import ResidualBounds as ResidualBounds
from gepc.theory.bounds import Subspace as Subspace
from gepc.theory.bounds import anisotropy_residual as anisotropy_residual
from gepc.theory.bounds import cross_bounds as cross_bounds
from gepc.theory.bounds import cross_counter_example as cross_counter_example
from gepc.theory.bounds import empirical_bounds as empirical_bounds
from gepc.theory.bounds import equivariance_breaking as equivariance_breaking
from gepc.theory.bounds import error_term_counter_example as error_term_counter_example
from gepc.theory.bounds import expected_bounds as expected_bounds
from gepc.theory.bounds import mean_shift_residual as mean_shift_residual
from gepc.theory.fields import Affine as Affine
from gepc.theory.fields import Field as Field
from gepc.theory.fields import Gaussian as Gaussian
from gepc.theory.fields import Posterior as Posterior
from gepc.theory.fields import components_of as components_of
from gepc.theory.fields import contraction as contraction
from gepc.theory.fields import denoiser_jacobian as denoiser_jacobian
from gepc.theory.fields import directional_growth as directional_growth
from gepc.theory.fields import field_of as field_of
from gepc.theory.fields import matrices_of as matrices_of
from gepc.theory.fields import posterior as posterior
from gepc.theory.fields import posterior_covariance as posterior_covariance
from gepc.theory.fields import residuals as residuals
from gepc.theory.fields import tweedie as tweedie
