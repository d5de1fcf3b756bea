"""Values from the tables of the paper, to compare with. Keys are (ID, OOD) pairs in the names of the paper."""

from __future__ import annotations

PAIRS = (
    *(("C10", other) for other in ("SVHN", "CelebA", "C100")),
    *(("SVHN", other) for other in ("C10", "CelebA", "C100")),
    *(("CelebA", other) for other in ("C10", "SVHN", "C100")),
)

_A = tuple[float | None, ...]

MAIN: dict[str, tuple[_A, str]] = {
    "IC (ID-trained)": ((0.950, 0.863, 0.736, None, None, None, None, None, None), "-"),
    "IGEBM (ID-trained)": ((0.630, 0.700, 0.500, None, None, None, None, None, None), "-"),
    "VAEBM (ID-trained)": ((0.830, 0.770, 0.620, None, None, None, None, None, None), "-"),
    "Improved CD (ID-trained)": ((0.910, None, 0.830, None, None, None, None, None, None), "-"),
    "DoS (ID-trained)": ((0.955, 0.995, 0.571, 0.962, 1.00, 0.965, 0.949, 0.997, 0.956), "-"),
    "WAIC (ID-trained)": ((0.143, 0.928, 0.532, 0.802, 0.991, 0.831, 0.507, 0.139, 0.535), "-"),
    "TT (ID-trained)": ((0.870, 0.848, 0.548, 0.970, 1.00, 0.965, 0.634, 0.982, 0.671), "-"),
    "LR (ID-trained)": ((0.064, 0.914, 0.520, 0.819, 0.912, 0.779, 0.323, 0.028, 0.357), "-"),
    "NLL": ((0.091, 0.574, 0.521, 0.990, 0.999, 0.992, 0.814, 0.105, 0.786), "1000F"),
    "IC (diffusion)": ((0.921, 0.516, 0.519, 0.080, 0.028, 0.100, 0.485, 0.972, 0.510), "1000F"),
    "MSMA": ((0.957, 1.00, 0.615, 0.976, 0.995, 0.980, 0.910, 0.996, 0.927), "10F"),
    "DDPM-OOD": ((0.390, 0.659, 0.536, 0.951, 0.986, 0.945, 0.795, 0.636, 0.778), "350F"),
    "LMD": ((0.992, 0.557, 0.604, 0.919, 0.890, 0.881, 0.989, 1.00, 0.979), "104F"),
    "DiffPath": ((0.910, 0.897, 0.590, 0.939, 0.979, 0.953, 0.998, 1.00, 0.998), "10F"),
    "SCOPED": ((0.814, 0.940, 0.477, 0.971, 0.996, 0.959, 0.925, 0.994, 0.962), "2F+2J"),
    "GEPC": ((0.842, 0.999, 0.554, 0.880, 1.00, 0.897, 1.00, 1.00, 1.00), "16F"),
}

ID_TRAINED = ("typicality", "dos", "waic", "lr")
"""Registered methods that the paper lists as "ID-trained"; all others are training-free."""

MAIN_ROW = {
    "gepc": "GEPC",
    "nll_vlb": "NLL",
    "ic": "IC (diffusion)",
    "msma": "MSMA",
    "ddpm_ood": "DDPM-OOD",
    "lmd": "LMD",
    "diffpath": "DiffPath",
    "scoped": "SCOPED",
    "typicality": "TT (ID-trained)",
    "dos": "DoS (ID-trained)",
    "waic": "WAIC (ID-trained)",
    "lr": "LR (ID-trained)",
}
"""Registered method -> its row in MAIN."""

OTHER_BACKBONE = ("NLL", "IC (diffusion)", "MSMA", "DDPM-OOD", "LMD")
"""Rows that very likely come from one model per ID set, although the paper lists them under one backbone."""

SWEEP: dict[tuple[int, str], _A] = {
    (1, "uniform"): (0.871, 0.933, 0.534, 0.756, 1.000, 0.799, 0.999, 0.999, 0.999),
    (2, "uniform"): (0.835, 0.999, 0.554, 0.891, 1.000, 0.903, 1.000, 1.000, 1.000),
    (3, "uniform"): (0.785, 0.999, 0.554, 0.865, 1.000, 0.884, 1.000, 1.000, 1.000),
    (4, "uniform"): (0.758, 0.999, 0.565, 0.842, 1.000, 0.864, 1.000, 1.000, 0.999),
    (1, "inv_cv"): (0.870, 0.933, 0.539, 0.760, 1.000, 0.801, 1.000, 1.000, 0.999),
    (2, "inv_cv"): (0.841, 0.999, 0.558, 0.879, 1.000, 0.894, 1.000, 1.000, 1.000),
    (3, "inv_cv"): (0.791, 0.999, 0.556, 0.863, 1.000, 0.880, 1.000, 1.000, 0.999),
    (4, "inv_cv"): (0.769, 0.999, 0.566, 0.845, 1.000, 0.868, 1.000, 1.000, 0.999),
}

ABLATIONS: dict[str, dict[str, _A]] = {
    "transforms": {"mean over g": (0.858, 0.999, 0.539, 0.915, 1.000, 0.923, 1.000, 1.000, 1.000)},
    "calibration": {
        "kde": (0.840, 0.999, 0.556, 0.879, 1.000, 0.894, 1.000, 1.000, 1.000),
        "zscore": (0.841, 0.999, 0.557, 0.854, 1.000, 0.873, 1.000, 1.000, 1.000),
        "raw": (0.136, 0.999, 0.538, 0.911, 1.000, 0.918, 0.000, 0.000, 0.000),
        "mvn": (0.838, 0.999, 0.559, 0.881, 1.000, 0.891, 0.999, 1.000, 0.999),
    },
    "features": {
        "s": (0.839, 0.999, 0.556, 0.879, 1.000, 0.896, 1.000, 1.000, 0.999),
        "cos": (0.584, 0.999, 0.546, 0.873, 1.000, 0.896, 1.000, 1.000, 0.999),
        "pair": (0.820, 0.997, 0.550, 0.861, 0.999, 0.877, 0.999, 0.999, 0.998),
        "fusion": (0.831, 0.999, 0.557, 0.876, 1.000, 0.894, 1.000, 1.000, 0.999),
    },
}
"""Name of a table -> variant -> values."""

KEPT: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
    "C10": ((5, 136), (0.520, 0.480)),
    "SVHN": ((5, 15), (0.429, 0.571)),
    "CelebA": ((86, 172), (0.501, 0.499)),
}
"""ID set -> kept timesteps and their weights."""

RUNTIME_MS = {"kde": 69.92, "zscore": 70.02, "raw": 69.68, "mvn": 69.86}
