"""Values from the tables of the paper, in `published.yaml`, to compare with. Pairs are in the names of the paper."""

from pathlib import Path
from typing import Any

from gepc.core.options import read_yaml

_A = tuple[float | None, ...]
_FILE = read_yaml(Path(__file__).with_suffix(".yaml"))

PAIRS = tuple((name, other) for name, others in _FILE["pairs"].items() for other in others)
MAIN: dict[str, tuple[_A, str]] = {row: (tuple(values), passes) for row, (values, passes) in _FILE["main"].items()}
MAIN_ROW: dict[str, str] = _FILE["rows"]
ID_TRAINED = ("typicality", "dos", "waic", "lr")
"""Registered methods that the paper lists as "ID-trained"; all others are training-free."""
OTHER_BACKBONE = ("NLL", "IC (diffusion)", "MSMA", "DDPM-OOD", "LMD")
"""Rows that very likely come from one model per ID set, although the paper lists them under one backbone."""
SWEEP: dict[tuple[int, str], _A] = {
    (keep, weights): tuple(values) for weights, rows in _FILE["sweep"].items() for keep, values in rows.items()
}
ABLATIONS: dict[str, dict[str, _A]] = {
    table: {variant: tuple(values) for variant, values in rows.items()} for table, rows in _FILE["ablations"].items()
}
KEPT: dict[str, dict[str, Any]] = _FILE["kept"]
"""ID set -> its `candidates`, the kept `timesteps`, and for each OOD set the `weights` of the kept ones."""
RUNTIME_MS: dict[str, tuple[float, float]] = {name: tuple(pair) for name, pair in _FILE["runtime_ms"].items()}
RUNTIME_AUROC = {name: values[PAIRS.index(("SVHN", "C100"))] for name, values in ABLATIONS["calibration"].items()}
SAR: dict[str, tuple[float, float, float]] = {name: tuple(row) for name, row in _FILE["sar"].items()}
"""Data set with ships -> AUROC, FPR95 and AUPR of GEPC."""
