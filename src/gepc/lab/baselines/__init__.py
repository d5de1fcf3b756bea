"""Published detection methods, one module for each kind; importing this package registers all of them."""

from gepc.lab.baselines import likelihood, paths, ratios, score, statistics

__all__ = ["likelihood", "paths", "ratios", "score", "statistics"]
