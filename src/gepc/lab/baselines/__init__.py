"""Published detection methods beyond those of `gepc.methods`; importing this package registers all of them."""

from gepc.lab.baselines import likelihood, paths, ratios, score

__all__ = ["likelihood", "paths", "ratios", "score"]
