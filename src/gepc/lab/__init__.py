"""The laboratory: what the paper's evaluation needs, and most users never open.

Baselines, benchmarks, data sets, radar, training, energy models, theory and reproduction. The library does not know
this package: methods, features, networks and commands are registered through the entry points in `pyproject.toml`,
as those of any other package are.
"""
